"""Open regions over one meter, and the record of one that has ended."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.retention import Sample
from pytest_cka_memory.meters import collector
from pytest_cka_memory.meters.base import Cleaned, Meter, Peaks, Reading
from pytest_cka_memory.meters.collector import not_counted


@dataclass(eq=False)
class OpenRegion:
    """An open region. Holds numbers and the meter's peaks, never a tensor."""

    start: Reading
    peaks: Peaks
    user: "_User"
    workspace_bytes: int | None = None
    """Bytes of library workspaces dropped by cleaning so far; only a first run allocates them."""
    garbage_at_start: bool = False
    """Whether there may have been garbage at its start."""


class _User:
    """What a meter counts for; it is freed with its region."""


class ClosedRegion(NamedTuple):
    """The figures of a region at its end, in bytes."""

    end: Reading
    reserved_bytes: int | None
    """What the allocator held before it was cleaned; None if the device has no reserve."""
    retained_bytes: int
    survivors: Sequence[Allocation]
    """The retained allocations, as far as the meter knows them; they keep nothing alive."""
    host_retained_bytes: int | None
    host_survivors: Sequence[Allocation]
    """The same of tensors on the host, while another device is measured."""
    garbage_left: bool
    """Whether its figures may include garbage in reference cycles."""
    garbage_bytes: int | None
    """What was allocated in the region and freed by a collection at its end; None if there may be
    more."""


