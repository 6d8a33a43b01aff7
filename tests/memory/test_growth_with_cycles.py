"""Growth of loops that leave garbage in reference cycles, compared with a collection per batch."""

import gc
import inspect
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from growth_programs import (
    KINDS,
    OWNERS,
    WAYS,
    Cycle,
    KeepsOne,
    LeavesOne,
    LeavesViews,
    Part,
    check_random_loops,
    growth,
)

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.measure.batch_samples import BatchSamples

LENGTHS = (5, 8, 10, 11, 12, 13, 15, 19, 27, 28, 40, 41, 50, 66, 80)


@pytest.fixture
def lengths(is_native: bool) -> tuple[int, ...]:
    """Numbers of batches; a region of the ledger takes a second or more."""
    return LENGTHS if is_native else (11,)


@pytest.mark.parametrize("way", WAYS)
def test_what_an_object_in_a_cycle_keeps_is_growth_at_every_length(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """What an object in a cycle keeps is growth if it was in use at all boundaries, though garbage
    later.
    """
    for batches in lengths:
        assert growth(cpu, lambda: [KeepsOne("cpu")], batches, way) == 4096, batches


@pytest.mark.parametrize("way", WAYS)
def test_garbage_that_waits_for_the_collector_is_no_growth(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """Garbage that waits for the collector is no growth, also if it begins late in the loop."""
    for batches in lengths:
        for keeps_last in (False, True):
            make = partial(LeavesOne, "cpu", keeps_last=keeps_last)
            assert growth(cpu, lambda: [make()], batches, way) == 0, batches  # noqa: B023


@pytest.mark.parametrize("way", WAYS)
def test_growth_beside_garbage_is_exact(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """A loop that keeps 4096 bytes per batch beside as much garbage has that growth."""
    for batches in lengths:
        parts = lambda: [KeepsOne("cpu"), LeavesOne("cpu", keeps_last=True)]  # noqa: E731
        assert growth(cpu, parts, batches, way) == 4096, batches


@pytest.mark.slow
def test_growth_of_random_loops_is_true_to_the_byte(cpu: MemoryProbe, is_native: bool) -> None:
    """Random loops, with cycles made in and around 5 to 40 batches, grow to the exact byte.

    72 have each number of batches without collections of their own, and with them.
    """
    check_random_loops(cpu, "cpu", range(72 if is_native else 3))


@pytest.fixture
def often_collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the collector run by itself after so few new objects."""
    before = gc.get_threshold()
    gc.set_threshold(request.param, *before[1:])
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("often_collected", [20, 60, 150], indirect=True)
@pytest.mark.usefixtures("often_collected")
def test_growth_is_true_while_the_collector_runs_by_itself(
    cpu: MemoryProbe, is_native: bool
) -> None:
    """It never begins to run at a boundary, in which levels are read and garbage is counted."""
    check_random_loops(cpu, "cpu", range(24 if is_native else 1), (*KINDS, *OWNERS, LeavesViews))


@pytest.mark.parametrize("often_collected", [5], indirect=True)
@pytest.mark.usefixtures("often_collected")
def test_the_collector_begins_no_run_at_a_boundary(cpu: MemoryProbe) -> None:
    """It runs after so many new objects, some of which boundaries make themselves."""
    runs: list[traceback.StackSummary] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            runs.append(traceback.extract_stack())

    own = Path(inspect.getfile(BatchSamples))
    with cpu.measure() as region:
        gc.callbacks.append(note)
        try:
            for _ in region.batches(range(30)):
                LeavesOne("cpu", keeps_last=False).run(0)
        finally:
            gc.callbacks.remove(note)
    assert runs, "the loop makes enough objects"
    automatic = [run for run in runs if "collect" not in (run[-2].line or "")]
    assert not [run for run in automatic if any(frame.filename == str(own) for frame in run)]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_boundaries_leave_the_collector_as_it_is(
    cpu: MemoryProbe, monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    """Also if a boundary raises."""

    def fail(*_: object) -> None:
        raise OSError

    seen = []
    if not is_enabled:
        gc.disable()
    try:
        with suppress(OSError), cpu.measure() as region:
            for batch in region.batches(range(4)):
                seen.append(gc.isenabled())
                if batch == 2:
                    monkeypatch.setattr(BatchSamples, "add", fail)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == 4 * [is_enabled]


@pytest.mark.parametrize("first", [7, 539, 2574])
def test_growth_of_loops_that_were_wrong_is_true(
    cpu: MemoryProbe, is_native: bool, first: int
) -> None:
    """Of three loops that had a wrong growth without a mark; each after another loop.

    The owner of tensors is older than the region and dropped in the last batch, or it is dropped at
    a boundary at which the level does not rise, and a collection frees it before the next rise.
    """
    if is_native:
        check_random_loops(cpu, "cpu", (first, first + 1))


@pytest.mark.slow
@pytest.mark.parametrize("are_older", [False, True])
def test_growth_beside_owners_that_are_dropped_when_nothing_is_allocated_is_true(
    cpu: MemoryProbe, is_native: bool, are_older: bool
) -> None:
    """Owners that are full, and dropped some batches later, are in use until then."""
    check_random_loops(cpu, "cpu", range(36 if is_native else 2), OWNERS, are_older=are_older)


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), OWNERS], ids=["alone", "beside others"])
def test_growth_beside_views_of_what_is_kept_longer_is_true(
    cpu: MemoryProbe, is_native: bool, others: tuple[type[Part], ...]
) -> None:
    """Memory of a view in garbage is in use until the loop drops the tensor, some batches later."""
    kinds = (*others, LeavesViews, LeavesViews)
    check_random_loops(cpu, "cpu", range(30 if is_native else 2), kinds)


@pytest.mark.parametrize("batches", [12, 100])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_views_in_garbage_of_the_last_batches_are_no_growth(
    cpu: MemoryProbe, is_native: bool, kept: int, batches: int
) -> None:
    """The usual case is a variable of the loop, which keeps its tensor until the next batch."""
    batches = batches if is_native else 12  # the ledger collects, and not at every boundary
    held, values = deque[torch.Tensor](maxlen=kept), []
    with cpu.measure() as region:
        for _ in region.batches(range(batches)):
            held.append(torch.empty(1024))
            Cycle([held[-1].view(-1)])
            values.append(torch.empty(10))
    assert region.growth_bytes_per_batch == 40


@pytest.mark.parametrize(("kept", "count", "batches"), [(2, 20, 60), (4, 5, 60), (4, 20, 40)])
def test_many_views_in_garbage_are_no_growth_while_the_collector_runs(
    cpu: MemoryProbe, is_native: bool, kept: int, count: int, batches: int
) -> None:
    """Automatic collections free what waits, and following so much takes more than other loops."""
    if not is_native:
        pytest.skip("the ledger collects itself")
    held, values = deque[list[torch.Tensor]](maxlen=kept), []
    with cpu.measure() as region:
        for _ in region.batches(range(batches)):
            tensors = [torch.empty(1024) for _ in range(count)]
            held.append(tensors)
            Cycle([tensor.view(-1) for tensor in tensors])
            values.append(torch.empty(100))
    assert region.growth_bytes_per_batch == 400


@pytest.mark.parametrize("kept", [1, 3])
def test_node_that_a_result_keeps_is_no_growth_when_the_result_is_gone(
    cpu: MemoryProbe, kept: int
) -> None:
    """Some versions of torch make another Python object of a node each time it is looked at."""
    weight = torch.ones(1, requires_grad=True)
    held, values = deque[torch.Tensor](maxlen=kept), []
    with cpu.measure() as region:
        for _ in region.batches(range(20)):
            product = torch.ones(512) * weight
            held.append(product.sum())
            Cycle([product])
            values.append(torch.empty(10))
    assert region.growth_bytes_per_batch == 40


def test_what_was_in_use_at_a_flat_boundary_is_not_taken_for_garbage(cpu: MemoryProbe) -> None:
    """An owner of 0.1 MB that is in use in the first two of nine batches and dropped in the third:
    the level falls although 10,000 bytes per batch are kept, which is less.
    """
    with cpu.measure() as region:
        owner: Cycle | None = Cycle(torch.empty(25_000))
        kept = []
        for batch in range(9):
            if batch == 2:
                owner = None
            if owner is None:
                kept.append(torch.empty(2_500))
            region.batch_done()
    assert region.growth_bytes_per_batch == (70_000 - 100_000) / 4
