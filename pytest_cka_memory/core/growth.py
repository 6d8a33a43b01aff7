"""Samples of memory at batch boundaries, and the growth per batch computed from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Live at the boundary, before the allocator rounds sizes up; growth is computed from it."""
    peak_bytes: int
    """Highest level since the previous boundary."""


def full_batches(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples of the most common batch size, because a short last batch needs less."""
    if not samples:
        return []
    (modal, _), *_ = Counter(sample.size for sample in samples).most_common(1)
    return [sample for sample in samples if sample.size == modal]


def growth_bytes_per_batch(samples: Sequence[Sample], warmup: int = 1) -> float | None:
    """Return the rise of the upper level per batch; None below ``warmup + 4`` full batches.

    The last 2h full batches after the warm-up, with h even, are split into halves; growth is
    (maximum of the second half - maximum of the first half) / h. Unlike the slope of a fitted
    line, it is not affected by a single step, or by a level that alternates between batches, as
    in loops over ``zip`` or ``enumerate``.
    """
    levels = [sample.requested_bytes for sample in full_batches(samples)[warmup:]]
    half = len(levels) // 4 * 2
    if half == 0:
        return None
    first, second = levels[-2 * half : -half], levels[-half:]
    return (max(second) - max(first)) / half
