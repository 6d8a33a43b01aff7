"""Memory as the system counts it: of the process and its children, and of a card by its driver."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pytest_cka_memory.core.retention import (
    WORKER,
    Holding,
    ProcessSample,
    ProcessUse,
    steady_growth,
)
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.meters.base import Meter, Peaks
from pytest_cka_memory.meters.readings import ProcessReading, ProcessTree, return_free_memory
from pytest_cka_memory.units import format_with_unit, megabytes

_INTERVAL_S = 0.2


def wait_until_free(meter: Meter, mb: object, timeout: float) -> float | None:
    """Do what :meth:`MemoryProbe.wait_until_free` says, for the device of `meter`."""
    wanted_bytes = megabytes(mb)
    now = meter.driver()
    if now is None:
        return None
    if wanted_bytes > now.total_bytes:
        raise ValueError(
            f"{meter.device} has {format_with_unit(now.total_bytes)} in total, so "
            f"{format_with_unit(wanted_bytes)} can never be free; write a smaller size"
        )
    if now.free_bytes < wanted_bytes:
        meter.clean()  # what this process only keeps in reserve
        now = meter.driver() or now
    deadline = time.monotonic() + timeout
    while now.free_bytes < wanted_bytes:
        if time.monotonic() >= deadline:
            own_bytes = meter.read().reserved_bytes or 0
            raise TimeoutError(
                f"{meter.device} has {format_with_unit(now.free_bytes)} free after {timeout:g} s, "
                f"not {format_with_unit(wanted_bytes)}: of {format_with_unit(now.used_bytes)} in "
                f"use, torch's allocator in this process has {format_with_unit(own_bytes)}; the "
                "rest was allocated outside that allocator, or by other processes"
            )
        time.sleep(_INTERVAL_S)
        now = meter.driver() or now
    return now.free_bytes / 2**20


_MOST_SAMPLES = 128
"""A reading takes a millisecond, so that of long loops only some boundaries are sampled."""
_FETCHED_BY_EACH = 2
"""Batches that a worker of a DataLoader fetches ahead unless told otherwise."""
_BATCHES_OF_GRAPH = 24
"""The last batches, of which a graph that grows has nodes."""
_SEARCHES = (12, 24)
"""Batches after which a graph is looked for in a loop whose end a region does not see."""
_MOST_SEARCHES = 3
"""Of a region: each takes a tenth of a second or more, and a loop may end thousands of times."""


_open: "list[weakref.ref[ProcessMemory]]" = []
"""Those of regions that have not ended."""


class ProcessMemory(Addition):
    """Samples at the start, at batch boundaries and when the region's code has ended.

    Raises:
        MissingPackageError: if psutil is not installed.
    """

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._tree = ProcessTree()
        self._of_torch = _torch_bytes(peaks, meter)
        self._torch_start = self._of_torch() or 0
        self._torch_end: int | None = None
        self._seen: dict[int, _Seen] = {}
        self._timeline: list[ProcessSample] = []
        self._batches = 0
        self._has_loop_ended = False
        self._most_workers = 0
        """The highest number that ran at the same time."""
        self._stride = 1
        self._peak_bytes = 0
        self._own_bytes = 0
        """What searches have left in this process."""
        self.is_in_loop = False
        """Whether a loop has had a boundary and has not ended."""
        # Free memory would hide a leak. But while an outer region compares its batches, to return
        # it would look like a fall.
        others = [it for reference in _open if (it := reference()) is not None]
        if not any(it.is_in_loop for it in others):
            return_free_memory()
        _open[:] = map(weakref.ref, (*others, self))
        self._start_bytes = self._end_bytes = self._read()
        self._numbers: deque[int] = deque(maxlen=_BATCHES_OF_GRAPH + 1)
        """Of autograd's next node, at the last boundaries."""
        self._sees_ends = False
        """Whether a loop has begun whose end will be noted."""
        self._searches_left = _MOST_SEARCHES
        self._growing_graph: str | None = None

    def close(self) -> None:
        _open[:] = [reference for reference in _open if reference() not in (None, self)]

    def boundary(self) -> None:
        from pytest_cka_memory.meters.torch_private import sequence_number

        self._batches += 1
        self.is_in_loop = True
        self._numbers.append(sequence_number())
        if self._batches % self._stride:
            return
        self._timeline.append(ProcessSample(self._batches, self._read(self._batches)))
        if len(self._timeline) == _MOST_SAMPLES:
            self._stride *= 2
            self._timeline = _every_second(self._timeline)
            for seen in self._seen.values():
                seen.samples = _every_second(seen.samples)
        if self._batches in _SEARCHES and not self._sees_ends:
            self._search_graphs()

    def loop_began(self) -> None:
        self._sees_ends = True

    def loop_ended(self, fetched_ahead: int | None) -> None:
        self.is_in_loop = False
        self._note_last_batches(fetched_ahead)
        self._search_graphs()  # now, because the graph may be freed with the function of the loop

    def levels(self) -> tuple[str, Mapping[int, int | None]]:
        return "process_bytes", {sample.batch: sample.bytes for sample in self._timeline}

    def finish(self) -> None:
        self._end_bytes = self._read()
        if not self._has_loop_ended:  # boundaries without a loader, whose workers do the same
            self._note_last_batches(None)
        if self.is_in_loop:
            self._search_graphs()
        of_torch = self._of_torch()
        self._torch_end = None if of_torch is None else of_torch - self._torch_start

    def fields(self) -> dict[str, Any]:
        return {
            "process_start_bytes": self._start_bytes,
            "process_peak_bytes": self._peak_bytes,
            "process_end_bytes": self._end_bytes,
            "process_torch_bytes": self._torch_end,
            "process_timeline": tuple(self._timeline),
            "processes": tuple(seen.use() for seen in self._seen.values()),
            "growing_graph": self._growing_graph,
        }

    def _note_last_batches(self, fetched_ahead: int | None) -> None:
        """Mark the samples in which workers had nothing left to do."""
        self._has_loop_ended = True
        if fetched_ahead is None:
            fetched_ahead = _FETCHED_BY_EACH * self._most_workers
        last = self._batches - fetched_ahead
        for samples in (self._timeline, *(seen.samples for seen in self._seen.values())):
            samples[:] = [
                replace(it, workers_done=True) if it.batch > last else it for it in samples
            ]

    def _search_graphs(self) -> None:
        """Look for an autograd graph that grows with the batches, if this process does.

        If possible when a loop has ended: a search takes memory, and what the program allocates
        next would be where that was, so that it would not seem to grow.
        """
        own = self._seen.get(self._tree.own_pid)
        if not self._searches_left or own is None or not steady_growth(own.samples):
            return
        from pytest_cka_memory.holders.growing import growing_graph

        self._searches_left -= 1
        before_bytes = self._tree.own_bytes()
        numbers = sorted({*self._numbers})  # some batches, such as those of a test set, have none
        self._growing_graph = growing_graph(numbers) or self._growing_graph
        self._own_bytes += max(0, self._tree.own_bytes() - before_bytes)

    def _read(self, batch: int = 0) -> int:
        readings = [self._without_own(reading) for reading in self._tree.read()]
        for reading in readings:
            self._seen.setdefault(reading.pid, _Seen(reading)).add(reading, batch)
        workers = sum(reading.name.startswith(WORKER) for reading in readings)
        self._most_workers = max(self._most_workers, workers)
        total = sum(reading.bytes for reading in readings)
        self._peak_bytes = max(self._peak_bytes, total)
        return total

    def _without_own(self, reading: ProcessReading) -> ProcessReading:
        """Return a reading without what searches have left in this process."""
        if not self._own_bytes or reading.pid != self._tree.own_pid:
            return reading
        of_anonymous = reading.anonymous_bytes
        return replace(
            reading,
            bytes=reading.bytes - self._own_bytes,
            anonymous_bytes=None if of_anonymous is None else of_anonymous - self._own_bytes,
        )


