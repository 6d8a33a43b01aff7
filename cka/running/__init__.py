"""Running models over batches, and estimating CKA from what their layers return.

This module itself has the estimators: what hooks measure of an output, and how the measurements of
batches become sums. :class:`Estimator` is what a comparison needs of one. :class:`Minibatch` sums
HSIC over batches; :mod:`.exact` stores the features of all samples first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from cka.errors import SettingError
from cka.functional import HSICEstimator, full_precision, hsic_products, min_samples
from cka.functional.features import corrected_terms, flattened, hsic_of_each_feature
from cka.functional.kernels import Kernel, scaled_gram
from cka.functional.resampling import Resampling
from cka.functional.sums import Sums, batch_sums, merge_sums, select_sums

EstimatorName: TypeAlias = Literal["unbiased", "biased", "exact", "sampled_neurons"]
"""What users write as ``estimator=``; :class:`Minibatch` is all of them but "exact"."""


def check_settings(estimator: str, hsic_batch_size: int | None) -> None:
    """Check the estimator and the size of parts.

    Args:
        estimator: a name from :data:`EstimatorName`.
        hsic_batch_size: number of samples in a part; None for whole batches.

    Raises:
        SettingError: if the estimator is unknown, or the size is too small or has no meaning.
    """
    if estimator not in get_args(EstimatorName):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write "
            + ", ".join(map(repr, get_args(EstimatorName)))
        )
    if hsic_batch_size is None:
        return
    if estimator == "exact":
        raise SettingError(
            f"the exact estimator does not split batches, got hsic_batch_size={hsic_batch_size}; "
            "omit hsic_batch_size="
        )
    if hsic_batch_size < 4:
        raise SettingError(
            f"hsic_batch_size must be at least 4, got {hsic_batch_size}; write e.g. 64"
        )


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
        """Keep the distinct measurements, and the position in them of each row's measurement."""
        self.values = values
        self.positions = tuple(positions)


