"""Sums over batches of N resampled HSIC matrices, kept once for layers that return one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cka.functional.sums import Exponents, Sums, powers


@dataclass(frozen=True)
class Resampled:
    """N resampled sums of P pairs of outputs."""

    values: Tensor
    """Sums, (N, P)."""
    positions: Tensor
    """Position in the second dimension of each pair of layers, (L1, L2), on the CPU."""

    def expanded(self) -> Resampled:
        """Return the same sums with one position for each pair of layers."""
        positions = self.positions.flatten().to(self.values.device)
        return self.of_each_pair(self.values[:, positions], self.positions)

    @classmethod
    def of_each_pair(cls, values: Tensor, like: Tensor) -> Resampled:
        """Return sums (N, L1 L2) of which each pair of layers has its own; ``like`` is (L1, L2)."""
        return cls(values, torch.arange(like.numel(), device="cpu").view(like.shape))


class ResampledSums:
    """Adds up N resampled HSIC matrices over batches.

    Pairs of layers share their sums if their outputs were the same tensors in every batch, and in a
    self-comparison if only the order of the two differs. A ResNet-18 with 75 layers needs the sums
    of 1770 pairs. They are kept during the forward passes of later batches.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: Resampled | None = None
        self._exponents: Exponents | None = None
        self._used = torch.empty(0, device="cpu")
        self._factors: Tensor | None = None

    def begin_batch(self, pairs: Tensor, batch: Sums, total: Sums) -> None:
        """Prepare to add a batch.

        Args:
            pairs: a number for each pair of layers, (L1, L2), on the CPU: the position of its HSIC
                in the matrices that are added, which are flattened.
            batch: sums of this batch.
            total: sums of all batches with this one.
        """
        used, positions = torch.unique(pairs, return_inverse=True)
        if self._sums is None:
            zeros = total.cross.new_zeros(self._count, len(used))
            self._sums = Resampled(zeros, positions)
            self._exponents = total.exponents
        elif not torch.equal(positions, self._sums.positions):
            self._sums = self._sums.expanded()
            used = pairs.flatten()
        self._used = used.to(total.cross.device)
        if self._exponents != total.exponents:
            self._sums.values.mul_(self._powers(self._exponents, total))
        self._exponents = total.exponents
        self._factors = None
        if batch.exponents != total.exponents:
            self._factors = self._powers(batch.exponents, total)

    def _powers(self, before: Exponents | None, total: Sums) -> Tensor:
        """Return what brings sums (P,) from the exponents ``before`` to the total's."""
        assert self._sums is not None
        of_layers = factors(before, total).flatten()
        # Layers that share their sums have the same exponents.
        found = of_layers.new_empty(self._sums.values.shape[1])
        positions = self._sums.positions.flatten().to(found.device)
        return found.index_copy_(0, positions, of_layers)

    def add(self, numbers: slice, values: Tensor) -> None:
        """Add HSIC of one batch's Gram matrices for k of the N resamples, (k, G1, G2)."""
        assert self._sums is not None
        chosen = values.flatten(1)[:, self._used]
        self._sums.values[numbers] += chosen if self._factors is None else chosen * self._factors

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None


def factors(before: Exponents | None, after: Sums) -> Tensor:
    """Return what brings HSIC (L1, L2) from the exponents ``before`` to those of ``after``."""
    zeros = ((0,) * len(after.self1), (0,) * len(after.self2))
    one, two = (
        powers(*side, like=after.cross)
        for side in zip(before or zeros, after.exponents or zeros, strict=True)
    )
    return one[:, None] * two[None, :]