class _Seen:
    """One process, with what was read of it."""

    def __init__(self, first: ProcessReading) -> None:
        self.samples: list[ProcessSample] = []
        self._first = self._last = first
        self._peak_bytes = first.bytes

    def add(self, reading: ProcessReading, batch: int) -> None:
        self._last = reading
        self._peak_bytes = max(self._peak_bytes, reading.bytes)
        if batch:
            self.samples.append(ProcessSample(batch, reading.bytes))

    def use(self) -> ProcessUse:
        return ProcessUse(
            pid=self._last.pid,
            name=self._last.name,
            start_bytes=self._first.bytes,
            end_bytes=self._last.bytes,
            peak_bytes=self._peak_bytes,
            copied_bytes=self._copied_bytes(),
            growth_bytes_per_batch=steady_growth(self.samples),
        )

    def _copied_bytes(self) -> int | None:
        """Return how much it rose without more memory of its own.

        To copy a page changes a process's share of it, but not how much memory it has mapped.
        """
        before, after = self._first.anonymous_bytes, self._last.anonymous_bytes
        if before is None or after is None:
            return None
        return max(0, self._last.bytes - self._first.bytes - max(0, after - before))


def _every_second(samples: list[ProcessSample]) -> list[ProcessSample]:
    return samples[1::2]


