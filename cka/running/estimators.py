"""What is measured in the hooks, and how it becomes sums: by minibatch, or over all the data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cka.errors import DoesNotFitError
from cka.functional.hsic import Centring, fewest_samples, hsic_products
from cka.functional.kernels import Kernel, flattened
from cka.functional.precision import full_precision, gram_dtype
from cka.functional.sums import Sums, merge, of_batch, pick

Parts = tuple[Tensor, ...]
"""Measurement of one output: its Gram matrices (exact: its features)."""

# A kernel works on some copies of its result: sums in float64 of some threads, distances.
_COPIES_OF_A_GRAM = 5


class Side:
    """One model's share of a batch: distinct measurements, and which one each row has."""

    def __init__(self, values: Sequence[Parts], positions: Sequence[int]) -> None:
        self.values = values
        self.positions = tuple(positions)


class Estimator(Protocol):
    """The part of a comparison that depends on the estimator."""

    fewest: int
    """Smallest batch that can be used."""

    def measure(self, features: Tensor) -> Parts:
        """What is kept of an output (n, ...)."""

    def add(self, sides: Sequence[Side]) -> None:
        """Take a batch of one model (compared with itself) or of two."""

    def sums(self) -> Sums | None:
        """Sums over everything taken; None if nothing was."""

    def forget(self) -> None:
        """Drop everything taken."""


class Minibatch:
    """Gram matrices in the hook, HSIC summed over batches (Nguyen et al. 2020)."""

    def __init__(self, kernel: Kernel, centring: Centring, part_size: int | None) -> None:
        self._kernel = kernel
        self._centring = centring
        self._part_size = part_size
        self._sums: Sums | None = None
        self._index: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.fewest = fewest_samples(centring)

    def measure(self, features: Tensor) -> Parts:
        """One (m, m) Gram matrix per sub-batch of the (n, ...) features."""
        rows = flattened(features, self._kernel)
        sizes = self._sizes(rows.shape[0])
        parts = rows.split(sizes) if len(sizes) > 1 else [rows]
        with full_precision(rows.device):
            return tuple(self._kernel(part) for part in parts)

    def _sizes(self, samples: int) -> list[int]:
        """Sizes of the sub-batches; the last one takes a rest too small to stand alone."""
        size = self._part_size or samples
        if samples < size:
            return [samples]
        sizes = [size] * (samples // size)
        rest = samples % size
        if rest >= self.fewest:
            return [*sizes, rest]
        sizes[-1] += rest
        return sizes

    def add(self, sides: Sequence[Side]) -> None:
        """Add the HSIC terms of every sub-batch."""
        rows = self._indices(sides[0])
        columns = self._indices(sides[-1])
        for part in range(len(sides[0].values[0])):
            grams = [_gathered(side, part, rows.device) for side in sides]
            terms = hsic_products(grams[0], grams[1] if len(grams) > 1 else None, self._centring)
            found = pick(of_batch(*terms), rows, columns)
            self._sums = found if self._sums is None else merge(self._sums, found)

    def _indices(self, side: Side) -> Tensor:
        # Made once per arrangement of rows: a new index tensor is a copy to the device.
        device = side.values[0][0].device
        key = (side.positions, device)
        if key not in self._index:
            self._index = {k: v for k, v in self._index.items() if len(self._index) < 8}
            self._index[key] = torch.tensor(side.positions, device=device)
        return self._index[key]

    def sums(self) -> Sums | None:
        """Sums over the batches so far."""
        return self._sums

    def forget(self) -> None:
        """Drop the sums."""
        self._sums = None
        self._index.clear()


def _gathered(side: Side, part: int, device: torch.device) -> list[Tensor]:
    # A model spread over devices leaves its Gram matrices on them.
    return [parts[part].to(device) for parts in side.values]


class Exact:
    """Features of all samples in host memory, one Gram matrix (N, N) per layer at the end."""

    fewest = 1

    def __init__(self, kernel: Kernel, expected: int | None, limit_bytes: int | None) -> None:
        self._kernel = kernel
        self._expected = expected
        self._limit_bytes = limit_bytes
        self._features: list[list[list[Tensor]]] = []
        self._devices: list[torch.device] = []
        self._samples = 0

    def measure(self, features: Tensor) -> Parts:
        """The (n, p) features themselves, copied to the host."""
        rows = flattened(features, self._kernel)
        if not self._devices:
            self._devices.append(rows.device)
        return (rows.to("cpu", gram_dtype(rows.dtype), copy=True),)

    def add(self, sides: Sequence[Side]) -> None:
        """Store a batch, if all there will be fits.

        Raises:
            DoesNotFitError: with the bytes it would take.
        """
        if not self._features:
            self._features = [[[] for _ in side.positions] for side in sides]
        for stored, side in zip(self._features, sides, strict=True):
            for chunks, position in zip(stored, side.positions, strict=True):
                chunks.append(side.values[position][0])
        self._samples += len(sides[0].values[0][0])
        self._check_size()

    def _check_size(self) -> None:
        samples = max(self._samples, self._expected or 0)
        distinct = [chunks for stored in self._features for chunks in _distinct(stored)[0]]
        per_sample = sum(chunks[0][0].numel() * chunks[0].itemsize for chunks in distinct)
        features = samples * per_sample
        widest = samples * max(chunks[0][0].numel() * chunks[0].itemsize for chunks in distinct)
        grams = [samples**2 * chunks[0].itemsize for chunks in distinct]
        needed = features + widest + sum(grams) + _COPIES_OF_A_GRAM * max(grams)
        held = self._samples * per_sample
        allowed = available_bytes(held) if self._limit_bytes is None else self._limit_bytes
        if allowed is not None and needed > allowed:
            raise DoesNotFitError(
                f"the exact estimator needs {needed} bytes ({needed / 2**30:.2f} GiB) for "
                f"{samples} samples of {len(distinct)} layers, and {allowed} are there; compare "
                "fewer layers or samples, pool tokens, or use estimator='unbiased', which needs "
                "none of it"
            )

    def sums(self) -> Sums | None:
        """Unbiased HSIC of all samples at once; lets go of the features on the way."""
        if not self._features or self._samples < fewest_samples("unbiased"):
            return None
        grams, positions = [], []
        for stored in self._features:
            distinct, where = _distinct(stored)
            stored.clear()
            grams.append([self._gram(chunks) for chunks in distinct])
            positions.append(torch.tensor(where, device=self._devices[0]))
        terms = hsic_products(grams[0], grams[1] if len(grams) > 1 else None, "unbiased")
        return pick(of_batch(*terms), positions[0], positions[-1])

    def _gram(self, chunks: list[Tensor]) -> Tensor:
        rows = torch.cat(chunks).to(self._devices[0])
        chunks.clear()
        with full_precision(rows.device):
            return self._kernel(rows)

    def forget(self) -> None:
        """Drop the features."""
        self._features.clear()


def _distinct(stored: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[int]]:
    """Rows with the very same chunks once each, and which one every row is."""
    found: dict[tuple[int, ...], int] = {}
    where = [found.setdefault(tuple(map(id, chunks)), len(found)) for chunks in stored]
    return [stored[where.index(number)] for number in range(len(found))], where


def available_bytes(held: int) -> int | None:
    """Bytes of host memory to be had, what is ``held`` already included; None if unknown."""
    try:
        return held + os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