class RegionStack:
    """Opens, samples and closes regions over one meter; regions may nest or overlap.

    A signal handler may raise an exception at any line. So only the code that opened a region keeps
    it alive, and a region that was freed without being closed is no longer open. Blocks that hold a
    lock contain no loop (see ``tests/test_locks.py``).
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._open: list[weakref.ref[OpenRegion]] = []
        self._shared: list[weakref.ref[_SharedPeaks]] = []
        self._lock = threading.RLock()

    def open(self, *, thorough: bool = True) -> OpenRegion:
        """Clean, then start a region; see :meth:`Meter.clean_before` for `thorough`."""
        collector.repair()  # an exception may have left it disabled
        if self._shared:
            self.merge_peaks()
        cleaned = self.meter.clean_before(thorough=thorough)
        if cleaned.workspace_bytes is not None:
            self._add_workspaces(cleaned.workspace_bytes)
        return self._begin(cleaned)

    @not_counted
    def _begin(self, cleaned: Cleaned) -> OpenRegion:
        peaks = None
        started = False
        user = _User()
        try:
            self.meter.start_for(user)
            started = True
            peaks = self.meter.open_peaks() or _SharedPeaks(self)
            garbage_left = cleaned.garbage_left
            region = OpenRegion(peaks.start(), peaks, user, garbage_at_start=garbage_left)
            with self._lock:
                self._open.append(weakref.ref(region))
            return region
        except BaseException:
            if peaks is not None:
                peaks.close()
            if started:
                self.meter.stop_for(user)
            raise

    def snapshot(self) -> Reading:
        """Return a reading with the peaks of the innermost open region, or since the last one."""
        collector.repair()
        self.meter.wait_for_threads()
        still_open = _still_live(self._open)
        if still_open:
            return still_open[-1].peaks.read()
        user = _User()
        self.meter.start_for(user)
        try:
            return self.meter.read()
        finally:
            self.meter.stop_for(user)

    @contextmanager
    def closing(
        self,
        region: OpenRegion,
        *,
        thorough: bool = True,
        before_cleaning: Callable[[int], None] | None = None,
    ) -> Iterator[ClosedRegion]:
        """Yield the figures of `region` as :meth:`figures_at_end` does, and end it after the block.

        Inside the block, what was live at its peak can still be asked for.
        """
        try:
            yield self.figures_at_end(region, thorough, before_cleaning)
        finally:
            self.close(region)

    def figures_at_end(
        self,
        region: OpenRegion,
        thorough: bool,
        before_cleaning: Callable[[int], None] | None = None,
        *,
        lists_survivors: bool = True,
    ) -> ClosedRegion:
        """Free what is not in use and return the figures of `region`; :meth:`close` must follow.

        Before anything is freed, `before_cleaning` is called with the bytes of the region that are
        live; it may collect garbage. To list the survivors takes a moment for each of them.
        """
        if self._shared:
            self.merge_peaks()
        mark = region.peaks.mark
        has_waited = region.peaks.settle()  # what threads free now is not garbage
        live_bytes = self.meter.retained_since(mark)
        if live_bytes and not has_waited:
            self.meter.wait_for_threads()
            live_bytes = self.meter.retained_since(mark)
        if before_cleaning is not None:
            before_cleaning(live_bytes)
        has_reserve = region.start.reserved_bytes is not None
        reserved_bytes = region.peaks.reserved() if has_reserve else None
        cleaned = self.meter.clean_after(mark, thorough=thorough)
        if cleaned.workspace_bytes is not None:
            self._add_workspaces(cleaned.workspace_bytes)
        host_bytes = self.meter.host_retained_since(mark)
        retained_bytes = self.meter.retained_since(mark)
        garbage_bytes = live_bytes - retained_bytes - (cleaned.workspace_bytes or 0)
        return ClosedRegion(
            end=region.peaks.end(),  # cleaning may run finalizers, which raise the peak
            reserved_bytes=reserved_bytes,
            retained_bytes=retained_bytes,
            # To ask for them takes a tenth of the time of a test that retains nothing.
            survivors=self.meter.allocations_since(mark)
            if lists_survivors and retained_bytes
            else (),
            host_retained_bytes=host_bytes,
            host_survivors=self.meter.host_allocations_since(mark)
            if lists_survivors and host_bytes
            else (),
            garbage_left=cleaned.garbage_left or region.garbage_at_start,
            garbage_bytes=None if cleaned.garbage_left else max(0, garbage_bytes),
        )

    def close(self, region: OpenRegion) -> None:
        """End `region`."""
        collector.repair()
        try:
            region.peaks.close()
            with self._lock:
                self._open = _without(region, self._open)
        finally:
            self.meter.stop_for(region.user)

    def merge_peaks(self) -> Reading | None:
        """Raise the peaks of regions that share the device's one counter, and reset that counter.

        The reset for an inner region would otherwise erase the peak of the outer one. None if no
        open region shares the counter.
        """
        with self._lock:  # another thread's region must not reset the counter in between
            shared = _still_live(self._shared)
            if not shared:
                return None
            reading = self.meter.read()
            _merge_all(shared, reading, self.meter)
            self.meter.reset_peak()
            return reading

    def share_with(self, peaks: "_SharedPeaks") -> None:
        """Raise also `peaks` before the counter that regions share is reset."""
        with self._lock:
            self._shared.append(weakref.ref(peaks))

    def share_no_longer_with(self, peaks: "_SharedPeaks") -> None:
        """Undo :meth:`share_with`."""
        with self._lock:
            self._shared = _without(peaks, self._shared)

    def _add_workspaces(self, dropped_bytes: int) -> None:
        """Add dropped workspaces to every open region, because regions may nest."""
        for region in _still_live(self._open):
            region.workspace_bytes = (region.workspace_bytes or 0) + dropped_bytes


T = TypeVar("T")


def _still_live(references: list[weakref.ref[T]]) -> list[T]:
    return [live for reference in references if (live := reference()) is not None]


def _without(ended: T, references: list[weakref.ref[T]]) -> list[weakref.ref[T]]:
    return [known for known in references if known() not in (None, ended)]


class _SharedPeaks(Peaks):
    """The peaks of one region on a device that has one counter for all regions."""

    def __init__(self, stack: RegionStack) -> None:
        self._stack = stack
        self._allocations: list[AllocationGroup] = []
        self._collected: Callable[[], int] | None = None
        """Returns what the garbage collector has freed, if that is counted."""
        self.mark: Any = stack.meter.mark()
        # Finalizers that cleaning ran may have allocated memory: other regions count it first.
        stack.merge_peaks()
        stack.meter.reset_peak()
        self._start = self._highest = stack.meter.read()
        self._sample_peak = self._highest.allocated_bytes
        stack.share_with(self)

    def merge(self, reading: Reading, meter: Meter) -> None:
        """Raise the peaks to those of `reading` if they are higher."""
        highest = self._highest
        if reading.peak_bytes > highest.peak_bytes:
            self._allocations = meter.allocations_at_peak()
        self._sample_peak = max(self._sample_peak, reading.peak_bytes)
        reserved = [highest.peak_reserved_bytes, reading.peak_reserved_bytes]
        known = [size for size in reserved if size is not None]
        self._highest = reading._replace(
            peak_bytes=max(highest.peak_bytes, reading.peak_bytes),
            peak_reserved_bytes=max(known, default=None),
        )

    def read(self) -> Reading:
        self._stack.merge_peaks()
        return self._highest

    def start(self) -> Reading:
        return self._start

    def settle(self, *, briefly: bool = False) -> bool:
        self._stack.meter.wait_for_threads(briefly=briefly)
        return True

    def sample(self) -> tuple[Reading, int, int]:
        self.settle(briefly=True)
        reading = self.read()
        peak, self._sample_peak = self._sample_peak, reading.allocated_bytes
        return reading, peak, self._stack.meter.serial()

    def allocations(self) -> list[AllocationGroup]:
        return self._allocations

    def count_collected(self) -> bool:
        self._collected = self._stack.meter.count_collected(self.mark)
        return self._collected is not None

    def collected(self) -> int:
        return 0 if self._collected is None else self._collected()

    def close(self) -> None:
        self._collected = None
        self._stack.share_no_longer_with(self)


def _merge_all(shared: list[_SharedPeaks], reading: Reading, meter: Meter) -> None:
    # A loop that holds the lock may leave it held after a signal: see tests/test_locks.py.
    for peaks in shared:
        peaks.merge(reading, meter)


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


def record_at(
    label: str,
    start: Reading,
    end: Reading,
    timeline: Sequence[Sample],
    *,
    retained_bytes: int = 0,
    one_time_bytes: int | None = None,
    garbage_left: bool = False,
    garbage_at_peak_bytes: int | None = None,
    garbage_end_bytes: int | None = None,
    garbage_freed: bool = False,
    host_retained_bytes: int | None = None,
    reserved_end_bytes: int | None = None,
) -> RegionRecord:
    """Return the record of a region as if it ended at `end`; the rest is known after cleaning."""
    return RegionRecord.of(
        label=label,
        completed=True,
        start_bytes=start.allocated_bytes,
        end_bytes=end.allocated_bytes,
        peak_bytes=end.peak_bytes,
        peak_without_scratch_bytes=end.peak_without_scratch_bytes,
        retained_bytes=retained_bytes,
        one_time_bytes=one_time_bytes,
        garbage_left=garbage_left,
        garbage_at_peak_bytes=garbage_at_peak_bytes,
        garbage_end_bytes=garbage_end_bytes,
        garbage_freed=garbage_freed,
        host_retained_bytes=host_retained_bytes,
        reserved_start_bytes=start.reserved_bytes,
        reserved_peak_bytes=end.peak_reserved_bytes,
        reserved_end_bytes=reserved_end_bytes,
        reserved_after_cleaning_bytes=end.reserved_bytes,
        timeline=tuple(timeline),
    )


def record_of(
    label: str,
    opened: OpenRegion,
    closed: ClosedRegion,
    timeline: Sequence[Sample],
    *,
    first_run_retained_bytes: int | None = None,
    garbage_at_peak_bytes: int | None = None,
    garbage_freed: bool = False,
) -> RegionRecord:
    """Return the record of a region that has ended.

    Args:
        label: its label.
        opened: its levels when it began, and the library workspaces that cleaning has dropped.
        closed: its figures after cleaning.
        timeline: its samples.
        first_run_retained_bytes: what an earlier run of the same code has retained, if there was
            one; what this run retained less is one-time memory.
        garbage_at_peak_bytes: how much of the peak was garbage; None if that is not known.
        garbage_freed: whether garbage was freed at batch boundaries.
    """
    one_time_bytes = opened.workspace_bytes
    if first_run_retained_bytes is not None:
        kept_once = max(0, first_run_retained_bytes - closed.retained_bytes)
        one_time_bytes = (one_time_bytes or 0) + kept_once
    return record_at(
        label,
        opened.start,
        closed.end,
        timeline,
        retained_bytes=closed.retained_bytes,
        one_time_bytes=one_time_bytes,
        garbage_left=closed.garbage_left,
        garbage_at_peak_bytes=garbage_at_peak_bytes,
        garbage_end_bytes=closed.garbage_bytes,
        garbage_freed=garbage_freed,
        host_retained_bytes=closed.host_retained_bytes,
        reserved_end_bytes=closed.reserved_bytes,
    )
