"""The samples of a region at its batch boundaries, without the garbage that loops leave."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from gc import collect  # at import, because a test may patch gc.collect

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.meters.base import Peaks, Reading

_CHECKED_EACH = 40
"""Up to this number of samples each rise is checked at once, later at fewer and fewer samples."""


class BatchSamples:
    """Takes a sample at each batch boundary.

    Garbage in reference cycles is not growth, but a collection takes longer than most batches. It
    therefore runs only if the level was above those of the last quarter of the samples: at each of
    the first 40 boundaries, and then after five thirds as many samples as at the last check, or
    earlier, if a batch differs from those before it and checks before were not needed.

    What a collection frees was garbage at its own boundary. At those before, it may have been in
    use, and a loop's objects often become garbage when the loop ends. So a sample is corrected by
    the collection at its boundary; without one, by what earlier batches have left as garbage, or
    to what was live without garbage at the checks around it.

    Args:
        peaks: the peaks of the region.
        allocations: returns what was allocated in the region and is live.
    """

    def __init__(self, peaks: Peaks, allocations: Callable[[], Iterable[Allocation]]) -> None:
        self.serials: list[int] = []
        """The number of allocations before each boundary."""
        self._peaks = peaks
        self._allocations = allocations
        self._rows: list[tuple[int | None, int, int, int]] = []
        self._recent: dict[int | None, _RecentMaximum] = {}
        self._has_risen = False
        self._checked = 0
        """Number of the first sample since the last collection."""
        self._next_check = 2
        self._checks = self._collections = 0
        """How many checks were planned, and how many collections there were."""
        self._habit = _Habit()
        self._last_garbage_bytes = 0
        """What the last collection has freed."""

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
        self._habit.note_level(reading.requested_bytes)
        count = len(self._rows)
        is_planned = count >= self._next_check
        if is_planned:
            self._checks += 1
            self._next_check = count + 1 if count < _CHECKED_EACH else count * 5 // 3
        if is_planned or (self._collections < self._checks and not self._habit.goes_on):
            self.check()
            return reading if is_planned else None
        self._habit.interrupt()
        return None

    def check(self) -> None:
        """Collect garbage if the level has risen since the last check, and correct the samples."""
        unchecked = len(self._rows) - self._checked
        if self._has_risen and unchecked:
            garbage_bytes = self._correct(unchecked)
            self._habit.learn(garbage_bytes, unchecked)
            self._has_risen = False
            self._checked = len(self._rows)
        elif unchecked:
            self._habit.learn(0, 1)

    def finish(self) -> None:
        """Correct the samples since the last collection, after the last boundary.

        What a collection would free now may have been in use at all boundaries.
        """
        unchecked = range(self._checked, len(self._rows))
        if not self._has_risen or not unchecked:
            return
        usual = self._habit.usual_garbage_bytes
        if usual is not None:
            for number, index in enumerate(unchecked, 1):
                garbage_bytes = min(number * usual, self._rows[index][2] - self._checked_bytes)
                self._lower(index, garbage_bytes)
        elif self._last_garbage_bytes or self._is_newer(self._freed_blocks()):
            self._limit(unchecked, self._checked_bytes)

    @property
    def _checked_bytes(self) -> int:
        """The level at the last collection, without the garbage."""
        return self._rows[self._checked - 1][2] if self._checked else 0

    def _correct(self, unchecked: int) -> int:
        """Collect garbage, correct the unchecked samples and return the bytes of the garbage."""
        before, *_ = self._peaks.sample()
        freed: list[Allocation] = []
        if unchecked > 1:
            freed = self._freed_blocks()
        else:
            collect()
        after, peak_bytes, _ = self._peaks.sample()
        self._collections += 1
        size, allocated, requested, peak = self._rows[-1]
        self._rows[-1] = (size, allocated, requested, max(peak, peak_bytes))
        garbage_bytes = max(0, before.requested_bytes - after.requested_bytes)
        self._last_garbage_bytes = garbage_bytes
        if not garbage_bytes:
            return 0
        last = len(self._rows) - 1
        garbage_blocks_bytes = max(0, before.allocated_bytes - after.allocated_bytes)
        earlier = range(self._checked, last)
        most = max(self._checked_bytes, requested - garbage_bytes)
        usual = self._habit.garbage_before(garbage_bytes, unchecked)
        if usual is not None:
            for number, index in enumerate(earlier, 1):
                self._lower(index, number * usual)
        elif requested - garbage_bytes < self._checked_bytes and self._is_mostly_old(freed):
            dropped = bisect_left(self.serials, max(block.serial for block in freed)) + 1
            for index in earlier[max(0, dropped - self._checked) :]:
                self._lower(index, garbage_bytes)
        else:
            self._limit(earlier, most)
        self._lower(last, garbage_bytes, garbage_blocks_bytes)
        self._habit.note_freed(garbage_bytes)
        for recent in self._recent.values():
            recent.lower(most)
        return garbage_bytes

    def _limit(self, indices: Iterable[int], most: int) -> None:
        """Lower the samples to `most`."""
        for index in indices:
            self._lower(index, self._rows[index][2] - most)

    def _lower(self, index: int, garbage_bytes: int, blocks_bytes: int | None = None) -> None:
        """Lower a sample by garbage; `blocks_bytes` is what the allocator counted for it."""
        garbage_bytes = max(0, garbage_bytes)
        size, allocated, requested, peak = self._rows[index]
        blocks_bytes = garbage_bytes if blocks_bytes is None else blocks_bytes
        self._rows[index] = (size, allocated - blocks_bytes, requested - garbage_bytes, peak)

    def _freed_blocks(self) -> list[Allocation]:
        """Collect garbage and return what was freed of what the region has allocated."""
        before = list(self._allocations())
        collect()
        live = {(allocation.key, allocation.serial) for allocation in self._allocations()}
        return [found for found in before if (found.key, found.serial) not in live]

    def _is_newer(self, freed: list[Allocation]) -> bool:
        """Whether anything was freed, and all of it was allocated after the last collection."""
        last_serial = self.serials[self._checked - 1] if self._checked else 0
        return bool(freed) and all(block.serial > last_serial for block in freed)

    def _is_mostly_old(self, freed: list[Allocation]) -> bool:
        """Whether most of it was allocated before the last collection, which did not free it."""
        last_serial = self.serials[self._checked - 1] if self._checked else 0
        old_bytes = sum(block.bytes for block in freed if block.serial <= last_serial)
        return bool(freed) and 2 * old_bytes >= sum(block.bytes for block in freed)


class _Habit:
    """What batches do to the level as long as all do the same."""

    _ENOUGH = 5
    """So many batches in a row must have done the same before the next are expected to."""

    def __init__(self) -> None:
        self._level = 0
        """At the last boundary, without the garbage that was freed there."""
        self._rise = 0
        """By how much the last batch has raised it."""
        self._usual = 0, 0
        """By how much checked batches have raised it, and how much of that was garbage."""
        self._in_a_row = 0

    def note_level(self, level: int) -> None:
        """Take note of the level at the next boundary."""
        self._level, self._rise = level, level - self._level

    def note_freed(self, garbage_bytes: int) -> None:
        """Take note that a collection has lowered the level at this boundary."""
        self._level -= garbage_bytes

    @property
    def _is_known(self) -> bool:
        return self._in_a_row >= self._ENOUGH

    @property
    def goes_on(self) -> bool:
        """Whether the last batch did what those before it did."""
        return self._is_known and self._rise == self._usual[0]

    @property
    def usual_garbage_bytes(self) -> int | None:
        """The garbage that each batch leaves; None if that differs."""
        return self._usual[1] if self._is_known else None

    def garbage_before(self, garbage_bytes: int, batches: int) -> int | None:
        """Return the garbage that each batch before the last has left; None if that is unknown.

        Args:
            garbage_bytes: what was freed after the last batch.
            batches: how many there were since the last collection.
        """
        if not self._is_known:
            return None
        usual = self._usual[1]
        fits = (
            garbage_bytes == batches * usual
            if self.goes_on
            else (garbage_bytes >= (batches - 1) * usual)
        )
        return usual if fits else None

    def learn(self, garbage_bytes: int, batches: int) -> None:
        """Take note of what was freed after `batches` batches that were not checked."""
        if self.goes_on:
            if garbage_bytes != batches * self._usual[1]:
                self._in_a_row = 0
        elif batches > 1 and garbage_bytes:
            self._in_a_row = 0
        else:
            batch = self._rise, garbage_bytes
            self._in_a_row = self._in_a_row + 1 if batch == self._usual else 1
            self._usual = batch

    def interrupt(self) -> None:
        """Expect nothing of further batches if the last, which is not checked, was different."""
        if not self.goes_on:
            self._in_a_row = 0


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
