"""The estimator over all samples at once, whose features it stores in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cka.capture.outputs import without_padding
from cka.errors import DoesNotFitError, InputError
from cka.functional import full_precision, gram_dtype, hsic_products, min_samples, sum_dtype
from cka.functional.features import flattened
from cka.functional.kernels import Kernel, linear_gram, scaled_gram
from cka.functional.neighbours import Measure, Neighbourhood, neighbour_terms, neighbourhood
from cka.functional.resampling import Resampling
from cka.functional.sums import Sums, batch_sums, select_sums, zero_sums
from cka.running import BatchMeasurements, Measurement

# While a kernel runs, it holds up to this many copies of its result: float64 sums, distances.
_COPIES_OF_A_GRAM = 5


class Exact:
    """Stores the features of all samples in host memory; (N, N) Gram matrices follow at the end."""

    min_samples = 1

    def __init__(
        self,
        kernel: Kernel,
        expected: int | None,
        limit_bytes: int | None,
        resamplings: Sequence[Resampling] = (),
        *,
        on_disk: bool = False,
    ) -> None:
        """Prepare to store features.

        Args:
            kernel: a kernel from :func:`cka.functional.kernels.resolve_kernel`.
            expected: number of samples that will be added; None if it is not known.
            limit_bytes: limit of host memory in bytes; None means what is free.
            resamplings: get the Gram matrices of all samples, too.
            on_disk: whether features are mapped files, which take no memory until they are read.
        """
        self._on_disk = on_disk
        self._kernel = kernel
        self._expected = expected
        self._limit_bytes = limit_bytes
        self._resamplings = resamplings
        # Chunks of each row of each model; None for a row that is left out.
        self._features: list[list[list[Measurement] | None]] = []
        self.uneven: Sequence[set[int]] = ()
        self._devices: list[torch.device] = []  # that of the first output, where Grams are computed
        self._samples = 0

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        """Return the features as (n, p), copied to the host, with the mask of their tokens."""
        rows = flattened(features, self._kernel)
        if not self._devices:
            self._devices.append(rows.device)
        if self._on_disk:
            return Measurement((rows,))
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
        features = 0 if self._on_disk else samples * sum(widths)
        widest = samples * max(widths)
        if any(chunk.real is not None for chunks in distinct for chunk in chunks):
            widest *= 2  # padding is replaced in a copy
        grams = [samples**2 * self._bytes_of_entry(chunks[0].parts[0]) for chunks in distinct]
        widest *= self._copies_of_features
        computed = max(self._bytes_while_computed(chunks[0].parts[0]) for chunks in distinct)
        needed = features + widest + sum(grams) + _COPIES_OF_A_GRAM * samples**2 * computed
        stored = 0 if self._on_disk else self._samples * sum(widths)
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
            # Rows that share features have lists of their own, which would keep them in memory.
            stored.clear()
            if not distinct:
                return zero_sums(*sizes, sum_dtype(self._devices[0]), self._devices[0])
            grams.append([self._gram(chunks) for chunks in distinct])
            positions.append(where)
        others = grams[1] if len(grams) > 1 else self._others(grams[0])
        terms = self._terms(grams[0], others)
        indices = [torch.tensor(where, device=self._devices[0]) for where in positions]
        sums = select_sums(batch_sums(*terms), indices[0], indices[-1])
        for resampling in self._resamplings:
            of_both = (positions[0], positions[-1])
            resampling.add(grams[0], others, "unbiased", of_both, sums, sums)
        return sums

    _copies_of_features = 1

    def _others(self, grams: list[Any]) -> list[Any] | None:
        """Return the columns of a self-comparison; None if they are the rows in any order."""
        return None

    def _bytes_of_entry(self, features: Tensor) -> int:
        """Return the bytes of one entry of the (N, N) matrix that is kept for each layer."""
        return gram_dtype(features.dtype).itemsize

    def _bytes_while_computed(self, features: Tensor) -> int:
        """Return the bytes of one entry of the temporary (N, N) matrices that compute it."""
        return gram_dtype(features.dtype).itemsize

    def _terms(self, grams: list[Any], others: list[Any] | None) -> tuple[Tensor, Tensor, Tensor]:
        return hsic_products(grams, others, "unbiased")

    def _gram(self, chunks: list[Measurement]) -> Any:
        real = _joined_masks(chunks)
        rows = torch.cat([chunk.parts[0] for chunk in chunks]).to(self._devices[0])
        chunks.clear()
        if real is not None:  # each batch has its own means in the place of padding
            tokens = rows.unflatten(1, (real.shape[1], -1))
            rows = without_padding(tokens, real.to(rows.device)).flatten(1)
        with full_precision(rows.device):
            return scaled_gram(self._kernel, rows, unbiased=True)[0]

    def clear(self) -> None:
        """Drop the features."""
        self._features.clear()


class ExactNeighbours(Exact):
    """Finds the neighbours of all samples at the end, from features in host memory."""

    _copies_of_features = 4  # features and what is scaled to length 1, the latter in float64

    def __init__(
        self,
        measure: Measure,
        expected: int | None,
        limit_bytes: int | None,
        resamplings: Sequence[Resampling] = (),
        *,
        on_disk: bool = False,
    ) -> None:
        """Prepare to store features; the arguments are those of :class:`Exact`."""
        super().__init__(linear_gram, expected, limit_bytes, resamplings, on_disk=on_disk)
        self._neighbours = measure

    def _others(self, grams: list[Any]) -> list[Any] | None:
        return None if self._neighbours.is_symmetric else grams

    def _bytes_of_entry(self, features: Tensor) -> int:
        return 9 if self._neighbours.needs_similarity else 1  # a float64 and a bool

    def _bytes_while_computed(self, features: Tensor) -> int:
        return 8

    def _terms(self, grams: list[Any], others: list[Any] | None) -> tuple[Tensor, Tensor, Tensor]:
        return neighbour_terms(self._neighbours, grams, others)

    def _gram(self, chunks: list[Measurement]) -> Neighbourhood:
        if any(chunk.real is not None for chunk in chunks):
            raise InputError(
                f"measure={self._neighbours.name!r} compares whole samples, so padding cannot be "
                "left out with pooling='flatten'; use pooling='mean', 'cls' or 'last', or mask=None"
            )
        rows = torch.cat([chunk.parts[0] for chunk in chunks]).to(self._devices[0])
        chunks.clear()
        return neighbourhood(rows, self._neighbours)


def _width_bytes(measurement: Measurement) -> int:
    """Return the bytes of one sample's features."""
    rows = measurement.parts[0]
    return rows.shape[1] * rows.itemsize


