"""Sums over batches of HSIC after random permutations of the samples of each batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cka.functional.hsic import HSICEstimator, permuted_products
from cka.functional.sums import Exponents, Sums, powers


class Permutations:
    """Adds up N permuted HSIC values of every pair; of a batch it keeps nothing.

    Every batch is permuted within itself, N times and independently of the others. The memory is
    that of N L1 L2 float64 numbers.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._total: Tensor | None = None
        self._exponents: Exponents | None = None

    def add(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        positions: tuple[Tensor, Tensor],
        batch: Sums,
        total: Sums,
    ) -> None:
        """Add one batch, whose sums are ``batch``; those of all batches are now ``total``.

        ``positions`` are those of the L1 rows' and L2 columns' Gram matrices.
        """
        rows, columns = positions
        device = rows.device
        if self._total is None:
            shape = (self._count, len(rows), len(columns))
            self._total = torch.zeros(shape, dtype=total.cross.dtype, device=device)
        elif self._exponents != total.exponents:
            self._total *= factors(self._exponents, total)
        self._exponents = total.exponents
        powers_of_two = None
        if batch.exponents != total.exponents:
            powers_of_two = factors(batch.exponents, total)
        size = len(grams_x[0])
        orders = [
            torch.randperm(size, generator=self._generator, device="cpu").to(device)
            for _ in range(self._count)
        ]
        for number, product in permuted_products(grams_x, grams_y, estimator, orders):
            chosen = product[rows][:, columns]
            self._total[number] += chosen if powers_of_two is None else chosen * powers_of_two

    def total(self) -> Tensor | None:
        """Return the sums (N, L1, L2) with the exponents of the last total; None if none."""
        return self._total

    def clear(self) -> None:
        """Drop the sums."""
        self._total = None


def factors(before: Exponents | None, after: Sums) -> Tensor:
    """Return what brings HSIC (L1, L2) from the exponents ``before`` to those of ``after``."""
    zeros = ((0,) * len(after.self1), (0,) * len(after.self2))
    one, two = (
        powers(*side, like=after.cross)
        for side in zip(before or zeros, after.exponents or zeros, strict=True)
    )
    return one[:, None] * two[None, :]
