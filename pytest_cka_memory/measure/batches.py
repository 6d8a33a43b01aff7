"""The samples of a region at its batch boundaries, without the garbage that loops leave."""

from collections import deque
from gc import collect  # at import, because a test may patch gc.collect

from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.meters.base import Peaks, Reading

_CHECKED_EACH = 8
"""Up to this number of samples each rise is checked at once, later at fewer and fewer samples."""


class BatchSamples:
    """Takes a sample at each batch boundary.

    Garbage in reference cycles is not growth, but a collection takes longer than most batches. It
    therefore runs only if the level was above those of the last quarter of the samples, and only at
    some boundaries: after 2 to 8 samples, and then after one and a half times as many samples as at
    the last check. If it frees something, the samples since the last check are lowered to what was
    live then and is live now.
    """

    def __init__(self, peaks: Peaks) -> None:
        self.serials: list[int] = []
        """The number of allocations before each boundary."""
        self._peaks = peaks
        self._rows: list[tuple[int | None, int, int, int]] = []
        self._recent: dict[int | None, _RecentMaximum] = {}
        self._has_risen = False
        self._checked = 0
        """Number of the first sample since the last check."""
        self._next_check = 2

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

    def add(self, size: int | None) -> Reading | None:
        """Take a sample after a batch of `size` items.

        Returns:
            A reading if growth should be explained now, in case the loop frees everything at its
            end; otherwise None. So few boundaries give one that the time is linear in the batches.
        """
        reading, peak_bytes, serial = self._peaks.sample()
        recent = self._recent.setdefault(size, _RecentMaximum())
        self._has_risen |= recent.is_below(reading.requested_bytes)
        recent.add(reading.requested_bytes)
        self._rows.append((size, reading.allocated_bytes, reading.requested_bytes, peak_bytes))
        self.serials.append(serial)
        count = len(self._rows)
        if count < self._next_check:
            return None
        self._next_check = count + 1 if count < _CHECKED_EACH else count * 3 // 2
        self.check()
        return reading

    def check(self) -> None:
        """Collect garbage if the level has risen since the last check, and correct the samples."""
        if not self._has_risen:
            return
        self._has_risen = False
        before, *_ = self._peaks.sample()
        collect()
        after, peak_bytes, _ = self._peaks.sample()
        size, allocated, requested, peak = self._rows[-1]
        self._rows[-1] = (size, allocated, requested, max(peak, peak_bytes))
        garbage_bytes = before.requested_bytes - after.requested_bytes
        if garbage_bytes > 0:
            last_checked = self._rows[self._checked - 1][2] if self._checked else 0
            self._lower(max(last_checked, requested - garbage_bytes))
        self._checked = len(self._rows)

    def _lower(self, most: int) -> None:
        """Lower the samples since the last check to `most`."""
        for index in range(self._checked, len(self._rows)):
            size, allocated, requested, peak = self._rows[index]
            garbage_bytes = max(0, requested - most)
            self._rows[index] = (size, allocated - garbage_bytes, requested - garbage_bytes, peak)
        for recent in self._recent.values():
            recent.lower(most)


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

    def is_below(self, level: int) -> bool:
        """Whether all these levels are below `level`; False if there are none."""
        first = self._count - max(2, self._count // 4)
        while self._levels and self._levels[0][0] < first:
            self._levels.popleft()
        return bool(self._levels) and self._levels[0][1] < level

    def lower(self, most: int) -> None:
        """Lower all levels to `most`."""
        self._levels = deque((number, min(level, most)) for number, level in self._levels)
