"""The estimators: by minibatch, or exact over all samples.

Each defines what hooks measure of an output, and how measurements are added to sums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cka.capture.tokens import without_padding
from cka.errors import DoesNotFitError
from cka.functional.hsic import HSICEstimator, hsic_products, min_samples
from cka.functional.kernels import Kernel, flattened, scaled_gram
from cka.functional.precision import full_precision, gram_dtype, sum_dtype
from cka.functional.sums import Sums, batch_sums, merge_sums, select_sums, zero_sums


class Measurement(NamedTuple):
    """Measurement of one output."""

    parts: tuple[Tensor, ...]
    """Gram matrix of each part of the batch; of the exact estimator, the features (n, p)."""
    exponents: tuple[int, ...] = (0,)
    """Exponent e of each part: its Gram matrix is the one in ``parts`` times 2**e."""
    real: Tensor | None = None
    """Of the exact estimator, for tokens with padding: which tokens are real, (n, t)."""


# While a kernel runs, it holds up to this many copies of its result: float64 sums, distances.
_COPIES_OF_A_GRAM = 5


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


class Minibatch:
    """Computes Gram matrices in the hooks and sums HSIC over batches (Nguyen et al. 2020)."""

    def __init__(self, kernel: Kernel, estimator: HSICEstimator, part_size: int | None) -> None:
        self._kernel = kernel
        self._estimator = estimator
        self._part_size = part_size
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
        check = self._checks_range(rows.device)
        with full_precision(rows.device):
            grams, exponents = zip(
                *(scaled_gram(self._kernel, part, check=check) for part in parts), strict=True
            )
        self._in_range = self._in_range and not any(exponents)
        return Measurement(grams, exponents)

    def _checks_range(self, device: torch.device) -> bool:
        """Whether to check that features are in range, which waits for an accelerator.

        There, only two batches are checked, and all batches if any output was not in range: the
        scale of a layer hardly changes, and an overflow is not silent, because it gives NaN.
        """
        return device.type == "cpu" or self._batches < 2 or not self._in_range

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
        self._batches += 1
        for part in range(len(models[0].values[0].parts)):
            grams = [_grams_on(model, part, rows.device) for model in models]
            terms = hsic_products(grams[0], grams[1] if len(grams) > 1 else None, self._estimator)
            exponents = [tuple(one.exponents[part] for one in model.values) for model in models]
            sums = batch_sums(*terms, exponents=(exponents[0], exponents[-1]))
            sums = select_sums(sums, rows, columns)
            self._sums = sums if self._sums is None else merge_sums(self._sums, sums)

    def _indices(self, model: BatchMeasurements) -> Tensor:
        # Cached, because a new index tensor for every batch would be a copy to the device.
        device = model.values[0].parts[0].device
        key = (model.positions, device)
        if key not in self._index:
            self._index = {k: v for k, v in self._index.items() if len(self._index) < 8}
            # The sums of a row that is left out do not matter.
            found = [position or 0 for position in model.positions]
            self._index[key] = torch.tensor(found, device=device)
        return self._index[key]

    def sums(self) -> Sums | None:
        """Return the sums over all batches added; None if there were none."""
        return self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None
        self._index.clear()


def _grams_on(model: BatchMeasurements, part: int, device: torch.device) -> list[Tensor]:
    # If a model is spread over devices, so are its Gram matrices.
    return [value.parts[part].to(device) for value in model.values]


class Exact:
    """Stores the features of all samples in host memory; (N, N) Gram matrices follow at the end."""

    min_samples = 1

    def __init__(self, kernel: Kernel, expected: int | None, limit_bytes: int | None) -> None:
        self._kernel = kernel
        self._expected = expected
        self._limit_bytes = limit_bytes
        # Chunks of each row of each model; None for a row that is left out.
        self._features: list[list[list[Measurement] | None]] = []
        self.uneven: Sequence[set[int]] = ()
        self._devices: list[torch.device] = []
        self._samples = 0

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        """Return the features as (n, p), copied to the host, with the mask of their tokens."""
        rows = flattened(features, self._kernel)
        if not self._devices:
            self._devices.append(rows.device)
        stored = rows.to("cpu", gram_dtype(rows.dtype), copy=True)
        return Measurement((stored,), real=None if real is None else real.to("cpu"))

    def add(self, models: Sequence[BatchMeasurements]) -> None:
        """Store a batch if the projected total fits in memory.

        Raises:
            DoesNotFitError: if it does not fit; the message gives the bytes needed.
        """
        if not self._features:
            self._features = [[[] for _ in model.positions] for model in models]
            self.uneven = [set() for _ in models]
        for stored, model, uneven in zip(self._features, models, self.uneven, strict=True):
            for row, position in enumerate(model.positions):
                chunks = stored[row]
                if chunks is None or position is None:
                    stored[row] = None
                elif chunks and _width_bytes(chunks[0]) != _width_bytes(model.values[position]):
                    stored[row] = None
                    uneven.add(row)
                else:
                    chunks.append(model.values[position])
        self._samples += len(models[0].values[0].parts[0])
        self._check_size()

    def _check_size(self) -> None:
        samples = max(self._samples, self._expected or 0)
        distinct = [chunks for stored in self._features for chunks in _distinct(stored)[0]]
        if not distinct:
            return
        widths = [_width_bytes(chunks[0]) for chunks in distinct]
        features = samples * sum(widths)
        widest = samples * max(widths)
        if any(one.real is not None for chunks in distinct for one in chunks):
            widest *= 2  # padding is replaced in a copy
        grams = [samples**2 * chunks[0].parts[0].itemsize for chunks in distinct]
        needed = features + widest + sum(grams) + _COPIES_OF_A_GRAM * max(grams)
        stored = self._samples * sum(widths)
        allowed = available_bytes(stored) if self._limit_bytes is None else self._limit_bytes
        if allowed is not None and needed > allowed:
            raise DoesNotFitError(
                f"the exact estimator needs {_megabytes(needed)} for {samples} samples of "
                f"{len(distinct)} layers, but only {_megabytes(allowed)} are available; compare "
                "fewer layers or samples, pool tokens, or use estimator='unbiased', which does not "
                "store features"
            )

    def sums(self) -> Sums | None:
        """Return the unbiased HSIC terms of all samples; release the features meanwhile.

        Returns None if fewer than 4 samples were added.
        """
        if not self._features or self._samples < min_samples("unbiased"):
            return None
        grams, positions = [], []
        sizes = (len(self._features[0]), len(self._features[-1]))
        for stored in self._features:
            distinct, where = _distinct(stored)
            stored.clear()
            if not distinct:
                return zero_sums(*sizes, sum_dtype(self._devices[0]), self._devices[0])
            grams.append([self._gram(chunks) for chunks in distinct])
            positions.append(torch.tensor(where, device=self._devices[0]))
        terms = hsic_products(grams[0], grams[1] if len(grams) > 1 else None, "unbiased")
        return select_sums(batch_sums(*terms), positions[0], positions[-1])

    def _gram(self, chunks: list[Measurement]) -> Tensor:
        real = _joined_masks(chunks)
        rows = torch.cat([one.parts[0] for one in chunks]).to(self._devices[0])
        chunks.clear()
        if real is not None:  # each batch has its own means in the place of padding
            tokens = rows.unflatten(1, (real.shape[1], -1))
            rows = without_padding(tokens, real.to(rows.device)).flatten(1)
        with full_precision(rows.device):
            return scaled_gram(self._kernel, rows)[0]

    def clear(self) -> None:
        """Drop the features."""
        self._features.clear()


def _width_bytes(measurement: Measurement) -> int:
    """Return the bytes of one sample's features."""
    rows = measurement.parts[0]
    return rows.shape[1] * rows.itemsize


