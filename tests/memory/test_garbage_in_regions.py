"""Garbage in reference cycles is counted where it is, and nothing of it is freed by a region."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from garbage_programs import BATCHES, SIZE, STEPS, graph, no_automatic_collections, own_method, run
from growth_programs import WAYS, Cycle, Part, growth

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.retention import Sample, highest_growth_bytes_per_batch
from pytest_cka_memory.core.sentences import (
    note_on_growth,
    note_on_older,
    note_on_peak,
    part_of_message,
)
from pytest_cka_memory.limits.figures import Maximum
from pytest_cka_memory.measure import census
from pytest_cka_memory.meters.blocks.python_objects import CompiledCensus

BYTES = 4 * SIZE


@pytest.fixture
def counts_garbage(is_native: bool) -> bool:
    """Whether garbage can be counted without freeing it."""
    return is_native and CompiledCensus.begin() is not None


@pytest.mark.parametrize("step", STEPS)
def test_batch_boundaries_change_no_peak(cpu: MemoryProbe, counts_garbage: bool, step) -> None:
    """A peak is equal to the byte with and without boundaries; or the record says that it is not.

    The step leaves garbage: a part of the level at the boundaries that is not growth.
    """
    values = [torch.ones(SIZE)] * BATCHES
    run(step, values)
    with no_automatic_collections(always_freezes=True), cpu.measure() as plain:
        run(step, values)
    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        run(step, region.batches(values))
    assert region.growth_bytes_per_batch == 0
    assert plain.record.garbage_at_peak_bytes is None
    if not counts_garbage:
        assert region.record.garbage_freed
        return
    assert region.peak_increase_bytes == plain.peak_increase_bytes > BYTES
    assert not region.record.garbage_freed
    assert region.record.garbage_end_bytes == plain.record.garbage_end_bytes
    assert BYTES < region.record.garbage_at_peak_bytes <= region.peak_increase_bytes


def test_a_census_looks_at_nothing_that_the_region_makes_for_itself(
    cpu: MemoryProbe, counts_garbage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While each batch keeps a tensor, a boundary adds one object to what is looked at."""
    if not counts_garbage:
        pytest.skip("garbage is not counted here")
    unreachable, looked_at = CompiledCensus.unreachable, []

    def counted(*arguments):
        looked_at.append(unreachable(*arguments)[1])
        return unreachable(*arguments)

    monkeypatch.setattr(CompiledCensus, "unreachable", counted)
    kept: list[torch.Tensor] = []
    with no_automatic_collections(), cpu.measure() as region:
        for _ in region.batches(range(30)):
            kept.append(torch.ones(SIZE))
    assert {after - before for before, after in pairwise(looked_at[5:25])} == {1}


def test_no_collection_runs_in_a_region(cpu: MemoryProbe, counts_garbage: bool) -> None:
    """No collection of any generation runs between the begin and the end of a region."""
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    values = [torch.ones(SIZE)] * BATCHES
    phases = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append((phase, info))

    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        gc.callbacks.append(note)
        try:
            run(own_method, region.batches(values))
        finally:
            gc.callbacks.remove(note)
    assert phases == []


