"""Samples at batch boundaries, and how much of each level is garbage (``garbage_bytes``)."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from gc import collect  # at import, because a test may patch gc.collect

from pytest_cka_memory.core.retention import Levels, Sample, middle, rhythm
from pytest_cka_memory.meters.base import (
    OLDEST,
    Garbage,
    GarbageCounter,
    OlderGarbage,
    Peaks,
    Reading,
)
from pytest_cka_memory.meters.collector import listen_no_longer, listen_to_collections

_CHECKED_EACH = 40
"""Up to this number of samples each rise is checked at once, later at fewer and fewer samples."""
_ENOUGH = 5
"""If so many checks in a row have found no garbage, there was none between them either."""
_WAIT_S, _WAITS = 1e-4, 10_000
"""A boundary waits so long for another thread's collection, so often in a region: a second."""


class BatchSamples:
    """Takes a sample at each batch boundary.

    Garbage in reference cycles is not growth, but to look for it takes longer than a batch. Only
    a sample above the checked ones of the last quarter of its size may need it: each of the first
    40, and later one after every two thirds as many batches as there were, and any that the first
    ones did not need. Some of the first 40 are checked although they are no higher. If levels
    repeat every few batches, later checks are at batches like the highest of the first 40.

    What a check finds was garbage at its own boundary. At those before, it may have been in use. So
    no sample is corrected by a later check: its level is only limited to those that were checked
    around it, and it is marked, so that growth is not computed from it.

    Args:
        peaks: those of the region.
        census: counts the garbage; None if that is not possible. Then, or if it finds garbage whose
            memory it cannot count, the garbage is collected, which lowers the levels and peaks that
            follow.
        before_collection: called before each such collection.
    """

    def __init__(
        self,
        peaks: Peaks,
        census: GarbageCounter | None = None,
        before_collection: Callable[[], None] = lambda: None,
    ) -> None:
        self._census = census
        if census is not None:
            census.leave_out(_Boundary)
        self._before_collection = before_collection
        self.serials: list[int] = []
        """The number of allocations before each boundary."""
        self.freed_garbage = False
        """Whether garbage was freed because it could not be counted."""
        self._peaks = peaks
        self._boundaries: list[_Boundary] = []
        self._of_size: dict[int | None, Levels] = {}
        self._most_of_a_size = 0
        self._has_risen = False
        self._checked = 0
        """Number of boundaries up to the last check."""
        self._checked_bytes = 0
        """The level at the last check, without the garbage."""
        self._checks = 0
        self._allowed_checks = _CHECKED_EACH - 1  # the first sample has none before it
        self._more_allowed_at = _CHECKED_EACH * 5 // 3
        self._rose_at = 0
        """Number of boundaries when the level has last risen."""
        self._leaves_garbage = False
        """Whether a check has found garbage: then the first boundaries are checked, however low."""
        self._without_garbage = 0
        """How many checks in a row have found none that is new."""
        self._ended_at = 0
        """Number of boundaries when a loop has ended."""
        self._callback: Callable[..., None] | None = None
        """Listens to collections since garbage was first looked for."""
        self._collections = 0
        """How many have begun since then."""
        self._is_collecting = False
        """Whether one runs now, and how often the region may still wait for it."""
        self._waits = _WAITS
        self._looked_at_younger = -1
        """The highest young generation that was collected: what is there now is no older."""
        self._collected_older: list[tuple[OlderGarbage, int, int]] = []
        """What collections have freed of objects older than the region: see `_count_found`."""
        self._highest_peak = -1
        self._garbage_at_peak = 0

    def timeline(self) -> tuple[Sample, ...]:
        """Return one sample per boundary so far."""
        second_half = middle(len(self._boundaries))
        return tuple(
            boundary.sample(number, counts_unknown_as_garbage=number > second_half)
            for number, boundary in enumerate(self._boundaries, 1)
        )

    @property
    def reserved_bytes(self) -> int | None:
        """What the allocator held at the last boundary; None if the device has no reserve."""
        return self._boundaries[-1].reserved_bytes if self._boundaries else None

    def add(self, size: int | None) -> Reading | None:
        """Take a sample after a batch of `size` items.

        Returns:
            A reading if growth should be explained now, in case the loop frees everything at its
            end; otherwise None. So few boundaries give one that the time is linear in the batches.
        """
        if self._is_collecting:
            self._wait_for_collection()
        collections = self._collections
        reading, peak_bytes, serial = self._peaks.sample()
        garbage_bytes = self._note_peak(peak_bytes).requested_bytes
        level = reading.requested_bytes - garbage_bytes
        boundary = _Boundary(
            *(size, reading.allocated_bytes, level, garbage_bytes, peak_bytes),
            reserved_bytes=reading.reserved_bytes,
        )
        self._boundaries.append(boundary)
        self.serials.append(serial)
        levels = self._of_size.setdefault(size, Levels())
        levels.count += 1
        self._most_of_a_size = max(self._most_of_a_size, levels.count)
        if len(self._boundaries) >= self._more_allowed_at:
            # Later and later: so all checks together take time in proportion to the batches.
            self._allowed_checks += 1
            self._more_allowed_at = len(self._boundaries) * 5 // 3
        is_beside_collection = self._is_collecting or collections != self._collections
        is_low = not is_beside_collection and not levels.are_below(level)
        if is_low and not self._is_checked_however_low():
            levels.note(level)
            return None
        boundary.may_have_garbage = self._has_risen = True
        if not is_low:
            self._rose_at = len(self._boundaries)
        elif len(self._boundaries) > 1:
            self._allowed_checks += 1  # besides those of levels that rise
        if is_beside_collection:
            return None
        is_allowed = self._checks < self._allowed_checks and self._decides_growth(levels)
        if not is_allowed or not self.check():
            return None
        if self._is_collecting or collections != self._collections:
            boundary.may_have_garbage = self._has_risen = True
            self._forget_levels()
        return reading

    def _is_checked_however_low(self) -> bool:
        """Whether to check the last boundary although the level there has not risen.

        Otherwise it is not known whether what is garbage later was in use there. So of the first
        ones, these are checked: the first if it is above the start, the first after each rise, and
        all in a loop that has left garbage.
        """
        count = len(self._boundaries)
        if count == 1:
            has_risen = self._boundaries[0].level > self._peaks.start().requested_bytes
            return has_risen and self._census is not None and self._census.is_quick()
        return count <= _CHECKED_EACH and (self._leaves_garbage or self._rose_at == count - 1)

    def _wait_for_collection(self) -> None:
        """Let another thread end its collection: what it is freeing cannot be counted."""
        while self._is_collecting and self._waits:
            self._waits -= 1
            time.sleep(_WAIT_S)

    def garbage_at_peak(self, peak_bytes: int) -> int | None:
        """Return how much of the region's peak is known to be garbage; None without boundaries."""
        if not self._boundaries:
            return None
        self._note_peak(peak_bytes)
        return self._garbage_at_peak

    def note(self, phase: str, generation: int) -> None:
        """Take note of the peak before a collection, which frees what was garbage in it.

        And of what objects keep that are older than the region: after it, nobody knows of them.
        """
        self._is_collecting = phase == "start"
        if phase != "start":
            return
        self._collections += 1
        self._note_peak(self._peaks.read().peak_bytes)
        self._look_before_collection(generation)
        if generation <= self._looked_at_younger:  # older objects are no longer as young
            return
        self._looked_at_younger = min(generation, OLDEST - 1)
        if self._census is not None and self._may_have_older():
            older = self._census.older(generation)
            if older is None:
                self._mark_since(0)
            ended = len(self._boundaries)
            self._collected_older += ((garbage, ended, ended) for garbage in older or ())
            if older:
                self._forget_levels()

    def _look_before_collection(self, generation: int) -> None:
        """Note what is about to be freed: it may be garbage at the first boundaries, unchecked."""
        is_early = self._checked < len(self._boundaries) <= _CHECKED_EACH
        if self._census is None or not is_early:
            return
        # A full collection takes as long as a count of all.
        found = self._census.count(len(self._boundaries), of_all=generation == OLDEST)
        if found is None or self._census.has_left_out():
            self._mark_since(self._checked)
            return
        for number in range(self._checked, len(self._boundaries)):
            may_be = self._census.found_before(self.serials[number]) or 0
            self._boundaries[number].count_as_garbage(may_be, may_be)
            self._leaves_garbage |= may_be > 0

    def _note_peak(self, peak_bytes: int) -> Garbage:
        """Take note of the highest level since the last boundary; return the garbage since then.

        What was garbage at the last boundary, and is still live, was live at that moment, too.
        """
        garbage = Garbage()
        if self._census is not None:
            garbage = self._census.known(is_collecting=self._is_collecting)
        if peak_bytes > self._highest_peak:
            self._highest_peak, self._garbage_at_peak = peak_bytes, garbage.allocated_bytes
        return garbage

    def check(self, *, of_all: bool = False) -> bool:
        """Look for garbage if the level has risen since the last check, and correct the samples.

        Args:
            of_all: whether to look among all objects, and so also if the last check has not.

        Returns:
            Whether it was looked for.
        """
        has_left_out = self._census is not None and self._census.has_left_out()
        if not self._has_risen and not (of_all and has_left_out):
            return False
        last = self._boundaries[-1]
        garbage_bytes = self._count(last, of_all)
        if garbage_bytes is None:
            self._census = None  # there may be more garbage of this kind
            garbage_bytes = self._collect(last)
        last.may_have_garbage = False
        self._checks += len(self._boundaries) > 1
        self._without_garbage = 0 if garbage_bytes else self._without_garbage + 1
        self._leaves_garbage |= garbage_bytes > 0
        most = max(self._checked_bytes, last.level)
        if garbage_bytes:
            self._of_size[last.size].limit(most)
        self._correct_unchecked(most, garbage_bytes)
        self._of_size[last.size].note(last.level)
        self._checked, self._checked_bytes = len(self._boundaries), last.level
        self._has_risen = False
        return True

    def loop_ended(self) -> None:
        """Check once more: after the last boundary, while the loop's variables still exist."""
        self.check(of_all=True)
        self._ended_at = len(self._boundaries)
        # What is garbage now was garbage at the last boundary.
        self._count_older_as_garbage(self._ended_at - 1)

    def finish(self) -> None:
        """Correct the samples since the last check, after the last boundary.

        What is garbage now may have been in use at all boundaries.
        """
        if self._callback is not None:
            listen_no_longer(self._callback)
        if self._has_risen:
            self._correct_unchecked(self._checked_bytes, 0)
        if self._ended_at < len(self._boundaries):
            missed_since = None if self._census is None else self._census.missed_at_end()
            if missed_since is not None:
                self._mark_since(missed_since)
            self._count_older_as_garbage(len(self._boundaries))

    def _count_older_as_garbage(self, unknown_until: int) -> None:
        """Count as garbage what objects keep alive that are older than the region, if there may be.

        Most counts do not look at these. Without this, a loop would grow that uses up such objects.

        Args:
            unknown_until: the index of the first boundary at which it is known to be garbage.
        """
        if self._census is None or not self._may_have_older():
            return
        older, count = self._census.older(), len(self._boundaries)
        if older is None:
            self._before_collection()
            older = self._census.collect_older()
            self.freed_garbage |= bool(older)
        self._count_found([*((it, unknown_until, count) for it in older), *self._collected_older])
        self._collected_older = []

    def _count_found(self, found: Iterable[tuple[OlderGarbage, int, int]]) -> None:
        """Count what was found as garbage at the boundaries where it may have been garbage.

        Until the batch in which memory was last allocated among them, objects were in use. After
        it, they became garbage at an unknown boundary, or when they were found.

        Args:
            found: each with the indices of two boundaries: from the first on, it is known to be
                garbage, and from the second on, it is no longer there or was counted.
        """
        garbage_since: Counter[int] = Counter()
        known_since: Counter[int] = Counter()
        for garbage, known, end in found:
            begin = bisect_left(self.serials, garbage.last_serial)
            for since, first in ((garbage_since, begin), (known_since, max(begin, known))):
                if first < end:
                    since[first] += garbage.requested_bytes
                    since[end] -= garbage.requested_bytes
        garbage_bytes = known_bytes = 0
        for number, boundary in enumerate(self._boundaries):
            garbage_bytes += garbage_since[number]
            known_bytes += known_since[number]
            boundary.count_as_garbage(garbage_bytes, garbage_bytes - known_bytes)

    def _forget_levels(self) -> None:
        """Check the next samples again, however low: earlier ones were lower than it seemed."""
        for levels in self._of_size.values():
            levels.limit(0)

    def _may_have_older(self) -> bool:
        """Whether the levels have risen, so that garbage could make the loop seem to grow."""
        levels = [boundary.level for boundary in self._boundaries]
        return max(levels[1:], default=0) > min(levels[:1], default=0)

    def _mark_since(self, boundaries: int) -> None:
        for boundary in self._boundaries[boundaries:]:
            boundary.may_have_garbage = True

    def _count(self, last: "_Boundary", of_all: bool) -> int | None:
        """Count the garbage; return how much is new at the last boundary, None if it is unknown."""
        if self._census is None:
            return None
        garbage = self._census.count(len(self._boundaries), of_all=of_all)
        if garbage is None:
            return None
        garbage_bytes = max(0, garbage.requested_bytes - last.garbage_bytes)
        last.count_as_garbage(garbage_bytes)
        if self._callback is None:
            self._callback = listen_to_collections(self)
        missed_since = self._census.missed_since()
        if missed_since is not None:
            self._mark_since(missed_since)
            self._checked_bytes = last.level  # at the last check there was garbage that it missed
        return garbage_bytes

    def _collect(self, last: "_Boundary") -> int:
        """Free the garbage; return how much of the level at the last boundary it was."""
        before, *_ = self._peaks.sample()  # also keeps the peak that the garbage was part of
        self._before_collection()
        collect()
        after, peak_bytes, _ = self._peaks.sample()
        garbage_bytes = max(0, before.requested_bytes - after.requested_bytes)
        last.level -= garbage_bytes
        last.allocated_bytes -= max(0, before.allocated_bytes - after.allocated_bytes)
        last.peak_bytes = max(last.peak_bytes, peak_bytes)
        self.freed_garbage |= garbage_bytes > 0
        return garbage_bytes

    def _decides_growth(self, levels: "Levels") -> bool:
        """Whether the last sample, of the size of `levels`, is one to compare with the highest."""
        if len(self._boundaries) <= _CHECKED_EACH:
            return True
        if levels.count < self._most_of_a_size:
            return False
        if levels.rhythm is None:
            size = self._boundaries[-1].size
            first = self._boundaries[:_CHECKED_EACH]
            levels.rhythm = rhythm([each.level for each in first if each.size == size])
        period, highest = levels.rhythm
        return (levels.count - highest) % period == 0

    def _correct_unchecked(self, most: int, garbage_bytes: int) -> None:
        """Correct the samples since the last check, which were not checked themselves.

        If the last checks have found no garbage, these samples are taken to have none. Otherwise
        those of the checked size are lowered to `most`. A sample that had not risen above the known
        levels is lowered by at most the `garbage_bytes` of this check.
        """
        size = self._boundaries[-1].size
        for number in range(self._checked, len(self._boundaries)):
            boundary = self._boundaries[number]
            above = boundary.level - most
            if self._without_garbage >= _ENOUGH:
                boundary.may_have_garbage = False
                self._of_size[boundary.size].note(boundary.level)
            elif boundary.size != size:
                continue
            elif boundary.may_have_garbage:
                boundary.count_as_garbage(above)
            elif above > 0 and garbage_bytes:
                may_be = min(above, self._found_before(number, garbage_bytes))
                boundary.count_as_garbage(may_be, may_be)

    def _found_before(self, number: int, garbage_bytes: int) -> int:
        """Return how much of the garbage of the last check was there at an earlier boundary."""
        if self._census is None:
            return garbage_bytes
        found = self._census.found_before(self.serials[number])
        return garbage_bytes if found is None else found


