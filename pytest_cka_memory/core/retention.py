"""What stays in use: storages that are live after a region, and growth of memory per batch.

Of storages: where they were allocated, and what references them; which bytes a region has retained
is decided by `figures_at_end` in `measure/region_stack.py`. Growth is that of tensors, and of the
process and its children. How high the levels at batch boundaries are so far, and whether they
repeat, says which batches :mod:`pytest_cka_memory.measure.batch_samples` checks. How a peak grows
with the sizes of the input, such as the batch size, is found by `laws/fitting.py`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median_low

from pytest_cka_memory.units import counted, format_exact


@dataclass(frozen=True)
class Link:
    """An object on a path of references, and the reference that leads to it."""

    reference: str
    """How the object before it references this one, such as ``.cache``; empty for the first."""
    object: str
    """What it is: where the path begins, or a class with the shape of a tensor."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Holding:
    """Storages that were allocated in one place and are referenced in one way."""

    bytes: int
    """Sum over all of them."""
    count: int
    """Number of storages; 0 for memory that no tensor owns."""
    dtype: str | None = None
    """Of the largest storage's first tensor, or of a tensor that uses it; None if unknown."""
    shape: tuple[int, ...] | None = None
    """Of the same tensor as ``dtype``; None if unknown."""
    operator: str | None = None
    """The operator that allocated the largest, such as ``aten.sum``; None if unknown."""
    created_at: tuple[str, ...] = ()
    """Frames of the code that allocated them, innermost first: ``net.py:11 in Block.forward``."""
    # Which of several holders is held_by, and printed first, is decided by `search` in
    # holders/search.py; the others are in the order in which holders/proof.py finds them.
    held_by: str | None = None
    """An expression that leads to the largest; None if no Python object references it."""
    also_held_by: tuple[str, ...] = ()
    """What else references the largest, as expressions; all of them must go to free it."""
    freed_bytes: int | None = None
    """How many of the bytes are freed with the one reference of ``held_by``, or the like, by the
    count of all references; None if that was not counted."""
    paths: tuple[tuple[Link, ...], ...] = ()
    """The references that lead to the largest, one path for each holder that was found; empty
    unless ``--cka-memory-explain=graph`` asked for them."""
    hint: str | None = None
    """What usually helps when such an object holds memory."""
    batches: int | None = None
    """Number of batches in which such storages were allocated; None outside a batch loop."""
    first_batches: int | None = None
    """Number of batches that had ended when growth was found, if the loop freed them at its end."""
    bytes_per_batch: float | None = None
    """How many of the bytes per batch were allocated in the batches whose growth is judged; None
    outside a batch loop."""
    early_bytes: int | None = None
    """Bytes that the same line had in use after the second batch, if it rebuilds them in each one
    and they grow; None otherwise."""
    code: str | None = None
    """The expression that allocated the largest: ``(weight * batch).sum()``; None if unknown."""
    before_region: bool = False
    """Whether all of them were allocated before the region began; known for the peak only."""
    module: str | None = None
    """Paths of the modules that allocated most of them: ``encoder.layers.2.linear1``, if known."""
    inside: str | None = None
    """What allocated it if no tensor owned it, such as ``workspace``; known for the peak only."""
    kind: str | None = None
    """What it was for, one of :data:`.sentences.KINDS`; known for the peak only."""
    keeps_bytes: int | None = None
    """How much free memory lies beside them that the allocator cannot release while they are in
    use; known for a reserve that is explained."""
    pinned: bool = False
    """Whether it is pinned memory of the host; False if no tensor was found that uses it."""

    def __repr__(self) -> str:
        count = f"{counted(self.count, 'tensor')}, " if self.count else ""
        made = f", made at {self.made_at}" if self.created_at else ""
        held = f", held by {self.held_by}" if self.held_by else ""
        advice = f"; what to do: {self.hint}" if self.hint else ""
        return f"<Holding: {count}{format_exact(self.bytes)}{made}{held}{advice}>"

    @property
    def made_at(self) -> str:
        """The innermost frame and the expression there; empty if they are unknown."""
        code = f": `{self.code}`" if self.code else ""
        return f"{self.created_at[0]}{code}" if self.created_at else ""


MIN_JUDGED_SAMPLES = 8
"""Number of samples after the warm-up that a growth figure needs."""
WORKER = "DataLoader worker"
"""The start of the name of a process that loads data."""
PROCESS_WARMUP = 2
"""Batches that a growth figure leaves out unless told otherwise."""
_PARTS = 4


@dataclass(frozen=True)
class ProcessSample:
    """Memory of the process and its children at one batch boundary."""

    batch: int
    """Number of the batch that has just ended, from 1."""
    bytes: int
    """Sum over all of these processes."""
    workers_done: bool = False
    """Whether the workers of the loader had fetched the last batch before: they fetch some batches
    ahead. Growth leaves it out, because they had nothing left to do."""


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """The memory of one process while a region ran."""

    pid: int
    """Its number; the same process may be in several regions."""
    name: str
    """What it is: ``this process``, ``DataLoader worker 0``, or the name of its program."""
    start_bytes: int
    """When it was first seen in the region."""
    end_bytes: int
    """When it was last seen in the region."""
    peak_bytes: int
    """Highest of what was seen."""
    copied_bytes: int | None = None
    """How much of its rise came from pages that it shared with another process and copied, until
    it was last seen; None if the system does not say."""
    growth_bytes_per_batch: float | None = None
    """Steady growth; None if it was seen at too few batch boundaries."""