@pytest.mark.parametrize("step", [own_method, graph], ids=lambda step: step.__name__)
def test_automatic_collections_are_where_they_are_without_boundaries(
    cpu: MemoryProbe, counts_garbage: bool, step
) -> None:
    """The collector runs as often as without boundaries, and within a few batches of these runs."""
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    # So many that it runs a few times: after 700 new objects each, from Python 3.14 after 2,000.
    values = [torch.ones(SIZE)] * (gc.get_threshold()[0] * 6 // 7)

    def batches_of_collections(*, has_boundaries: bool) -> list[int]:
        ended, found = 0, []

        def counted() -> Iterator[torch.Tensor]:
            nonlocal ended
            for value in values:
                yield value
                ended += 1

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                found.append(ended)

        gc.collect()
        with cpu.measure() as region:
            gc.callbacks.append(note)
            try:
                run(step, region.batches(counted()) if has_boundaries else counted())
            finally:
                gc.callbacks.remove(note)
        return found

    batches_of_collections(has_boundaries=True)  # what is imported and made once
    plain = batches_of_collections(has_boundaries=False)
    found = batches_of_collections(has_boundaries=True)
    assert len(plain) > 1
    # Not exactly there: Python keeps freed lists and tuples, and does not count them when they are
    # used again. Of hundreds of batches from one run to the next, that is some.
    if sys.version_info < (3, 11):  # frames are objects that it keeps, too
        assert abs(len(found) - len(plain)) <= 1
        return
    assert found == [pytest.approx(batch, abs=gc.get_threshold()[0] // 58) for batch in plain]


def test_garbage_at_each_boundary_is_its_bytes(cpu: MemoryProbe, counts_garbage: bool) -> None:
    """The sample of the n-th boundary has the garbage of n batches."""
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    values = [torch.ones(SIZE)] * BATCHES
    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        run(own_method, region.batches(values))
    # At the first boundary there is no level to compare with.
    found = [sample.garbage_bytes for sample in region.timeline]
    assert found[1:] == [BYTES * number for number in range(2, BATCHES + 1)]
    assert region.record.garbage_at_peak_bytes == BYTES * (BATCHES - 1)
    assert region.record.garbage_end_bytes == BYTES * BATCHES


class Owner(Cycle):
    """An object in a cycle that keeps a tensor of each batch until it is dropped."""


@pytest.mark.parametrize("is_older", [False, True])
def test_an_owner_that_becomes_garbage_in_the_loop_grows_as_if_it_were_collected(
    cpu: MemoryProbe, is_native: bool, is_older: bool
) -> None:
    """An owner that takes a tensor per batch and becomes garbage half way grows to the byte as it
    does with a collection in each batch. One that is older than the region, which a census takes
    for in use, may grow less.
    """

    def growth(batches: int, *, collects: bool) -> float:
        owner = Owner([]) if is_older else None
        with cpu.measure() as region:
            owner = owner or Owner([])
            for batch in range(batches):
                if batch == batches // 2:
                    owner = Owner([])
                owner.value.append(torch.ones(SIZE))
                if collects:
                    gc.collect()
                region.batch_done()
            owner = None
        assert region.growth_bytes_per_batch is not None
        return region.growth_bytes_per_batch

    with no_automatic_collections(always_freezes=True):
        for batches in range(8, 34) if is_native else [8]:
            found, true = (growth(batches, collects=collects) for collects in (False, True))
            assert found == true or (is_older and found < true), batches


def test_an_older_owner_of_what_python_does_not_show_is_no_growth(cpu: MemoryProbe) -> None:
    """What an older owner keeps through C++ cannot be counted: then a collection frees it, and it
    is no growth of the region, as little as with a collection in each batch.
    """

    def growth(*, collects: bool) -> float | None:
        owner = Owner([])
        with cpu.measure() as region:
            for batch in range(24):
                if batch == 12:
                    owner = Owner([])
                # A conjugate keeps its base in a function of C++.
                owner.value.append(torch.ones(SIZE, dtype=torch.complex64).conj())
                if collects:
                    gc.collect()
                region.batch_done()
            owner = None
        return region.growth_bytes_per_batch

    with no_automatic_collections(always_freezes=True):
        true = growth(collects=True)
        found = growth(collects=False)
    assert true is not None
    assert found is not None
    assert found <= true


def test_threads_that_make_cycles_change_no_figure(cpu: MemoryProbe, counts_garbage: bool) -> None:
    """Collections of what other threads leave, at any moment, make no garbage of the loop count
    twice or not at all.
    """
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    ended = threading.Event()

    def leave_cycles() -> None:
        while not ended.is_set():
            for _ in range(20):
                Cycle([])
            time.sleep(0)

    threads = [threading.Thread(target=leave_cycles) for _ in range(2)]
    for thread in threads:
        thread.start()
    kept = []
    leaf = torch.ones(SIZE, requires_grad=True)
    try:
        with cpu.measure() as region:
            for _ in range(200):
                Cycle(leaf.exp())
                kept.append(torch.ones(SIZE))
                region.batch_done()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert region.growth_bytes_per_batch == BYTES
    assert all(sample.garbage_bytes % BYTES == 0 for sample in region.timeline)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_garbage_of_an_older_owner_is_no_growth_after_a_collection_has_freed_it(
    cpu: MemoryProbe, counts_garbage: bool, generation: int
) -> None:
    """An owner that is older than the region, replaced in it and then collected there, makes no
    loop seem to grow that does not, whether the collector counts it as old or still as young.
    """
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")

    def growth(*, collects: bool) -> float | None:
        owner = Owner([])
        with cpu.measure() as region:
            for batch in range(13):
                if batch in (6, 10):
                    owner = Owner([])
                if batch == 11 or collects:
                    gc.collect(2 if collects else generation)
                owner.value.append(torch.ones(SIZE))
                region.batch_done()
        return region.growth_bytes_per_batch

    with no_automatic_collections():
        found, true = growth(collects=False), growth(collects=True)
    assert true is not None
    assert true <= 0
    assert found is not None
    assert found <= 0


def test_levels_are_checked_again_after_a_collection_has_freed_what_an_older_owner_kept(
    cpu: MemoryProbe, counts_garbage: bool
) -> None:
    """Garbage below the level that the older owner has left is not taken for growth above it."""
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    with no_automatic_collections():
        owner = Owner([])
        with cpu.measure() as region:
            for batch in range(33):
                if batch == 0:
                    owner.value += (torch.ones(SIZE) for _ in range(6))
                if batch == 2:
                    owner = None
                if batch == 24:
                    gc.collect()
                if batch == 1:
                    kept = torch.ones(SIZE)
                if batch in range(25, 30):
                    Cycle(torch.ones(SIZE))
                region.batch_done()
    assert region.retained_bytes == kept.nbytes
    # What the owner has kept was in use in the second batch, the first that is judged.
    assert region.growth_bytes_per_batch == -6 * BYTES / 16


@pytest.mark.parametrize("way", WAYS)
def test_garbage_that_the_last_counts_leave_out_is_no_growth(
    cpu: MemoryProbe, counts_garbage: bool, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Objects that are garbage after two counts, in which they were in use, are found at the end.

    Between, they are not if the time that a region may take for counts of all objects is used up.
    """
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")

    class UsesUp(Part):
        def __init__(self) -> None:
            pass

        def run(self, batch: int) -> None:
            monkeypatch.setattr(census, "_AT_FIRST", 60_000 if batch < 16 else -(10**9))

    class KeepsLast(UsesUp):
        def __init__(self) -> None:
            self.last: deque[Cycle] = deque(maxlen=4)

        def run(self, batch: int) -> None:
            self.last.append(Cycle(torch.ones(SIZE)))

    with no_automatic_collections():
        assert growth(cpu, lambda: [UsesUp(), KeepsLast()], 24, way) == 0


@pytest.mark.parametrize("is_older", [False, True])
def test_an_owner_that_is_in_use_until_the_loop_ends_is_growth(
    cpu: MemoryProbe, is_native: bool, is_older: bool
) -> None:
    """What an owner keeps is growth to the byte if it becomes garbage after the loop only."""
    with no_automatic_collections(always_freezes=True):
        for batches in range(8, 34, 5) if is_native else [8]:
            owner = Owner([]) if is_older else None
            with cpu.measure() as region:
                owner = owner or Owner([])
                for value in region.batches([torch.ones(SIZE)] * batches):
                    owner.value.append(value * 2)
                owner = None
            assert region.growth_bytes_per_batch == BYTES, batches


@pytest.mark.parametrize("is_older", [False, True])
def test_growth_that_older_garbage_may_hide_is_noted(
    cpu: MemoryProbe, counts_garbage: bool, is_older: bool
) -> None:
    """An owner that the last batch drops was in use before, or not: if it is older, a limit says
    what the growth may be. If it is younger than the region, the growth is exact.
    """
    if not counts_garbage:
        pytest.skip("without the library in C, or where CPython hides its lists, garbage is freed")
    with no_automatic_collections(always_freezes=True):
        owner = Owner([]) if is_older else None
        with cpu.measure() as region:
            owner = owner or Owner([])
            for batch in range(5):
                if batch == 4:
                    owner = None
                else:
                    owner.value.append(torch.ones(SIZE))
                region.batch_done()
    uncertain = [sample.uncertain_bytes for sample in region.timeline]
    note = note_on_older(region.record, warmup=1, tolerance_bytes=0)
    if is_older:
        assert uncertain == [0, 0, 0, 4 * BYTES, 4 * BYTES]
        assert region.growth_bytes_per_batch == -3 * BYTES / 2
        assert highest_growth_bytes_per_batch(region.timeline) == BYTES / 2
        assert note.startswith("growth may be as high as 131,072 bytes (0.13 MB) per batch")
        assert "already garbage at the end of batches 4 to 5; what to do: create" in note
        assert not note_on_older(region.record, warmup=1, tolerance_bytes=BYTES)
    else:
        assert (uncertain, note) == ([0] * 5, "")
        assert region.growth_bytes_per_batch == BYTES / 2


def test_a_level_that_falls_and_rises_again_is_not_garbage(cpu: MemoryProbe) -> None:
    """A loop without garbage has none, and does not grow, however its levels change."""
    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        for numel in [900] * 6 + [100, 200, 300, 400, 500, 600]:
            value = torch.ones(numel)
            region.batch_done()
        del value
    assert {sample.garbage_bytes for sample in region.timeline} == {0}
    assert region.growth_bytes_per_batch == -300


def test_a_heap_that_the_user_has_frozen_stays_frozen(cpu: MemoryProbe) -> None:
    """A region changes nothing about ``gc.freeze``."""
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with cpu.measure() as region:
            run(own_method, region.batches([torch.ones(SIZE)] * BATCHES))
        # Frozen objects are still freed with their last reference.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen
        assert region.growth_bytes_per_batch == 0
    finally:
        gc.unfreeze()


def test_messages_say_how_much_is_garbage_and_which_cycle(
    cpu: MemoryProbe, counts_garbage: bool
) -> None:
    """A limit on the peak says the share of garbage, one on growth how fast it rises."""
    values = [torch.ones(SIZE)] * BATCHES
    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        run(own_method, region.batches(values))
    record = region.record
    if not counts_garbage:
        assert "without the plugin the peak is higher" in part_of_message(record, "peak_bytes")
        return
    peak = f"{record.peak_bytes / 2**20:.2f} MB"
    of_peak = f"3.75 MB of {peak} at the peak was garbage in reference cycles"
    assert of_peak in part_of_message(record, "peak_increase_bytes")
    assert note_on_peak(record) == f"{of_peak}, which the collector had not freed"
    assert part_of_message(record, "retained_bytes") == ""
    note = note_on_growth(record, 1, 0)
    assert "rises by 262,144 bytes (0.25 MB) per batch, to 4.00 MB" in note
    assert note_on_growth(record, 1, BYTES) == ""
    breach = Maximum("max_peak_mb(1)", "peak_increase_bytes", 2**20).judge(record)
    assert of_peak in breach.message
    assert Path(__file__).name not in note  # cycles are described only for limits of tests


def test_little_garbage_is_not_mentioned(cpu: MemoryProbe, counts_garbage: bool) -> None:
    """Garbage of less than one percent of the rise of the peak explains nothing."""
    with no_automatic_collections(always_freezes=True), cpu.measure() as region:
        for _ in region.batches(range(8)):
            Cycle(torch.ones(10))
        large = torch.ones(100 * SIZE)
        del large
    assert note_on_peak(region.record) == ""


def test_a_sample_without_garbage_is_in_use() -> None:
    """``in_use_bytes`` leaves out garbage, and nothing else."""
    sample = Sample(1, None, 1024, 1000, 1024, garbage_bytes=400)
    assert sample.in_use_bytes == 600
