"""Decides whether ``hsic_batch_size`` would at least halve the time of a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PART = 64
"""The size of parts that is proposed."""
# What a part costs beside its arithmetic, and each output in it; more than was measured.
_SECONDS_OF_A_PART = 5e-4
_SECONDS_OF_AN_OUTPUT = 1e-4
# More than half, so that what is not exact in the estimate causes no false alarm.
_SHARE_TO_SAVE = 0.55
# The first batch is slower: memory is allocated, libraries are loaded.
_FIRST, _LAST = 2, 3


class SmallerParts:
    """Measures which share of the time depends on the number of samples in a part.

    The Gram matrices of a batch of n samples, and all products of them, take n² operations; in
    parts of m samples they take n m. The advice depends on the times of the second and third batch,
    which must agree, and is given once. Work on an accelerator does not end when its call returns,
    so there is no advice for one.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = 0.0
        self._seconds = 0.0
        self._outputs = 0
        self._batches = 0
        self._would_halve: list[bool] = []

    @contextmanager
    def measuring(self, outputs: int) -> Iterator[None]:
        """Measure a block whose time depends on the size of parts, for that many outputs."""
        start = self._clock()
        yield
        self._seconds += self._clock() - start
        self._outputs += outputs

    def batch_done(self, samples: int) -> str | None:
        """Return advice if parts would halve the time, and if it was not given before.

        The time of a batch begins when this is called after the batch before.
        """
        now = self._clock()
        total, measured, outputs = now - self._start, self._seconds, self._outputs
        self._start, self._seconds, self._outputs = now, 0.0, 0
        self._batches += 1
        if not _FIRST <= self._batches <= _LAST:
            return None
        if samples < 2 * PART:
            self._would_halve.append(False)
            return None
        added = (samples / PART) * (_SECONDS_OF_A_PART + outputs * _SECONDS_OF_AN_OUTPUT)
        saved = measured * (1 - PART / samples) - added
        self._would_halve.append(saved >= _SHARE_TO_SAVE * total)
        if self._batches < _LAST or not all(self._would_halve):
            return None
        return (
            f"{measured / total:.0%} of the time goes into Gram matrices of {samples} samples; "
            f"hsic_batch_size={PART} would take less than half of the time (the estimate stays "
            "unbiased, its standard error is larger)"
        )
