"""An exception at any line of opening or closing a region, as a signal handler may raise it.

``pytest-timeout`` and Ctrl-C do so. ``tests/memory/test_interrupted_starts.py`` does this to the
meters that patch more of the process.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import ReportedRegion, begin_region, end_region
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters.blocks.other_memory import _LENDERS
from pytest_cka_memory.meters.cpu import BlockMeter
from pytest_cka_memory.meters.torch_private import LOADER_ITERATOR, SHARING

FUNCTIONS = (
    *_LENDERS,
    *((torch.UntypedStorage, name) for name in ("resize_", *SHARING)),
    (LOADER_ITERATOR, "__next__"),
)


def functions() -> list[Any]:
    """Return the functions that regions patch."""
    return [vars(owner).get(name) for owner, name in FUNCTIONS]


def one_region(meter: BlockMeter) -> Callable[[], None]:
    def run() -> None:
        with MemoryProbe(meter=meter).measure():
            pass

    return run


def nested_regions(meter: BlockMeter) -> Callable[[], None]:
    def run() -> None:
        probe = MemoryProbe(meter=meter)
        with probe.measure() as outer, probe.measure():
            torch.zeros(10)
            outer.batch_done()

    return run


def region_with_a_leak(meter: BlockMeter) -> Callable[[], None]:
    """Collects garbage at its end."""

    def run() -> None:
        with MemoryProbe(meter=meter).measure() as region:
            kept = torch.zeros(10)
        assert region.retained_bytes == kept.nbytes

    return run


def region_of_a_reported_test(meter: BlockMeter) -> Callable[[], None]:
    """Is of another kind than those that a test opens."""

    def run() -> None:
        region = begin_region(meter, *OF_REPORTED_TEST, needs_evidence=False)
        torch.zeros(10)
        assert end_region(region, True, None).peak_increase_bytes == 40

    return run


OF_REPORTED_TEST: Any = (lambda: None, lambda: False, (), lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [one_region, nested_regions, region_with_a_leak, region_of_a_reported_test]
)
def test_an_exception_at_any_line_leaves_nothing_behind(
    meter: BlockMeter,
    open_regions: Callable[[], int],
    interrupted: Callable[..., bool],
    at_line: Callable[[int], object],
    make: Callable[[BlockMeter], Callable[[], None]],
) -> None:
    """After an exception at any line no lock is held, no region open, and nothing patched."""
    run = make(meter)
    run()
    before, stack = functions(), region_stack_for(meter)
    locks: list[Any] = [stack._lock, meter._other_memory._lock]
    wrong: list[tuple[int, str]] = []
    at = 1
    while interrupted(run, at_line(at)):
        if any(lock._is_owned() for lock in locks):
            wrong.append((at, "a lock is held"))
        with MemoryProbe(meter=meter).measure() as region:
            kept = [torch.zeros(5), torch.frombuffer(bytearray(7), dtype=torch.uint8)]
        figures = region.retained_bytes, region.net_bytes, region.peak_increase_bytes
        del kept
        if figures != (27, 27, 27):
            wrong.append((at, f"figures {figures}"))
        if open_regions() or stack._open:
            wrong.append((at, "a region is open"))
        if functions() != before:
            wrong.append((at, "a function is patched"))
        at += 1
    assert wrong == []
    assert at > 100


def test_a_region_that_was_never_closed_ends_with_the_next_one(
    probe: MemoryProbe, open_regions: Callable[[], int]
) -> None:
    """A region whose last reference is dropped while it is open is
    closed, and the next is right.
    """
    region = region_stack_for(probe.meter).open()
    reference = weakref.ref(region)
    assert open_regions() == 1
    del region
    assert reference() is None
    with probe.measure():
        assert open_regions() == 1
    assert open_regions() == 0


@pytest.mark.parametrize(
    ("also", "needs_evidence", "kind"),
    [
        ((), False, ReportedRegion),
        ((), True, Region),
        (("cycles",), False, Region),
    ],
)
def test_region_of_a_test_that_is_only_reported_is_of_its_own_kind(
    meter: BlockMeter, also: tuple[str, ...], needs_evidence: bool, kind: type
) -> None:
    """It costs less; whatever has to be explained or added needs an ordinary one."""
    explainer, is_thorough, _, before = OF_REPORTED_TEST
    region = begin_region(
        meter, explainer, is_thorough, also, before, needs_evidence=needs_evidence
    )
    kept = torch.zeros(10)
    record = end_region(region, True, None)
    assert type(region) is kind
    assert record.retained_bytes == kept.nbytes


def test_region_on_a_device_that_refuses_memory_is_an_ordinary_one(
    meter: BlockMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It explains what was in use when memory was refused, also without a limit."""
    monkeypatch.setattr(BlockMeter, "refused", lambda self: None)
    region = begin_region(meter, *OF_REPORTED_TEST, needs_evidence=False)
    end_region(region, True, None)
    assert type(region) is Region