def _joined_masks(chunks: list[Measurement]) -> Tensor | None:
    """Return the mask (N, t) of all samples; None if no token is padding."""
    tokens = next((chunk.real.shape[1] for chunk in chunks if chunk.real is not None), None)
    if tokens is None:
        return None
    return torch.cat(
        [
            torch.ones(len(chunk.parts[0]), tokens, dtype=torch.bool, device="cpu")
            if chunk.real is None
            else chunk.real
            for chunk in chunks
        ]
    )


def _distinct(
    stored: list[list[Measurement] | None],
) -> tuple[list[list[Measurement]], list[int]]:
    """Return the distinct lists of chunks, and the position in them of every row's list.

    Rows share their chunks if their modules returned the same tensor. The position of a row that
    is left out is 0; its sums do not matter.
    """
    position_of: dict[tuple[int, ...], int] = {}
    distinct: list[list[Measurement]] = []
    positions = []
    for chunks in stored:
        if chunks is None:
            positions.append(0)
            continue
        key = tuple(map(id, chunks))
        if key not in position_of:
            position_of[key] = len(distinct)
            distinct.append(chunks)
        positions.append(position_of[key])
    return distinct, positions


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.2f} MB ({size} bytes)"


def available_bytes(stored: int) -> int | None:
    """Return how many bytes of host memory features and Gram matrices may take; None if unknown.

    Args:
        stored: bytes of the features that are stored already, and so are not free any more.
    """
    try:
        return stored + os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
