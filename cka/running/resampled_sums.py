"""Sums over batches of N resampled HSIC matrices, kept once for layers that return one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cka.functional.sums import Exponents, Sums, powers


@dataclass(frozen=True)
class Resampled:
    """N resampled sums of P pairs of outputs, which are the sums of E pairs of layers.

    The E pairs are the L1 L2 pairs of the result; if layers are resampled with themselves, their
    L1 and L2 pairs follow.
    """

    values: Tensor
    """Sums, (N, P)."""
    positions: Tensor
    """Position in the second dimension of each pair of layers, (E,), on the CPU."""

    def expanded(self) -> Resampled:
        """Return the same sums with one position for each pair of layers."""
        return self.of_each_pair(self.values[:, self.positions.to(self.values.device)])

    @classmethod
    def of_each_pair(cls, values: Tensor) -> Resampled:
        """Return sums (N, E) of which each pair of layers has its own."""
        return cls(values, torch.arange(values.shape[1], device="cpu"))

    def positions_of(
        self, counts: tuple[int, int], rows: list[int], columns: list[int]
    ) -> list[Tensor]:
        """Return the positions (R, C) of some of the L1 and L2 layers, and (R,) and (C,) if known.

        ``counts`` are L1 and L2. The positions are on the device of the values.
        """
        sizes = [counts[0] * counts[1], *counts]
        parts = self.positions.split(sizes[: 1 if len(self.positions) == sizes[0] else 3])
        cross = parts[0].view(counts)[rows][:, columns]
        own = [part[chosen] for part, chosen in zip(parts[1:], (rows, columns), strict=False)]
        return [found.to(self.values.device) for found in (cross, *own)]


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
            pairs: a number for each of the E pairs of layers, (E,), on the CPU: the position of its
                HSIC in the values that are added.
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
            used = pairs
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
        of_layers = factors(before, total, len(self._sums.positions))
        # Layers that share their sums have the same exponents.
        found = of_layers.new_empty(self._sums.values.shape[1])
        return found.index_copy_(0, self._sums.positions.to(found.device), of_layers)

    def add(self, numbers: slice, values: Tensor) -> None:
        """Add HSIC of one batch's pairs of outputs for k of the N resamples, (k, G)."""
        assert self._sums is not None
        chosen = values[:, self._used]
        self._sums.values[numbers] += chosen if self._factors is None else chosen * self._factors

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None


def factors(before: Exponents | None, after: Sums, pairs: int) -> Tensor:
    """Return what brings HSIC of E pairs from the exponents ``before`` to those of ``after``."""
    zeros = ((0,) * len(after.self1), (0,) * len(after.self2))
    one, two = (
        powers(*side, like=after.cross)
        for side in zip(before or zeros, after.exponents or zeros, strict=True)
    )
    cross = (one[:, None] * two[None, :]).flatten()
    return cross if pairs == len(cross) else torch.cat([cross, one.square(), two.square()])
