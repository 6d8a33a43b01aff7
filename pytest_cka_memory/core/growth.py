"""A sample per batch boundary, and the growth that the samples show."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MIN_JUDGED_BATCHES = 4
"""Full batches after the warm-up that a growth figure needs."""


@dataclass(frozen=True)
class Sample:
    """Memory at one batch boundary."""

    batch: int
    """Number of the batch just done, from 1."""
    size: int | None
    """Items in it; None where unknown."""
    allocated_bytes: int
    """Live at the boundary."""
    requested_bytes: int
    """Live at the boundary, as tensors asked for it: what growth is computed from."""
    peak_bytes: int
    """Highest level since the boundary before."""


def full_batches(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of the commonest batch size: a short last batch says nothing about growth."""
    if not samples:
        return []
    (modal, _), *_ = Counter(sample.size for sample in samples).most_common(1)
    return [sample for sample in samples if sample.size == modal]


def growth_bytes_per_batch(samples: Sequence[Sample], warmup: int = 1) -> float | None:
    """Drift of the upper level per batch; None with fewer than ``warmup + 4`` full batches.

    The last 2h full batches after the warm-up, h even, are halved; growth is
    (max of the second half - max of the first) / h. Unlike a slope, the maxima are not moved by a
    single step or by a level that alternates, as it does in loops over ``zip`` or ``enumerate``.
    """
    levels = [sample.requested_bytes for sample in full_batches(samples)[warmup:]]
    half = len(levels) // 4 * 2
    if half == 0:
        return None
    first, second = levels[-2 * half : -half], levels[-half:]
    return (max(second) - max(first)) / half