def _joined_masks(chunks: list[Measurement]) -> Tensor | None:
    """Return the mask (N, t) of all samples; None if no token is padding."""
    tokens = next((one.real.shape[1] for one in chunks if one.real is not None), None)
    if tokens is None:
        return None
    all_real = [
        torch.ones(len(one.parts[0]), tokens, dtype=torch.bool, device="cpu") for one in chunks
    ]
    return torch.cat(
        [
            every if one.real is None else one.real
            for one, every in zip(chunks, all_real, strict=True)
        ]
    )


def _distinct(
    stored: list[list[Measurement] | None],
) -> tuple[list[list[Measurement]], list[int]]:
    """Return the distinct lists of chunks, and the position in them of every row's list.

    Rows share their chunks if their modules returned the same tensor. The position of a row that
    is left out is 0; its sums do not matter.
    """
    found: dict[tuple[int, ...], int] = {}
    distinct: list[list[Measurement]] = []
    where = []
    for chunks in stored:
        if chunks is None:
            where.append(0)
            continue
        key = tuple(map(id, chunks))
        if key not in found:
            found[key] = len(distinct)
            distinct.append(chunks)
        where.append(found[key])
    return distinct, where


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.2f} MB ({size} bytes)"


def available_bytes(stored: int) -> int | None:
    """Return the free bytes of host memory plus ``stored``; None if unknown."""
    try:
        return stored + os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