def steady_growth(samples: Sequence[ProcessSample], warmup: int = PROCESS_WARMUP) -> float | None:
    """Return by how many bytes memory grew with each batch; None with too few samples.

    An allocator takes memory from the system in steps and returns little of it, so that one step
    in a short loop says nothing. The samples after the warm-up are split into four parts of equal
    length; growth is the smallest of the three rises from the median of one part to that of the
    next, per batch. A step raises one of them; memory that grows raises all three. It is never
    negative.
    """
    judged = [it for it in samples if it.batch > warmup and not it.workers_done]
    if len(judged) < MIN_JUDGED_SAMPLES:
        return None
    size = len(judged) // _PARTS
    # Samples that are left over are the first, which are nearest to the warm-up.
    first = len(judged) - size * _PARTS
    parts = [judged[first + size * n : first + size * (n + 1)] for n in range(_PARTS)]
    # Not the median, which may be a mean of two and so no level that was measured.
    levels = [median_low(sample.bytes for sample in part) for part in parts]
    batches = [mean(sample.batch for sample in part) for part in parts]
    rises = ((levels[n + 1] - levels[n]) / (batches[n + 1] - batches[n]) for n in range(_PARTS - 1))
    return max(0.0, min(rises))


GROWTH_ON_HOST = "growth on the host"
"""Among the figures to explain: tensors on the host that several batches have left, while another
device is measured. No figure counts them."""

MIN_JUDGED_BATCHES = 4
"""Number of full batches after the warm-up that a growth figure needs."""


@dataclass(frozen=True)
class Sample:
    """Memory at one batch boundary."""

    batch: int
    """Number of the batch that has just ended, from 1."""
    size: int | None
    """Number of items in it; None if unknown."""
    allocated_bytes: int
    """Live at the boundary."""
    requested_bytes: int
    """Live at the boundary, before the allocator rounds sizes up."""
    peak_bytes: int
    """Highest level since the previous boundary."""
    garbage_bytes: int = 0
    """How much of ``requested_bytes`` was garbage in reference cycles, as far as it was looked for.
    Growth is computed without it."""
    may_have_garbage: bool = False
    """Whether there may be more garbage than that: it was not looked for at this boundary."""
    uncertain_bytes: int = 0
    """How much more may have been in use than counts as in use, or less if negative: it was found
    to be garbage later, and is not known to have been that at this boundary. Growth takes what
    makes it smaller."""
    reserved_bytes: int | None = None
    """Held by the allocator at the boundary; None if the device has no reserve."""
    outside_bytes: int | None = None
    """In use on the card at the boundary, but not in the allocator's reserve; None unless the
    region measures the driver."""
    pools_bytes: int | None = None
    """Reserved by private pools at the boundary; None unless the region measures them."""
    process_bytes: int | None = None
    """Of the process and its children at the boundary; None unless the region measures it, and at
    boundaries of long loops that are not sampled."""

    @property
    def in_use_bytes(self) -> int:
        """Live at the boundary and not known to be garbage, in requested bytes."""
        return self.requested_bytes - self.garbage_bytes


