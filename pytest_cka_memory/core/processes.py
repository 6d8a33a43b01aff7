"""Memory of processes: samples at batch boundaries, and growth that survives steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median_low

MIN_JUDGED_SAMPLES = 8
"""Number of samples after the warm-up that a growth figure needs."""
WARMUP = 2
"""Batches that a growth figure leaves out unless told otherwise."""
_PARTS = 4


@dataclass(frozen=True)
class ProcessSample:
    """Memory of the process and its children at one batch boundary."""

    batch: int
    """Number of the batch that has just ended, from 1."""
    bytes: int
    """Sum over all of these processes."""


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


def steady_growth(samples: Sequence[ProcessSample], warmup: int = WARMUP) -> float | None:
    """Return by how many bytes memory grew with each batch; None with too few samples.

    An allocator takes memory from the system in steps and returns little of it, so that one step
    in a short loop says nothing. The samples after the warm-up are split into four parts of equal
    length; growth is the smallest of the three rises from the median of one part to that of the
    next, per batch. A step raises one of them; memory that grows raises all three. It is never
    negative.
    """
    judged = [sample for sample in samples if sample.batch > warmup]
    if len(judged) < MIN_JUDGED_SAMPLES:
        return None
    size = len(judged) // _PARTS
    first = len(judged) - size * _PARTS
    parts = [judged[first + size * n : first + size * (n + 1)] for n in range(_PARTS)]
    levels = [median_low(sample.bytes for sample in part) for part in parts]
    batches = [mean(sample.batch for sample in part) for part in parts]
    rises = ((levels[n + 1] - levels[n]) / (batches[n + 1] - batches[n]) for n in range(_PARTS - 1))
    return max(0.0, min(rises))
