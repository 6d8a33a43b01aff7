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
    assert "It was 64 · batch · seq, it is 64 · batch · seq + 4 · seq²" in text
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
