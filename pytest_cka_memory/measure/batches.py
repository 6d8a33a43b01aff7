"""The samples of a region at its batch boundaries, without the garbage that loops leave."""

from collections import deque
from collections.abc import Callable
from functools import partial
from gc import collect  # at import, because a test may patch gc.collect

from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.meters.base import Peaks, Reading

_FIRST_CHECK = 5


class BatchSamples:
    """Takes a sample at each batch boundary.

    Garbage in reference cycles is not growth, but a collection costs more than most batches. So it
    runs only if the level is above those of the last quarter of the samples. These lie within one
    of the halves that growth compares, so garbage never raises the later half. While collections
    find nothing, because something is really kept, they become rarer.
    """

    def __init__(self, peaks: Peaks) -> None:
        self.serials: list[int] = []
        """The number of allocations before each boundary."""
        self._peaks = peaks
        self._rows: list[tuple[int | None, int, int, int]] = []
        self._recent: dict[int | None, _RecentMaximum] = {}
        self._young, self._full = _Backoff(partial(collect, 1)), _Backoff(collect)
        self._next_check = _FIRST_CHECK

    def timeline(self) -> tuple[Sample, ...]:
        """Return one sample per boundary so far."""
        return tuple(
            Sample(
                batch=number,
                size=size,
                allocated_bytes=allocated,
                requested_bytes=requested,
                peak_bytes=peak,
            )
            for number, (size, allocated, requested, peak) in enumerate(self._rows, 1)
        )

    def add(self, size: int | None) -> Reading:
        """Take a sample after a batch of `size` items."""
        reading, peak_bytes, serial = self._peaks.sample()
        recent = self._recent.setdefault(size, _RecentMaximum())
        for backoff in (self._young, self._full):
            highest = recent.value()
            if highest is None or reading.requested_bytes <= highest:
                break
            if not backoff.is_due():
                continue
            before = reading.requested_bytes
            backoff.collect()
            reading, peak_of_collection, serial = self._peaks.sample()
            peak_bytes = max(peak_bytes, peak_of_collection)
            found = reading.requested_bytes < before
            if found:
                self._lower_since(backoff.last_number, reading.requested_bytes)
            backoff.note(found=found, number=len(self._rows))
        self._rows.append((size, reading.allocated_bytes, reading.requested_bytes, peak_bytes))
        recent.add(reading.requested_bytes)
        self.serials.append(serial)
        return reading

    def growth_is_due(self) -> bool:
        """Whether growth should be explained now, in case the loop frees everything at its end.

        True at some boundaries only, so that all checks together take time linear in the batches.
        """
        due = len(self._rows) >= self._next_check
        if due:
            self._next_check = len(self._rows) * 5 // 4 + 1
        return due

    def _lower_since(self, number: int, level: int) -> None:
        """Lower samples since boundary `number`, in which garbage was counted that has been found.

        Their levels without it are not known, but are not above those around them.
        """
        if number >= len(self._rows):
            return
        most = max(level, self._rows[number][2])
        for index in range(number + 1, len(self._rows)):
            size, allocated, requested, peak = self._rows[index]
            if requested > most:
                self._rows[index] = (size, allocated - (requested - most), most, peak)
                self._recent[size].lower(most)


class _Backoff:
    """Runs a collection half as often each time it finds nothing."""

    def __init__(self, collect: Callable[[], object]) -> None:
        self.collect = collect
        self.last_number = 0
        """The number of samples when it last ran."""
        self._skip = self._length = 0

    def is_due(self) -> bool:
        """Whether it should run now; counts as one chance."""
        self._skip -= 1
        return self._skip < 0

    def note(self, *, found: bool, number: int) -> None:
        """Take note of a collection at sample `number`, and of whether it freed anything."""
        self._length = 0 if found else 2 * self._length + 1
        self._skip = self._length
        self.last_number = number


class _RecentMaximum:
    """The highest of the last quarter of some levels, two at least, in constant time for each."""

    def __init__(self) -> None:
        self._count = 0
        self._levels: deque[tuple[int, int]] = deque()
        """(number, level): levels that no later one exceeds, so they fall from left to right."""

    def add(self, level: int) -> None:
        """Add the next level."""
        while self._levels and self._levels[-1][1] <= level:
            self._levels.pop()
        self._levels.append((self._count, level))
        self._count += 1

    def value(self) -> int | None:
        """Return the highest level; None if there is none."""
        first = self._count - max(2, self._count // 4)
        while self._levels and self._levels[0][0] < first:
            self._levels.popleft()
        return self._levels[0][1] if self._levels else None

    def lower(self, most: int) -> None:
        """Lower all levels to `most`."""
        self._levels = deque((number, min(level, most)) for number, level in self._levels)
