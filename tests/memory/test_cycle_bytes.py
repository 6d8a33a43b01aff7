"""Memory that only the garbage collector frees, measured by a probe."""

import gc

import pytest
import torch

from pytest_cka_memory import MemoryProbe
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


def test_what_was_collected_early_is_reported_without_its_cycle(probe):
    """The groups add up to the figure; a part that is gone already is a group of its own."""
    with probe.measure() as region:
        in_a_cycle(10)
        gc.collect()
        in_a_cycle(20)
    assert [found.bytes for found in region.record.cycles] == [80, 40]
    assert "freed these bytes already" in (region.record.cycles[1].hint or "")


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


def test_regions_that_do_not_ask_have_no_figure(both_meters):
    """Without ``also`` the figure is None and no callback is registered."""
    callbacks = list(gc.callbacks)
    with MemoryProbe("cpu").measure() as region:
        assert gc.callbacks == callbacks
        in_a_cycle(10)
    assert region.cycle_bytes is None
