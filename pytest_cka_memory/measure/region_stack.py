"""One meter, many open regions.

A device has one peak counter and one reset, so an inner region's reset would erase what the outer
one has seen. Here every reset is preceded by a look that folds the peak into all open spans.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, UnownedBlock
from pytest_cka_memory.meters import Meter, Reading


@dataclass(eq=False)
class OpenRegion:
    """An open region's own peaks. Holds numbers and the meter's mark, never a tensor."""

    start: Reading
    mark: Any
    peak_bytes: int
    peak_reserved_bytes: int | None
    sample_peak_bytes: int
    """Highest level since the last sample of this span."""
    allocations_at_peak: list[Allocation] = field(default_factory=list)
    """What was alive at its peak, held weakly."""
    workspace_bytes: int | None = None
    """Dropped by cleaning so far: library workspaces, allocated by a first run only."""

    def fold(self, reading: Reading, meter: Meter) -> None:
        if reading.peak_bytes > self.peak_bytes:
            self.allocations_at_peak = meter.allocations_at_peak()
        self.peak_bytes = max(self.peak_bytes, reading.peak_bytes)
        self.sample_peak_bytes = max(self.sample_peak_bytes, reading.peak_bytes)
        if self.peak_reserved_bytes is not None and reading.peak_reserved_bytes is not None:
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, reading.peak_reserved_bytes)


@dataclass(frozen=True)
class ClosedRegion:
    """What a span's end found out, in bytes."""

    end: Reading
    retained_bytes: int
    survivors: tuple[Allocation, ...]
    """What is retained, one by one, held weakly; as far as the meter can tell."""
    unowned: tuple[UnownedBlock, ...]
    """Blocks retained that no tensor owns, where the allocator's history tells of them."""


class RegionStack:
    """Opens, samples and closes spans over one meter; spans may nest or overlap."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._open: list[OpenRegion] = []

    def open(self) -> OpenRegion:
        self._fold()
        self._clean()
        self.meter.start()
        try:
            mark = self.meter.mark()
            self.meter.reset_peak()
            start = self.meter.read()
        except BaseException:
            self.meter.stop()
            raise
        span = OpenRegion(
            start, mark, start.allocated_bytes, start.reserved_bytes, start.allocated_bytes
        )
        self._open.append(span)
        return span

    def sample(self, span: OpenRegion) -> tuple[Reading, int]:
        """Return the reading now, and the highest level since this span's last sample."""
        reading = self._fold()
        peak, span.sample_peak_bytes = span.sample_peak_bytes, reading.allocated_bytes
        return reading, peak

    def snapshot(self) -> Reading:
        """Read now; the peaks are the innermost open span's, else those since the last reset."""
        self.meter.start()
        reading = self._fold() if self._open else self.meter.read()
        self.meter.stop()
        if not self._open:
            return reading
        span = self._open[-1]
        return replace(
            reading, peak_bytes=span.peak_bytes, peak_reserved_bytes=span.peak_reserved_bytes
        )

    def close(self, span: OpenRegion) -> ClosedRegion:
        """End `span`: its peaks are final, then all that nobody holds is let go and counted."""
        try:
            self._fold()
            self._clean()
            return ClosedRegion(
                end=self._fold(),  # what cleaning was the first to see is in the peak too
                retained_bytes=self.meter.retained_since(span.mark),
                survivors=tuple(self.meter.allocations_since(span.mark)),
                unowned=tuple(self.meter.unowned_blocks_since(span.mark)),
            )
        finally:
            self._open.remove(span)
            self.meter.stop()

    def _clean(self) -> None:
        """Clean, and tell every open span what was dropped: an inner one cleans for the outer."""
        dropped = self.meter.clean()
        if dropped is not None:
            for span in self._open:
                span.workspace_bytes = (span.workspace_bytes or 0) + dropped

    def _fold(self) -> Reading:
        reading = self.meter.read()
        for span in self._open:
            span.fold(reading, self.meter)
        self.meter.reset_peak()
        return reading


@cache
def region_stack_for(meter: Meter) -> RegionStack:
    """Return the one gauge of `meter`, shared by every probe of this process."""
    return RegionStack(meter)
