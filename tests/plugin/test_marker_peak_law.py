"""``peak_law``: how the peak grows over the sizes of a parametrized test."""

import pytest

ATTENTION = """
import pytest
import torch

@pytest.mark.peak_law({degrees})
@pytest.mark.parametrize("seq", {seq})
@pytest.mark.parametrize("batch", {batch})
def test_attention(batch, seq):
    q = torch.zeros(batch, 2, seq, 4, requires_grad=True)
    scores = q @ q.transpose(-1, -2)
    (scores.softmax(-1) @ q).sum().backward()
"""
HIDDEN = """
import pytest
import torch

@pytest.mark.peak_law(seq=1)
@pytest.mark.parametrize("seq", [64, 128, 256, 512])
def test_mask(seq):
    weights = torch.zeros(4_000_000)
    del weights
    mask = torch.zeros(seq, seq)
"""


def attention(degrees: str, seq: object = (64, 128, 256), batch: object = (1, 2, 4)) -> str:
    return ATTENTION.format(degrees=degrees, seq=seq, batch=batch)


@pytest.mark.native
def test_higher_power_fails_at_the_largest_sizes_and_names_its_lines(session) -> None:
    """The square of the scores breaks the limit, and the lines that make it are named."""
    run = session(attention("seq=1, batch=1"), "--cka-memory-device=cpu", forked=True)
    run.assert_outcomes(passed=8, failed=1)
    text = " ".join(run.text.split())
    assert "test_attention[4-256]" in text
    assert "the peak grows with seq to the power of 2, allowed 1: peak = " in text
    assert "q @ q.transpose(-1, -2) (8)" in text
    assert run.region_of("test_attention[4-256]")["breaches"]


@pytest.mark.native
def test_allowed_power_is_kept(session) -> None:
    """A square is not accused if it is allowed."""
    run = session(attention("seq=2, batch=1", (32, 64, 128, 256)), "--cka-memory-device=cpu",
                  forked=True)  # fmt: skip
    run.assert_outcomes(passed=12)
    assert "not judged" not in run.text


@pytest.mark.native
def test_square_below_the_peak_of_every_run_is_found(session) -> None:
    """A mask of 1 MB is far below 16 MB of weights, and above them at larger sizes."""
    run = session(HIDDEN, "--cka-memory-device=cpu", forked=True)
    run.assert_outcomes(passed=3, failed=1)
    text = " ".join(run.text.split())
    assert "grows with seq to the power of 2, allowed 1: peak = 4 · seq² bytes" in text
    assert "torch.zeros(seq, seq)" in text


@pytest.mark.slow
@pytest.mark.native
def test_sizes_in_several_processes_are_judged_when_all_have_run(session) -> None:
    """The session fails after its last test."""
    run = session(HIDDEN, "--cka-memory-device=cpu", "-n2", forked=True)
    assert "FAILED: test_it.py::test_mask[512]: peak_law(seq=1): the peak grows" in " ".join(
        run.text.split()
    )


@pytest.mark.native
def test_too_few_values_are_an_error_that_says_what_to_do(session) -> None:
    """Two values lie on a line whatever the law is."""
    run = session(attention("seq=1", (64, 128), (1,)), "--cka-memory-device=cpu", forked=True)
    run.assert_outcomes(passed=1, failed=1)
    text = " ".join(run.text.split())
    assert "cannot be judged: seq has 2 values and 3 are needed; parametrize the test" in text


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("", "peak_law(): no size is given; write e.g. peak_law(seq=1, batch=1)"),
        ("seq=-1", "peak_law(seq=-1): seq=-1 is not a whole number from 0 to 4"),
        ("1", "peak_law(1): wrong arguments; write e.g. @pytest.mark.peak_law(seq=1, batch=1)"),
        ("heads=1", "peak_law(heads=1): the test is not parametrized by heads; write e.g."),
    ],
)
def test_wrong_arguments_are_refused(scripted, degrees: str, message: str) -> None:
    """Before any test runs, with what to write instead."""
    scripted(attention(degrees)).assert_refused(message)
