"""What each marker builds: its figure and text, what must be measured, and ends of messages."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cka_memory import LimitError, RegionRecord, limits
from pytest_cka_memory.core.retention import Holding, Sample, growth_bytes_per_batch
from pytest_cka_memory.limits import (
    Breach,
    FlatProcess,
    Maximum,
    Unjudged,
    limit_from_marker,
)
from pytest_cka_memory.limits.figures import lines_about
from pytest_cka_memory.units import MB

MakeRecord = Callable[..., RegionRecord]


@pytest.mark.parametrize(
    ("marker", "args", "text", "figure", "allowed_bytes", "addition"),
    [
        ("max_level_mb", (2,), "max_level_mb(2)", "peak_bytes", 2 * MB, ""),
        ("no_cycles", (), "no_cycles", "cycle_bytes", 0, "cycles"),
        ("max_cycles_mb", (2,), "max_cycles_mb(2)", "cycle_bytes", 2 * MB, "cycles"),
        *[
            (f"max_{of}_mb", (2,), f"max_{of}_mb(2)", f"{of}_increase_bytes", 2 * MB, addition)
            for of, addition in (("process", "process"), ("outside", "driver"))
        ],
    ],
)
def test_marker_limits_one_figure_and_says_what_must_be_measured(
    marker: str, args: tuple[object], text: str, figure: str, allowed_bytes: int, addition: str
) -> None:
    """Each marker has its figure, bytes and text, and asks for what is not always measured."""
    limit = limit_from_marker(marker, args, {})
    assert isinstance(limit, Maximum)
    assert (limit.text, limit.figure, limit.allowed_bytes) == (text, figure, allowed_bytes)
    assert limit.addition == addition


def test_growth_of_the_process_is_allowed_up_to_a_megabyte_by_default() -> None:
    """The default tolerance is 1 MB after two batches of warm-up, and is not in the text."""
    limit = limit_from_marker("flat_process_per_batch", (), {})
    assert limit == FlatProcess("flat_process_per_batch", MB, 2)
    other = limit_from_marker("flat_process_per_batch", (2,), {"warmup": 3})
    assert other == FlatProcess("flat_process_per_batch(tolerance_mb=2, warmup=3)", 2 * MB, 3)


@pytest.mark.parametrize("marker", ["max_process_mb", "flat_process_per_batch"])
def test_limit_on_the_process_needs_psutil(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    """Without psutil the marker is refused, and the message says how to install it."""
    monkeypatch.setattr(limits, "find_spec", lambda name: None)
    with pytest.raises(LimitError) as refused:
        limit_from_marker(marker, (1,), {})
    assert str(refused.value) == (
        f"{marker}(1): measuring the memory of the process needs psutil, which is not installed; "
        "run pip install 'pytest-cka-memory[process]'"
    )


def test_memory_outside_the_allocator_is_explained_by_levels_and_reserve(
    record: MakeRecord,
) -> None:
    """The message has the level at entry, the highest one, and the rise of torch's reserve."""
    limit = limit_from_marker("max_outside_mb", (1,), {})
    outside = {"outside_start_bytes": 2 * MB, "outside_peak_bytes": 5 * MB}
    reserve = {"reserved_start_bytes": MB, "reserved_peak_bytes": 5 * MB}
    without, beside = limit.judge(record(**outside)), limit.judge(record(**outside, **reserve))
    assert isinstance(without, Breach)
    assert isinstance(beside, Breach)
    assert without.message.endswith(
        "too much; it was 2.00 MB at entry and 5.00 MB at its highest, and torch's reserve rose "
        "by 0 at most"
    )
    assert beside.message.endswith("torch's reserve rose by 4.00 MB at most")


def test_memory_in_cycles_is_said_to_wait_for_the_collector(record: MakeRecord) -> None:
    """The message says how long the memory stays allocated."""
    breach = limit_from_marker("no_cycles", (), {}).judge(record(cycle_bytes=4))
    assert isinstance(breach, Breach)
    assert breach.message == (
        "memory in reference cycles 4 bytes, allowed 0 bytes: 4 bytes too much; it stays allocated "
        "until the garbage collector runs"
    )


def test_memory_of_the_process_is_explained_by_what_torch_has(record: MakeRecord) -> None:
    """The message about the process says how much of the rise is torch's."""
    limit = limit_from_marker("max_process_mb", (1,), {})
    process = {"process_start_bytes": MB, "process_peak_bytes": 9 * MB, "process_torch_bytes": 0}
    breach = limit.judge(record(**process))
    assert isinstance(breach, Breach)
    assert "too much; torch's CPU allocator took" in breach.message