@dataclass(slots=True)
class _Boundary:
    """What was read at one boundary; corrected later."""

    size: int | None
    allocated_bytes: int
    level: int
    """In requested bytes, without the garbage."""
    garbage_bytes: int
    peak_bytes: int
    may_have_garbage: bool = False
    unknown_bytes: int = 0
    """How much of the garbage may have been in use."""
    reserved_bytes: int | None = None

    def count_as_garbage(self, more_bytes: int, unknown_bytes: int = 0) -> None:
        """Count more of the level as garbage; so much of it may have been in use."""
        if more_bytes > 0:
            self.level -= more_bytes
            self.garbage_bytes += more_bytes
            self.unknown_bytes += unknown_bytes

    def sample(self, batch: int, *, counts_unknown_as_garbage: bool) -> Sample:
        """Return what is known of the boundary after batch number `batch`."""
        sign = 1 if counts_unknown_as_garbage else -1
        in_use_bytes = 0 if counts_unknown_as_garbage else self.unknown_bytes
        return Sample(
            batch=batch,
            size=self.size,
            allocated_bytes=self.allocated_bytes,
            requested_bytes=self.level + self.garbage_bytes,
            peak_bytes=self.peak_bytes,
            garbage_bytes=self.garbage_bytes - in_use_bytes,
            may_have_garbage=self.may_have_garbage,
            uncertain_bytes=sign * self.unknown_bytes,
            reserved_bytes=self.reserved_bytes,
        )