def full_batches(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples of the most common batch size, because a short last batch needs less."""
    if not samples:
        return []
    (modal, _), *_ = Counter(sample.size for sample in samples).most_common(1)
    return [sample for sample in samples if sample.size == modal]


@dataclass(frozen=True)
class JudgedGrowth:
    """The growth per batch, and the samples that it follows from."""

    first: Sample
    """The first after the warm-up that is judged."""
    reference: Sample
    """The highest of the first half."""
    last: Sample
    """The last that is judged."""
    bytes_per_batch: float


IN_USE = "in_use_bytes"
"""The attribute of a sample whose growth is judged unless another is named."""


def growth_bytes_per_batch(
    samples: Sequence[Sample], warmup: int = 1, level: str = IN_USE
) -> float | None:
    """Return the rise of the upper level per batch; None below ``warmup + 4`` full batches.

    Args:
        samples: one for each batch.
        warmup: batches at the start that are not judged.
        level: the attribute of a sample that is judged; None is returned if it is not known.
    """
    growth = judged_growth(samples, warmup, level)
    return None if growth is None else growth.bytes_per_batch


def highest_growth_bytes_per_batch(samples: Sequence[Sample], warmup: int = 1) -> float | None:
    """Return what the growth of what is in use may be, if what is uncertain is taken to raise it.

    None below ``warmup + 4`` full batches.
    """
    growth = judged_growth(samples, warmup, highest=True)
    return None if growth is None else growth.bytes_per_batch


def garbage_growth_bytes_per_batch(samples: Sequence[Sample], warmup: int = 1) -> float:
    """Return how much more the level with the garbage in reference cycles rises than without it.

    0 with fewer than ``warmup + 4`` full batches.
    """
    if not any(sample.garbage_bytes for sample in samples):
        return 0
    growth = growth_bytes_per_batch(samples, warmup)
    everything = [
        replace(it, garbage_bytes=0, may_have_garbage=False, uncertain_bytes=0) for it in samples
    ]
    rise = growth_bytes_per_batch(everything, warmup)
    return 0 if growth is None or rise is None else max(0, rise - max(0, growth))


def judged_growth(
    samples: Sequence[Sample], warmup: int = 1, level: str = IN_USE, *, highest: bool = False
) -> JudgedGrowth | None:
    """Return the rise of the upper level per batch; None below ``warmup + 4`` full batches.

    The last 2h full batches after the warm-up, with h even, are split into halves; growth is
    (maximum of the second half - maximum of the first half) / h. Unlike the slope of a fitted
    line, it is not affected by a single step, or by a level that alternates between batches, as
    in loops over ``zip`` or ``enumerate``.

    Samples that may have garbage are left out of the growth of what is in use. The two maxima may
    then be more or less than h batches apart, and growth is their difference divided by the batches
    between them. If the second half has no other samples, the batches up to the last other sample
    are judged. What may have been in use or not is taken to have been in use in the first half
    only, or with `highest` in the second half only.
    """
    if samples and getattr(samples[0], level) is None:  # at once: a loop may have a million samples
        return None
    judged = full_batches(samples)[warmup:]
    levels = [getattr(sample, level) for sample in judged]
    if None in levels:
        return None
    known = [
        place
        for place, sample in enumerate(judged)
        if level != IN_USE or not sample.may_have_garbage
    ]
    if known and MIN_JUDGED_BATCHES <= known[-1] + 1 <= len(judged) - _half(len(judged)):
        judged = judged[: known[-1] + 1]
    half = _half(len(judged))
    if half == 0:
        return None
    second = len(judged) - half
    before = [place for place in known if second - half <= place < second]
    after = [place for place in known if second <= place]
    is_complete = len(before) == len(after) == half or not before or not after
    if is_complete:
        before, after = list(range(second - half, second)), list(range(second, len(judged)))
    if level == IN_USE:
        for places, takes_more in ((before, not highest), (after, highest)):
            for place in places:
                uncertain_bytes = judged[place].uncertain_bytes
                if (uncertain_bytes > 0) == takes_more:
                    levels[place] += uncertain_bytes
    (low, start), (high, end) = (
        max((levels[place], place) for place in places) for places in (before, after)
    )
    growth = (high - low) / (half if is_complete else end - start)
    return JudgedGrowth(judged[second - half], judged[start], judged[-1], growth)


def middle(count: int, warmup: int = 1) -> int:
    """Return the index of the first sample, of `count`, in the second half that is judged."""
    return count - _half(max(0, count - warmup))


def _half(judged: int) -> int:
    """Return how many of so many samples are in each of the halves that are compared."""
    return judged // 4 * 2


_LONGEST_PERIOD = 12
"""Levels that repeat after more batches than this are not recognised as such."""


class Levels:
    """The levels after batches of one size, as far as they are known."""

    def __init__(self) -> None:
        self.count = 0
        """How many batches of this size there were."""
        self.rhythm: tuple[int, int] | None = None
        """See :func:`rhythm`; None if it has not been determined."""
        self._highest: deque[tuple[int, int]] = deque()
        """(number, level): levels that no later one exceeds, so they fall from left to right."""

    def note(self, level: int) -> None:
        """Take note that the level of the last batch is at most this."""
        while self._highest and self._highest[-1][1] <= level:
            self._highest.pop()
        self._highest.append((self.count, level))

    def limit(self, most: int) -> None:
        """Lower all levels to `most`."""
        self._highest = deque((number, min(level, most)) for number, level in self._highest)

    def are_below(self, level: int) -> bool:
        """Whether those of the last quarter of the batches, or the last, are below `level`."""
        first = self.count - max(2, self.count // 4)
        while len(self._highest) > 1 and self._highest[0][0] < first:
            self._highest.popleft()
        return bool(self._highest) and self._highest[0][1] < level


def rhythm(levels: Sequence[int]) -> tuple[int, int]:
    """Return the period of the levels in batches, and the number of the highest in the last one.

    Levels have a period if nearly all differ by the same number of bytes from the level one period
    before. Some may be too high, because they include garbage. Without a period the result is 1, 0.
    """
    count = len(levels)
    for period in range(1, _LONGEST_PERIOD + 1):
        compared = range(max(period, count - 2 * _LONGEST_PERIOD), count)
        rises = Counter(levels[place] - levels[place - period] for place in compared)
        for rise, times in rises.most_common(1):
            if 4 * times >= 3 * len(compared):
                last = range(count - period, count)
                highest = max(last, key=lambda place: levels[place] * period - place * rise)
                return period, highest + 1
    return 1, 0