@pytest.mark.parametrize(
    ("graph", "of_torch", "advice"),
    [
        (None, 0, "look for memory outside tensors"),
        ("the autograd graph of `total` grows", 0, "the autograd graph of `total` grows"),
        ("the autograd graph of `total` grows", 8 * MB, "limit the peak with max_peak_mb"),
    ],
)
def test_process_that_grows_by_a_graph_is_told_which(
    record: MakeRecord, graph: str | None, of_torch: int, advice: str
) -> None:
    """The graph is the advice if torch's tensors do not have most of the rise."""
    process = {"process_start_bytes": MB, "process_peak_bytes": 9 * MB}
    found = record(**process, process_torch_bytes=of_torch, growing_graph=graph)
    assert lines_about(found)[-1].startswith(f"what to do: {advice}")


def test_scope_is_in_the_text_of_the_limit() -> None:
    """A limit over a class is named as its user has written it."""
    limit = limit_from_marker("max_retained_mb", (1,), {"scope": "class"})
    assert limit == replace(
        limits.max_retained_mb(1), scope="class", text="max_retained_mb(1, scope='class')"
    )


def test_scope_of_a_limit_that_is_judged_per_region_is_refused() -> None:
    """Growth per batch belongs to one region, so that its limit has no scope."""
    with pytest.raises(LimitError) as refused:
        limit_from_marker("flat_per_batch", (), {"scope": "module"})
    assert str(refused.value) == (
        "flat_per_batch(scope='module'): flat_per_batch is always judged for each region; leave "
        "out scope='module'"
    )


@pytest.mark.parametrize(
    ("of", "instead"),
    [
        ("process", "the marker flat_process_per_batch, which judges steady growth"),
        ("reserve", "write one of 'allocated', 'reserved', 'pools', 'outside'"),
        (["reserved"], "write one of 'allocated', 'reserved', 'pools', 'outside'"),
    ],
)
def test_growth_of_an_unknown_level_is_refused(of: object, instead: str) -> None:
    """The message has what to write instead."""
    with pytest.raises(LimitError) as refused:
        limit_from_marker("flat_per_batch", (), {"of": of})
    problem = str(refused.value)
    assert problem.startswith(f"flat_per_batch(of={of!r}): of={of!r} is not a figure")
    assert problem.endswith(instead)


def test_growth_of_a_level_that_is_not_known_is_not_judged(record: MakeRecord) -> None:
    """A CPU has no reserve, and without the driver nothing is known outside the allocator."""
    found = record(levels=[4] * 9)
    reserved, outside = (limits.flat_per_batch(of=of) for of in ("reserved", "outside"))
    assert reserved.judge(found) == Unjudged(
        "flat_per_batch(of='reserved')", "this device has no reserve"
    )
    assert outside.addition == "driver"
    assert isinstance(outside.judge(found), Unjudged)
    assert not outside.reports_host


def test_growth_of_the_reserve_counts_samples_with_garbage() -> None:
    """What garbage takes of the reserve is taken, so no sample is left out."""
    samples = [
        Sample(number, None, 4, 4, 4, may_have_garbage=number % 2 == 0, reserved_bytes=8 * number)
        for number in range(1, 14)
    ]
    assert growth_bytes_per_batch(samples, level="reserved_bytes") == 8
    assert growth_bytes_per_batch(samples) == 0
    assert growth_bytes_per_batch(samples, level="outside_bytes") is None


def test_warning_limit_says_so_in_its_text() -> None:
    """``warn=True`` is not an argument of the builder, and is part of the text."""
    limit = limit_from_marker("zero_retention", (), {"warn": True})
    assert limit == replace(limits.zero_retention(), warns=True, text="zero_retention(warn=True)")


def test_warmup_error_quotes_what_was_given() -> None:
    """The message has the argument and what to write in its place."""
    with pytest.raises(LimitError) as refused:
        limits.flat_per_batch(warmup=-1)
    assert (
        str(refused.value)
        == "warmup=-1 is not a whole number of at least 0; write a number of batches, e.g. warmup=1"
    )


@pytest.mark.parametrize("levels", [[4 * i for i in range(9)], [0]], ids=["growth", "too-few"])
def test_breach_of_a_growth_limit_names_the_figure_that_is_explained(
    record: MakeRecord, levels: list[int]
) -> None:
    """The figure of the breach is growth per batch, whose holders are then searched for."""
    breach = limits.flat_per_batch().judge(record(levels=levels))
    assert isinstance(breach, Breach)
    assert breach.figure == "growth_bytes_per_batch"


def test_note_about_the_host_leaves_out_what_is_not_known(record: MakeRecord) -> None:
    """What two batches left is noted without a line, holder and advice if none is known."""
    assert limits.flat_per_batch().reports_host
    left = Holding(bytes=128, count=2, batches=2)
    found = limits.flat_per_batch().verdicts(record(levels=[0] * 9, host_retained=(left,)))
    (note,) = [verdict for verdict in found if verdict is not None]
    assert note.reason == (
        "2 tensors, 128 bytes, allocated in several batches, are retained and not judged"
    )