class Estimator(Protocol):
    """The part of a comparison that depends on the estimator."""

    min_samples: int
    """Smallest number of samples in a batch."""
    uneven: Sequence[set[int]]
    """Rows of each model that cannot be estimated, because their number of features has changed."""

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        """Return what is kept of an output.

        Args:
            features: the output, (n, ...).
            real: True for its tokens and False for padding, (n, t); None if no token is padding.
        """

    def add(self, models: Sequence[BatchMeasurements]) -> None:
        """Add a batch of one model, compared with itself, or of two models."""

    def sums(self) -> Sums | None:
        """Return the sums over all batches added; None if there are too few samples."""

    def clear(self) -> None:
        """Drop everything that was added."""


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
        """Measure a block whose time depends on the size of parts.

        Args:
            outputs: number of outputs whose Gram matrices the block computes.
        """
        start = self._clock()
        yield
        self._seconds += self._clock() - start
        self._outputs += outputs

    def batch_done(self, samples: int) -> str | None:
        """Return advice if parts would halve the time, and if it was not given before.

        The time of a batch begins when this is called after the batch before.

        Args:
            samples: number of samples in the batch.
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
            f"pass hsic_batch_size={PART} to take less than half of the time (the estimate stays "
            "unbiased; its standard error grows a little, and for unrelated layers doubles)"
        )


class Minibatch:
    """Computes Gram matrices in the hooks and sums HSIC over batches (Nguyen et al. 2020)."""

    def __init__(
        self,
        kernel: Kernel,
        estimator: HSICEstimator,
        part_size: int | None,
        resamplings: Sequence[Resampling] = (),
        *,
        sampled_neurons: bool = False,
        advice: SmallerParts | None = None,
    ) -> None:
        """Prepare the sums.

        Args:
            kernel: a kernel from :func:`cka.functional.kernels.resolve_kernel`.
            estimator: the estimator of HSIC.
            part_size: number of samples in each part of a batch; None for the whole batch.
            resamplings: get the Gram matrices of every part, too.
            sampled_neurons: whether to correct for a finite number of features.
            advice: measures the time; None if no advice can be given.
        """
        self._kernel = kernel
        self._estimator = estimator
        self._part_size = part_size
        self._resamplings = resamplings
        self._sampled_neurons = sampled_neurons
        self._advice = advice
        self._sums: Sums | None = None
        self._index: dict[tuple[tuple[int | None, ...], torch.device], Tensor] = {}
        self._batches = 0
        self._in_range = True
        self.min_samples = min_samples(estimator)
        self.uneven: Sequence[set[int]] = ()

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        """Return one (m, m) Gram matrix for each part of the (n, ...) features."""
        rows = flattened(features, self._kernel)
        sizes = self._sizes(rows.shape[0])
        parts = rows.split(sizes) if len(sizes) > 1 else [rows]
        # Checking that features are in range waits for an accelerator. There, only two batches are
        # checked, and all batches if any output was not in range: the scale of a layer hardly
        # changes, and an overflow is not silent, because it gives NaN.
        check = rows.device.type == "cpu" or self._batches < 2 or not self._in_range
        with full_precision(rows.device), self._measuring(rows.device, 1):
            grams, exponents = zip(
                *(
                    scaled_gram(
                        self._kernel, part, check=check, unbiased=self._estimator == "unbiased"
                    )
                    for part in parts
                ),
                strict=True,
            )
        self._in_range = self._in_range and not any(exponents)
        of_features: tuple[Tensor, ...] = ()
        if self._sampled_neurons:
            of_features = tuple(map(hsic_of_each_feature, parts, exponents))
        return Measurement(grams, exponents, of_features=of_features, features=rows.shape[1])

    def _sizes(self, samples: int) -> list[int]:
        """Return the sizes of the parts; a remainder that is too small joins the last part."""
        size = self._part_size or samples
        if samples < size:
            return [samples]
        sizes = [size] * (samples // size)
        remainder = samples % size
        if remainder >= self.min_samples:
            return [*sizes, remainder]
        sizes[-1] += remainder
        return sizes

    def add(self, models: Sequence[BatchMeasurements]) -> None:
        """Add the HSIC terms of every part of a batch."""
        rows = self._indices(models[0])
        columns = self._indices(models[-1])
        positions = (_positions(models[0]), _positions(models[-1]))
        self._batches += 1
        with self._measuring(rows.device, 0):
            self._add_parts(models, rows, columns, positions)

    def _add_parts(
        self,
        models: Sequence[BatchMeasurements],
        rows: Tensor,
        columns: Tensor,
        positions: tuple[list[int], list[int]],
    ) -> None:
        for part in range(len(models[0].values[0].parts)):
            # If a model is spread over devices, so are its Gram matrices.
            grams = [
                [measurement.parts[part].to(rows.device) for measurement in model.values]
                for model in models
            ]
            others = grams[1] if len(grams) > 1 else None
            terms = hsic_products(grams[0], others, self._estimator)
            if self._sampled_neurons:
                own = [
                    [measurement.of_features[part] for measurement in model.values]
                    for model in models
                ]
                features = [
                    [measurement.features for measurement in model.values] for model in models
                ]
                terms = corrected_terms(terms, own, features)
            exponents = [
                tuple(measurement.exponents[part] for measurement in model.values)
                for model in models
            ]
            sums = batch_sums(*terms, exponents=(exponents[0], exponents[-1]))
            sums = select_sums(sums, rows, columns)
            self._sums = sums if self._sums is None else merge_sums(self._sums, sums)
            for resampling in self._resamplings:
                resampling.add(grams[0], others, self._estimator, positions, sums, self._sums)

    def _measuring(self, device: torch.device, outputs: int) -> AbstractContextManager[None]:
        if self._advice is None or device.type != "cpu":
            return nullcontext()
        return self._advice.measuring(outputs)

    def _indices(self, model: BatchMeasurements) -> Tensor:
        # Cached, because a new index tensor for every batch would be a copy to the device.
        device = model.values[0].parts[0].device
        key = (model.positions, device)
        if key not in self._index:
            # Positions may differ in every batch, so all are dropped if there are eight.
            if len(self._index) >= 8:
                self._index = {}
            self._index[key] = torch.tensor(_positions(model), device=device)
        return self._index[key]

    def sums(self) -> Sums | None:
        """Return the sums over all batches added; None if there were none."""
        return self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None
        self._index.clear()


def _positions(model: BatchMeasurements) -> list[int]:
    # The sums of a row that is left out do not matter.
    return [position or 0 for position in model.positions]
