"""What an estimator is: what hooks measure of an output, and how measurements become sums.

:mod:`.minibatch` and :mod:`.exact` have the two estimators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cka.functional.sums import Sums


class Measurement(NamedTuple):
    """Measurement of one output."""

    parts: tuple[Tensor, ...]
    """Gram matrix of each part of the batch; of the exact estimator, the features (n, p)."""
    exponents: tuple[int, ...] = (0,)
    """Exponent e of each part: its Gram matrix is the one in ``parts`` times 2**e."""
    real: Tensor | None = None
    """Of the exact estimator, for tokens with padding: which tokens are real, (n, t)."""
    of_features: tuple[Tensor, ...] = ()
    """For "sampled_neurons": the sum over features of each one's HSIC with itself, of each part."""
    features: int = 0
    """Number p of features."""


class BatchMeasurements:
    """One model's distinct measurements of a batch, and the position of each row's measurement.

    The position is None for a row that the batch lacks; it is left out of the result.
    """

    def __init__(self, values: Sequence[Measurement], positions: Sequence[int | None]) -> None:
        self.values = values
        self.positions = tuple(positions)


class Estimator(Protocol):
    """The part of a comparison that depends on the estimator."""

    min_samples: int
    """Smallest number of samples in a batch."""
    uneven: Sequence[set[int]]
    """Rows of each model that cannot be estimated, because their number of features has changed."""

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        """Return what is kept of an output (n, ...); ``real`` is the mask (n, t) of its tokens."""

    def add(self, models: Sequence[BatchMeasurements]) -> None:
        """Add a batch of one model, compared with itself, or of two models."""

    def sums(self) -> Sums | None:
        """Return the sums over all batches added; None if there are too few samples."""

    def clear(self) -> None:
        """Drop everything that was added."""
