"""A law in the baseline file: a coefficient that rises fails, with the line."""

import json
from pathlib import Path

import pytest

SOURCE = """
import torch

def test_it(cka_memory):
    def step(batch, seq):
        x = torch.zeros(batch, seq, 8)
        mask = {mask}
        return x.relu()

    law = cka_memory.law(step, batch=(1, 2, 4), seq=(16, 32, 64))
    assert law.degree("batch") == 1
"""
PLAIN, MASKED = SOURCE.format(mask="None"), SOURCE.format(mask="torch.zeros(seq, seq)")


@pytest.mark.native
def test_law_that_rose_fails_with_both_laws_and_the_line(session, baseline_path: Path) -> None:
    """The mask of seq² is named, beside the figures that rose."""
    options = "--cka-memory-device=cpu", f"--cka-memory-baseline={baseline_path}"
    run = session(PLAIN, *options, "--cka-memory-update-baseline", forked=True)
    run.assert_outcomes(passed=1)
    line = json.loads(baseline_path.read_text())[1]
    assert line["label"] == "law of step"
    assert line["law"]["pieces"][0]["terms"][0]["bytes"] == "64"
    session(PLAIN, *options, forked=True).assert_outcomes(passed=1)
    run = session(MASKED, *options, forked=True)
    run.assert_outcomes(failed=1)
    text = " ".join(run.text.split())
    assert "It was 64 · batch · seq; now it is 64 · batch · seq + 4 · seq²" in text
    assert "torch.zeros(seq, seq): +4" in text
    assert run.region["law"]["sizes"] == ["batch", "seq"]


@pytest.mark.native
def test_a_law_survives_the_update_of_its_file(session, baseline_path: Path) -> None:
    """A second update changes nothing."""
    options = "--cka-memory-device=cpu", f"--cka-memory-baseline={baseline_path}"
    session(PLAIN, *options, "--cka-memory-update-baseline", forked=True)
    before = baseline_path.read_text()
    run = session(PLAIN, *options, "--cka-memory-update-baseline", forked=True)
    assert "1 unchanged" in run.text
    assert baseline_path.read_text() == before


STEPS = """
import torch

def step(batch, seq=64):
    hidden = torch.zeros(batch, seq, 1024, device="cuda")
    scores = torch.zeros(batch, seq, seq, device="cuda")
    return torch.softmax(scores, -1), hidden
"""
SESSION = """
def test_it(cka_memory):
    law = cka_memory.law("steps.py:step", batch=(1, 2, 4), card="{card}")
    assert law.degree("batch") == 1
"""


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize("device", ["cpu", "emulate:cuda:a10,values=off"])
def test_committed_law_of_a_step_by_name(
    session, pytester: pytest.Pytester, baseline_path: Path, device: str, forked_children: None
) -> None:
    """It is compared in a session on any device; another card is another law."""
    options = f"--cka-memory-device={device}", f"--cka-memory-baseline={baseline_path}"
    pytester.makepyfile(steps=STEPS)
    run = session(SESSION.format(card="t4"), *options, "--cka-memory-update-baseline", forked=True)
    run.assert_outcomes(passed=1)
    line = json.loads(baseline_path.read_text())[1]
    assert line["label"] == "law of steps.py:step"
    assert line["law"]["on"] == "emulate:cuda:t4,values=off"
    assert next(iter(line["law"]["pieces"][0]["terms"][0]["lines"])).startswith("steps.py:")
    session(SESSION.format(card="t4"), *options, forked=True).assert_outcomes(passed=1)
    run = session(SESSION.format(card="h100"), *options, forked=True)
    run.assert_outcomes(failed=1)
    text = " ".join(run.text.split())
    assert "was measured on emulate:cuda:t4,values=off, but this one on emulate:cuda:h100" in text
    pytester.makepyfile(steps=STEPS.replace("seq, 1024", "seq, 2048"))
    run = session(SESSION.format(card="t4"), *options, forked=True)
    run.assert_outcomes(failed=1)
    assert "It was 294,912 · batch; now it is 557,056 · batch" in " ".join(run.text.split())
