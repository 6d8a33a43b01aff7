"""What a meter does to the regions around it, and what regions leave at a meter."""

import gc
import weakref

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


class _FinalizingMeter(ScriptedMeter):
    """Cleaning runs a finalizer that allocates and frees a megabyte."""

    def clean(self) -> int | None:
        self.free(self.allocate(MB))
        return super().clean()


def test_outer_region_keeps_the_peak_of_cleaning_for_an_inner_region() -> None:
    """A finalizer may allocate while an inner region opens, which
    is part of the outer one's peak.
    """
    probe = MemoryProbe(meter=_FinalizingMeter())
    with probe.measure() as outer, probe.measure() as inner:
        pass
    assert outer.peak_increase_bytes == MB
    assert inner.start_bytes == 0


def test_a_meter_is_freed_with_its_probe() -> None:
    """A meter is freed with its probe, because regions leave no reference to it behind."""
    meter = ScriptedMeter()
    reference = weakref.ref(meter)
    with MemoryProbe(meter=meter).measure():
        pass
    del meter
    gc.collect()
    assert reference() is None


def test_retained_lists_bytes_that_no_tensor_owns() -> None:
    """Groups without a tensor add up to the retained bytes, also if they are read later."""
    meter = ScriptedMeter()
    with MemoryProbe(meter=meter).measure() as region:
        meter.allocate(512)
    (holding,) = region.retained
    assert (holding.bytes, holding.count) == (512, 0)
