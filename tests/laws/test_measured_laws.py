"""Laws of real code on the CPU: exact far beyond what was run, with the lines of each term."""

import sys

import numpy as np
import pytest
import torch

from pytest_cka_memory import MemoryProbe, RegionError
from pytest_cka_memory.testing import ScriptedMeter

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("imports_excluded_from_search")]
KNOWS_EXPRESSIONS = sys.version_info >= (3, 11)
"""Whether Python knows which part of a line ran."""


@pytest.fixture
def probe() -> MemoryProbe:
    return MemoryProbe("cpu")


def attention(batch: int, seq: int, heads: int = 2) -> None:
    """One layer whose scores are a square of seq."""
    q = torch.zeros(batch, heads, seq, 4, requires_grad=True)
    scores = q @ q.transpose(-1, -2)
    weights = scores.softmax(-1)
    (weights @ q).sum().backward()


def test_square_term_names_its_lines(probe: MemoryProbe) -> None:
    """The scores and the weights are kept for the backward pass, which adds their gradient."""
    law = probe.law(attention, batch=(1, 2, 4), seq=(16, 32, 64))
    assert (law.degree("batch"), law.degree("seq"), law.is_exact) == (1, 2, True)
    squares = [term for term in law.terms if term.powers == {"batch": 1, "seq": 2}]
    lines = dict(squares[0].lines)
    at = attention.__code__.co_firstlineno
    name = next(line for line in lines if "scores.softmax(-1)" in line)
    code = "scores.softmax(-1)" if KNOWS_EXPRESSIONS else "weights = scores.softmax(-1)"
    assert name.endswith(f":{at + 4} in attention: {code}")
    assert lines[name] == 8  # 4 bytes for each of two heads
    assert sum(lines.values()) == squares[0].coefficient


def test_prediction_at_16_times_the_largest_sizes_is_exact(probe: MemoryProbe) -> None:
    """To the byte, although none of the runs was larger than a 256th of it."""
    law = probe.law(attention, batch=(1, 2, 4), seq=(8, 16, 32))
    sizes = {"batch": 8, "seq": 1024}
    predicted = law.at(**sizes)
    assert (predicted.status, predicted.times) == ("extrapolated", 16)
    assert predicted.requested_bytes == law.measure(**sizes)


def test_law_holds_across_the_moment_that_takes_over(probe: MemoryProbe) -> None:
    """A constant first, and a square that no run has at its peak."""

    def step(n: int) -> None:
        torch.ones(250_000)
        torch.ones(n, n)

    law = probe.law(step, n=(8, 16, 32))
    assert [law.at(n=n).requested_bytes for n in (64, 512, 1000)] == [
        1_000_000,
        2**20,
        4_000_000,
    ]
    assert law.measure(n=512) == 2**20
    assert law.degree("n") == 2


def test_warmup_takes_what_only_a_first_run_allocates(probe: MemoryProbe) -> None:
    """A cache that is made once is in no sample."""
    kept: list[torch.Tensor] = []

    def step(n: int) -> None:
        if not kept:
            kept.append(torch.ones(1_000_000))
        torch.ones(n)

    law = probe.law(step, n=(8, 16, 32))
    assert str(law.pieces[0]) == "4 · n"
    assert law.runs == 4


def test_retained_bytes_have_a_law_of_their_own(probe: MemoryProbe) -> None:
    """What each call leaves, by line."""
    kept: list[torch.Tensor] = []
    law = probe.law(lambda n: kept.append(torch.ones(n)), law_of="retained", n=(8, 16, 32))
    assert str(law.pieces[0]) == "4 · n"
    code = "torch.ones(n)" if KNOWS_EXPRESSIONS else "n=(8, 16, 32))"
    assert law.terms[0].lines[0][0].endswith(code)