def _torch_bytes(peaks: Peaks, meter: Meter) -> Callable[[], int | None]:
    """Return a function that returns what torch has allocated on the host; None if unknown."""
    if meter.device == "cpu":
        return lambda: peaks.read().allocated_bytes
    return lambda: meter.host_retained_since(peaks.mark)


class DriverMemory(Addition):
    """Reads the driver at the start, at batch boundaries and when the region's code has ended."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        now = self._read()
        self._is_known = now is not None
        self._outside: list[int | None] = []
        """At each batch boundary."""
        self._start = self._end = self._highest = now or (0, 0)

    def boundary(self) -> None:
        self._outside.append(self._note())

    def finish(self) -> None:
        self._note()

    def levels(self) -> tuple[str, Mapping[int, int | None]]:
        return "outside_bytes", dict(enumerate(self._outside, 1))

    def _note(self) -> int | None:
        """Read the driver and keep the highest levels; return what is outside."""
        now = self._read()
        if now is not None:
            self._highest = max(self._highest[0], now[0]), max(self._highest[1], now[1])
            self._end = now
        return None if now is None else now[1]

    def fields(self) -> dict[str, Any]:
        if not self._is_known:
            return {}
        return {
            "driver_start_bytes": self._start[0],
            "driver_peak_bytes": self._highest[0],
            "driver_end_bytes": self._end[0],
            "outside_start_bytes": self._start[1],
            "outside_peak_bytes": self._highest[1],
        }

    def _read(self) -> tuple[int, int] | None:
        """Return the bytes that are in use on the card, and those outside torch's allocator."""
        driver = self._meter.driver()
        if driver is None:
            return None
        used_bytes = driver.used_bytes
        return used_bytes, used_bytes - (self._peaks.read().reserved_bytes or 0)


class PoolMemory(Addition):
    """Reads private pools at the start, ends of captures, batch boundaries and at the end."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._meter = meter
        self._highest_bytes = self._in_use_bytes = -1
        self._owners: tuple[Holding, ...] = ()
        self._at_boundaries: list[int | None] = []
        self._start_bytes = self._note()
        self._end_listening = meter.after_captures(self._note)

    def boundary(self) -> None:
        self._at_boundaries.append(self._note())

    def finish(self) -> None:
        self._note()

    def close(self) -> None:
        self._end_listening()

    def levels(self) -> tuple[str, Mapping[int, int | None]]:
        return "pools_bytes", dict(enumerate(self._at_boundaries, 1))

    def _note(self) -> int | None:
        """Read the pools and keep the highest; return what they have reserved."""
        state = self._meter.reserve()
        if state is None:
            return None
        pools = [part for part in state.parts if part.pool]
        in_use_bytes = sum(part.in_use_bytes + part.rounding_bytes for part in pools)
        self._in_use_bytes = max(self._in_use_bytes, in_use_bytes)
        reserved_bytes = sum(part.reserved_bytes for part in pools)
        if reserved_bytes > self._highest_bytes:
            self._highest_bytes = reserved_bytes
            self._owners = tuple(self._meter.reserved_by_graphs())
        return reserved_bytes

    def fields(self) -> dict[str, Any]:
        if self._start_bytes is None:
            return {}
        return {
            "pools_start_bytes": self._start_bytes,
            "pools_bytes": self._in_use_bytes,
            "pools_reserved_bytes": self._highest_bytes,
            "pools": self._owners,
        }
