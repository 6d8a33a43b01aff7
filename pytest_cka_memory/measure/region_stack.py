"""Open regions over one meter.

A device has one peak counter, so the reset for an inner region would erase the peak of the outer
one. Therefore the peak is merged into all open regions before every reset.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup, UnownedBlock
from pytest_cka_memory.meters.base import Meter, Reading


@dataclass(eq=False)
class OpenRegion:
    """The peaks of an open region. Holds numbers and the meter's mark, never a tensor."""

    start: Reading
    mark: Any
    peak_bytes: int
    peak_reserved_bytes: int | None
    sample_peak_bytes: int
    """Highest level since the last sample of this region."""
    allocations_at_peak: list[AllocationGroup] = field(default_factory=list)
    """What was live at its peak; keeps no tensor alive."""
    workspace_bytes: int | None = None
    """Bytes of library workspaces dropped by cleaning so far; only a first run allocates them."""

    def merge_peak(self, reading: Reading, meter: Meter) -> None:
        """Raise the peaks to those of `reading` if they are higher."""
        if reading.peak_bytes > self.peak_bytes:
            self.allocations_at_peak = meter.allocations_at_peak()
        self.peak_bytes = max(self.peak_bytes, reading.peak_bytes)
        self.sample_peak_bytes = max(self.sample_peak_bytes, reading.peak_bytes)
        if self.peak_reserved_bytes is not None and reading.peak_reserved_bytes is not None:
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, reading.peak_reserved_bytes)


@dataclass(frozen=True)
class ClosedRegion:
    """The figures of a region at its end, in bytes."""

    end: Reading
    retained_bytes: int
    survivors: tuple[Allocation, ...]
    """The retained allocations, as far as the meter knows them; weak references."""
    unowned: tuple[UnownedBlock, ...]
    """Retained blocks that no tensor owns, if the allocator's history is recorded."""


class RegionStack:
    """Opens, samples and closes regions over one meter; regions may nest or overlap."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._open: list[OpenRegion] = []

    def open(self) -> OpenRegion:
        """Clean, then start a region."""
        self._read_and_reset_peak()
        self._clean()
        self.meter.start()
        try:
            mark = self.meter.mark()
            # Merged once more, because finalizers that cleaning ran may have allocated memory.
            start = self._read_and_reset_peak()
        except BaseException:
            self.meter.stop()
            raise
        region = OpenRegion(
            start, mark, start.allocated_bytes, start.reserved_bytes, start.allocated_bytes
        )
        self._open.append(region)
        return region

    def sample(self, region: OpenRegion) -> tuple[Reading, int]:
        """Return a reading, and the highest level since the last sample of `region`."""
        reading = self._read_and_reset_peak()
        peak, region.sample_peak_bytes = region.sample_peak_bytes, reading.allocated_bytes
        return reading, peak

    def snapshot(self) -> Reading:
        """Return a reading with the peaks of the innermost open region, or since the last reset."""
        self.meter.start()
        reading = self._read_and_reset_peak() if self._open else self.meter.read()
        self.meter.stop()
        if not self._open:
            return reading
        region = self._open[-1]
        return replace(
            reading, peak_bytes=region.peak_bytes, peak_reserved_bytes=region.peak_reserved_bytes
        )

    def close(self, region: OpenRegion) -> ClosedRegion:
        """End `region`: fix its peaks, free what is not in use, and count what is retained."""
        try:
            self._read_and_reset_peak()
            self._clean()
            return ClosedRegion(
                end=self._read_and_reset_peak(),  # cleaning may find storages that raise the peak
                retained_bytes=self.meter.retained_since(region.mark),
                survivors=tuple(self.meter.allocations_since(region.mark)),
                unowned=tuple(self.meter.unowned_blocks_since(region.mark)),
            )
        finally:
            self._open.remove(region)
            self.meter.stop()

    def _clean(self) -> None:
        """Clean, and add the dropped workspaces to every open region, because regions may nest."""
        dropped = self.meter.clean()
        if dropped is not None:
            for region in self._open:
                region.workspace_bytes = (region.workspace_bytes or 0) + dropped

    def _read_and_reset_peak(self) -> Reading:
        """Return a reading, merge its peaks into all open regions, and reset the counter."""
        reading = self.meter.read()
        for region in self._open:
            region.merge_peak(reading, self.meter)
        self.meter.reset_peak()
        return reading


_ATTRIBUTE = "_cka_memory_region_stack"


def region_stack_for(meter: Meter) -> RegionStack:
    """Return the region stack of `meter`, shared by all of its probes.

    It is an attribute of the meter, so that both are freed when the last probe is.
    """
    stack: RegionStack | None = getattr(meter, _ATTRIBUTE, None)
    if stack is None:
        stack = RegionStack(meter)
        setattr(meter, _ATTRIBUTE, stack)
    return stack