@pytest.mark.parametrize(
    ("most", "text", "growth"),
    [(10_000, "400 · calls", "linear"), (2, "800", "bounded"), (40, "16,000", "bounded")],
    ids=["unbounded", "full", "full-later"],
)
def test_growth_in_the_number_of_calls_is_a_law(
    probe: MemoryProbe, most: int, text: str, growth: str
) -> None:
    """A cache without a bound grows with each call; one of 2 or 40 entries does not."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.ones(100))
        del kept[:-most]

    law = probe.law(step, law_of="retained", calls=(2, 4, 8))
    assert str(law.pieces[0]) == text
    assert law.growth("calls") == growth


def test_cache_that_grows_with_the_logarithm_is_told_from_a_linear_one(probe: MemoryProbe) -> None:
    """It keeps one tensor for each power of two, in each run from the start."""

    def step(n: int) -> None:
        torch.ones(100 * n.bit_length())

    assert probe.law(step, n=(2, 4, 8, 16, 32, 64)).growth("n") == "logarithmic"


def test_step_that_allocates_nothing_has_the_law_of_nothing(probe: MemoryProbe) -> None:
    """Zero bytes at any size."""
    law = probe.law(lambda n: n, n=(1, 2))
    assert (str(law.pieces[0]), law.degree("n"), law.at(n=10**6).requested_bytes) == ("0", 0, 0)
    assert law.terms == ()


def test_memory_of_other_libraries_counts(probe: MemoryProbe) -> None:
    """Memory that NumPy lends to a tensor is a block of the line that lends it."""
    law = probe.law(lambda n: torch.from_numpy(np.ones((n, n))).sum(), n=(8, 16, 32))
    assert law.degree("n") == 2


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({}, ValueError, "needs a size that varies"),
        ({"n": 3}, ValueError, "needs a size that varies"),
        (
            {"n": (3,)},
            ValueError,
            r"n=\(3,\) must contain at least two different whole numbers",
        ),
        ({"n": (0, 1)}, ValueError, "two different whole numbers, each at least 1"),
        ({"n": (1, 2.5)}, ValueError, "at least two different whole numbers"),
        ({"m": (1, 2)}, TypeError, "the step has no parameter 'm'; it takes n"),
        ({"n": (1, 2), "law_of": "beauty"}, ValueError, "write one of 'peak', 'retained'"),
    ],
)
def test_wrong_sizes_are_refused(probe: MemoryProbe, sizes, error, message) -> None:
    """An error says what to write instead."""

    def step(n: int) -> None:
        torch.ones(n)

    with pytest.raises(error, match=message):
        probe.law(step, **sizes)


def test_doubtful_prediction_is_measured_if_asked(probe: MemoryProbe) -> None:
    """A step that allocates otherwise far beyond the runs: only a run there can know."""

    def step(n: int) -> None:
        torch.zeros(n if n % 8 == 0 else 8 * n)

    law = probe.law(step, n=(8, 16, 32))
    predicted = law.at(n=1001)
    assert not predicted.is_safe
    measured = law.at(measure=True, n=1001)
    assert measured.status == "measured"
    assert measured.is_safe
    assert measured.requested_bytes == 8 * 4 * 1001 == law.at(n=1001).requested_bytes
    assert law.at(measure=True, n=1000).status == "extrapolated"  # nothing is in doubt: no run


def test_wrong_questions_are_refused(probe: MemoryProbe) -> None:
    """A law knows its sizes, and needs a card for the largest one."""
    law = probe.law(lambda n: torch.ones(n), n=(8, 16, 32))
    with pytest.raises(ValueError, match="no size 'seq'; write one of n"):
        law.degree("seq")
    with pytest.raises(ValueError, match="'n' is missing"):
        law.at()
    with pytest.raises(ValueError, match="n must be a whole number of at least 1, got 0"):
        law.at(n=0)
    with pytest.raises(ValueError, match="unknown card 'h900'"):
        law.largest("n", card="h900")
    with pytest.raises(ValueError, match="needs either a card or an amount of memory"):
        law.largest("n")
    # Tensors that other tests of this process keep count as well, so the memory is beside them.
    memory_mb = law.start_bytes / 2**20 + 1
    found = law.largest("n", memory=memory_mb)
    assert found == 2**20 // 4
    assert not found.is_verified
    assert "measured on cpu, which cannot be limited to the memory of a card" in found.how
    with pytest.raises(RegionError, match=r"largest\(verify=True\) cannot .* measured on cpu"):
        law.largest("n", memory=memory_mb, verify=True)


def test_device_that_records_no_blocks_has_a_law_of_its_peak() -> None:
    """Only the peak of each run is known, so no line is."""
    meter = ScriptedMeter(has_reserve=True)

    def step(n: int) -> None:
        meter.free(meter.allocate(100 + 7 * n))

    law = MemoryProbe(meter=meter).law(step, n=(1, 2, 4))
    assert str(law.pieces[0]) == "100 + 7 · n"
    assert law.terms[0].lines == ()
    reserved = MemoryProbe(meter=meter).law(step, law_of="reserved", n=(1, 2, 4))
    assert reserved.degree("n") in (0, 1)


def test_running_out_of_memory_names_the_sizes() -> None:
    """The error says at which sizes, and what to give instead."""

    def step(n: int) -> None:
        if n > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 B")

    class Card(ScriptedMeter):
        device = "cuda:0"

    with pytest.raises(RegionError, match="ran out of memory at n=4; give smaller sizes"):
        MemoryProbe(meter=Card()).law(step, n=(1, 2, 4))


def test_text_fits_a_screen_and_names_the_pieces(probe: MemoryProbe) -> None:
    """The headline, the pieces, and the terms by line."""
    lines = str(probe.law(attention, batch=(1, 2, 4), seq=(16, 32, 64))).splitlines()
    assert lines[0].startswith("peak on cpu, in bytes: 10 runs, 9 samples, the law matches all")
    assert lines[1].startswith("peak = ")
    assert "batch · seq²" in lines[1]
    assert len(lines) <= 24


def test_notebooks_show_the_text(probe: MemoryProbe) -> None:
    """Its lines are kept, and what is code is escaped."""
    law = probe.law(lambda n: torch.ones(n) < 1, n=(8, 16, 32))
    shown = law._repr_html_()
    assert shown.startswith("<pre>peak on cpu")
    assert "torch.ones(n) &lt; 1" in shown


def test_plot_draws_the_law_and_what_was_measured(probe: MemoryProbe) -> None:
    """The samples of one size are points on the curve."""
    pytest.importorskip("matplotlib").use("agg")
    law = probe.law(attention, batch=(1, 2, 4), seq=(16, 32, 64))
    ax = law.plot("seq", batch=1)
    curve, points = ax.lines[-2:]
    drawn = dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True))
    assert len(points.get_xdata()) >= 3
    assert max(drawn.values()) * 2**20 == law.at(batch=1, seq=256).requested_bytes
    assert ax.get_title() == "peak at batch=1"
