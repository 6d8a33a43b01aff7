"""Memory that only the garbage collector frees, measured by a probe."""

import gc

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.measure import additions
from pytest_cka_memory.meters import Meter


class Node:
    """An object that can be part of a cycle."""


@pytest.fixture
def probe(both_meters: Meter) -> MemoryProbe:
    return MemoryProbe(meter=both_meters, also=("cycles",))


def in_a_cycle(size: int) -> None:
    node = Node()
    node.me, node.tensor = node, torch.ones(size)  # type: ignore[attr-defined]


def test_collections_in_the_region_and_at_its_end_count_alike(probe):
    """The figure does not depend on when the collector happened to run."""
    figures = []
    for collects in (False, True):
        with probe.measure() as region:
            for _ in range(10):
                in_a_cycle(10)
                if collects:
                    gc.collect()
        figures.append(region.cycle_bytes)
    assert figures == [400, 400]


def test_what_was_collected_early_joins_the_group_of_its_line(probe):
    """What the collector frees in the middle of a region counts for the cycle of the same line."""
    with probe.measure() as region:
        in_a_cycle(10)
        gc.collect()
        in_a_cycle(20)
    (group,) = region.record.cycles
    assert (group.bytes, group.count) == (120, 2)
    assert group.held_by == "Node.tensor, in the cycle Node.me -> Node"


def test_line_of_what_was_only_collected_early_is_reported(probe):
    """If no cycle is left at the end of the region, the group has the line and says why."""
    with probe.measure() as region:
        in_a_cycle(10)
        gc.collect()
    (group,) = region.record.cycles
    assert (group.bytes, group.held_by) == (40, None)
    assert "torch.on" in str(group.code)  # Python 3.10 has the whole line, shortened in the middle
    assert "to see the cycle, call gc.disable()" in (group.hint or "")


@pytest.mark.parametrize(
    "created_before", range(0, gc.get_threshold()[0], gc.get_threshold()[0] // 7)
)
def test_objects_created_before_the_region_bring_no_collection_into_it(probe, created_before):
    """A short region has no automatic collection, which would free a cycle before it is seen."""
    gc.collect()
    created = [[] for _ in range(created_before)]
    with probe.measure() as region:
        in_a_cycle(10)
        created += [[] for _ in range(100)]
    (group,) = region.record.cycles
    assert (group.bytes, group.held_by) == (40, "Node.tensor, in the cycle Node.me -> Node")
    assert len(created) == created_before + 100


def test_garbage_at_a_batch_boundary_is_described(probe):
    """The region looks at garbage before it frees it to sample a boundary."""
    with probe.measure() as region:
        for _ in range(6):
            in_a_cycle(10)
            region.batch_done()
    (group,) = region.record.cycles
    assert (group.bytes, group.held_by) == (240, "Node.tensor, in the cycle Node.me -> Node")


def test_line_of_what_a_generator_frees_is_reported(probe):
    """A generator in a cycle frees its variables before the cycle can be described."""

    def values(box):
        tensor = torch.ones(10)
        yield tensor.sum() * len(box)

    with probe.measure() as region:
        box = []
        box.append(values(box))
        next(box[0])
        del box
    (group,) = region.record.cycles
    assert group.bytes == 40
    assert "torch.ones(10)" in str(group.code)  # the whole line in Python 3.10


def test_outer_region_counts_what_inner_regions_leave_to_the_collector(probe):
    """Regions nest: an inner one counts what was allocated in it, the outer one both."""
    with probe.measure("outer") as outer:
        in_a_cycle(10)
        with probe.measure("inner") as inner:
            in_a_cycle(20)
    assert (outer.cycle_bytes, inner.cycle_bytes) == (120, 80)


def test_garbage_and_debug_flags_of_the_user_are_kept(probe):
    """A region changes neither ``gc.garbage`` nor the debug flags, and leaves no callback."""
    mine = object()
    gc.garbage.append(mine)
    callbacks = list(gc.callbacks)
    try:
        with probe.measure() as region:
            in_a_cycle(10)
        assert region.cycle_bytes == 40
        assert gc.garbage == [mine]
        assert gc.get_debug() == 0
        assert gc.callbacks == callbacks
    finally:
        gc.garbage.remove(mine)


def test_region_that_an_exception_ends_leaves_no_callback(probe):
    """Counting ends with the region, also if an exception ends it."""
    callbacks = list(gc.callbacks)
    with pytest.raises(ZeroDivisionError), probe.measure():
        in_a_cycle(1 // 0)
    assert gc.callbacks == callbacks


def test_finalizers_run_once_and_resurrected_tensors_do_not_count(probe):
    """A tensor that a finalizer saves is retained; what is freed counts once."""
    saved, runs = [], []

    class Saving(Node):
        def __del__(self) -> None:
            runs.append(1)
            saved.append(self.tensor)  # type: ignore[attr-defined]

    with probe.measure() as region:
        node = Saving()
        node.me, node.tensor = node, torch.ones(10)  # type: ignore[attr-defined]
        del node
    assert (region.cycle_bytes, region.retained_bytes, len(runs)) == (0, 40, 1)


def test_unknown_addition_is_refused():
    """A probe refuses an addition that it does not know."""
    with pytest.raises(ValueError, match="cannot measure 'circles'; write one of cycles"):
        MemoryProbe("cpu", also=("circles",))


def test_region_in_which_nothing_is_live_is_not_searched_for_cycles(probe, monkeypatch):
    """Nothing of a region can be garbage if nothing of it is live: no collection searches it but
    that of the youngest objects as it begins.
    """
    collections: list[int] = []

    def collect(generation: int = 2) -> None:
        if generation:
            collections.append(gc.collect(generation))

    monkeypatch.setattr(additions, "collect", collect)
    with probe.measure() as region:
        torch.ones(10)
    assert region.cycle_bytes == 0
    assert not collections
    with probe.measure() as region:
        in_cycle = [torch.ones(10)]
        in_cycle.append(in_cycle)
        del in_cycle
    assert region.cycle_bytes == 40
    assert collections


def test_regions_that_do_not_ask_have_no_figure(counting):
    """Without ``also`` the figure is None and no callback is added to those of the meter."""
    callbacks = list(gc.callbacks)
    with MemoryProbe(meter=counting).measure() as region:
        assert gc.callbacks == callbacks
        in_a_cycle(10)
    assert region.cycle_bytes is None
