"""A committed baseline on another machine: other threads, another instruction set."""

from pathlib import Path

import pytest

SOURCE = """
import pytest
import torch

KEPT = []

@pytest.mark.memory_baseline
def test_attention(cka_memory):
    query = torch.ones(1, 1, 2048, 16)
    with cka_memory.measure("attention"):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
"""
UPDATE = "--cka-memory-update-baseline"
CPU = "--cka-memory-device=cpu"
pytestmark = pytest.mark.native


def on_threads(source: str, count: int) -> str:
    """Return the source of a session on a machine with so many threads."""
    return source.replace("import torch\n", f"import torch\ntorch.set_num_threads({count})\n")


def test_peak_with_other_threads_is_judged_without_scratch_memory(session, pytester):
    """The same code passes and the line says why; then this machine gets a line of its own."""
    session(on_threads(SOURCE, 1), CPU, UPDATE, forked=True).assert_outcomes(passed=1)
    run = session(on_threads(SOURCE, 2), CPU, forked=True)
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "ok"
    page = Path(__file__).parents[2] / "docs" / "how-to" / "baselines.md"
    shown = page.read_text("utf-8").partition("tests/plugin/test_machines.py -->\n```text\n")[2]
    assert shown.partition("```")[0] in run.text
    session(on_threads(SOURCE, 2), CPU, UPDATE, forked=True).assert_outcomes(passed=1)
    for count in (1, 2):
        again = session(on_threads(SOURCE, count), CPU, forked=True)
        again.assert_outcomes(passed=1)
        assert "not judged" not in again.text
    file = (pytester.path / "cka-memory-baseline.json").read_text("utf-8")
    assert file.count("test_attention") == 2


@pytest.mark.parametrize(
    "worse",
    [
        "        torch.empty(60_000)\n        query.add(1)",  # one tenth of the peak and more
        "        KEPT.append(torch.ones(10))",
    ],
    ids=["peak", "retained"],
)
def test_worse_code_fails_on_another_machine(session, worse):
    """What does not depend on the machine is judged as on the first one."""
    session(on_threads(SOURCE, 1), CPU, UPDATE, forked=True)
    changed = SOURCE.replace('measure("attention"):\n', f'measure("attention"):\n{worse}\n')
    source = on_threads(changed.replace("torch.empty(60_000)", "kept = torch.empty(60_000)"), 2)
    session(source, CPU, forked=True).assert_outcomes(failed=1)


def test_report_and_history_have_the_facts(session, pytester):
    """Threads, instruction set and processor are in each of them."""
    run = session(on_threads(SOURCE, 2), CPU, "--cka-memory-history=h.jsonl", forked=True)
    facts = run.report["session"]["conditions"]
    assert facts["threads"] == "2"
    assert {"instruction_set", "processor"} <= facts.keys()
    assert '"threads": "2"' in (pytester.path / "h.jsonl").read_text("utf-8")
