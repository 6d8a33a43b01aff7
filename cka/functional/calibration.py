"""Calibration of CKA by permutations: what each pair of layers would have by chance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cka.functional.sums import Sums, cka_scale

# Values that differ by rounding only count as equal.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Calibration:
    """CKA of every pair against its values after permutations of the samples.

    A value that is not above chance says nothing about the two layers, however high it is.
    """

    mean: Tensor
    """Mean of the permuted CKA, (L1, L2), float64 on the CPU."""
    spread: Tensor
    """Standard deviation of the permuted CKA, with divisor N - 1, (L1, L2)."""
    z: Tensor
    """(CKA - mean) / spread, (L1, L2)."""
    p: Tensor
    """One-sided p-value of each pair alone, (1 + #{permuted >= CKA}) / (1 + N), (L1, L2)."""
    p_best: Tensor
    """p-value corrected for all pairs of the comparison, (L1, L2): that of the pair chosen because
    it is the highest. Of a part of a result, it is still corrected for all pairs."""
    permutations: int
    """N."""

    def is_significant(self, level: float = 0.05) -> Tensor:
        """Return for which pairs ``p_best`` is at most ``level``, a bool tensor (L1, L2).

        If no two layers are related, at most this share of comparisons has any such pair. With N
        permutations no p-value is below 1 / (1 + N), so with too few there is no such pair.
        """
        return self.p_best <= level

    def __str__(self) -> str:
        found, pairs = int(self.is_significant().sum()), self.p_best.numel()
        above = f"{found} of {pairs} pairs above chance"
        return f"{above} (p_best ≤ 0.05, {self.permutations} permutations)"

    def __repr__(self) -> str:
        return f"<Calibration: {self}>"


def calibrate(sums: Sums, permuted: Tensor, positions: Tensor) -> Calibration:
    """Return the calibration of CKA (L1, L2) by its values after N permutations.

    ``p_best`` is the single-step max statistic (Westfall & Young 1993, ch. 2): a pair's value is
    compared with the highest value in the whole matrix of each permutation. Pairs whose CKA varies
    little by chance count as much as others, because values are first standardised by the mean and
    standard deviation of their pair, over the N permutations and the samples as they are. Pairs
    whose CKA is NaN have NaN, and do not count in the maximum; if N is 1, spread and z are NaN.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        permuted: permuted HSIC of P pairs of outputs, (N, P), in the same units.
        positions: position of each pair of layers in ``permuted``, (L1, L2).
    """
    scale = cka_scale(sums)
    cka = sums.cross / scale
    mean, spread, standard, p = (torch.empty_like(cka) for _ in range(4))
    highest = cka.new_full((len(permuted),), -torch.inf)
    # A row at a time, so that the working space is that of N L2 numbers.
    for at in range(len(cka)):
        values = permuted[:, positions[at]] / scale[at]
        mean[at], spread[at] = values.mean(0), values.std(0)
        p[at] = (1 + (values >= cka[at] - _EQUAL).sum(0)).to(p.dtype) / (1 + len(values))
        with_own = torch.cat([cka[at][None], values])
        deviation = with_own.std(0)
        with_own -= with_own.mean(0)
        with_own /= torch.where(deviation > 0, deviation, torch.nan)
        standard[at] = with_own[0]
        highest = torch.maximum(highest, with_own[1:].nan_to_num(-torch.inf).amax(1))
    p_best = torch.ones_like(cka)
    for value in highest:
        p_best += value >= standard - _EQUAL
    p_best /= 1 + len(permuted)
    unknown = cka.isnan()
    return Calibration(
        mean=mean.masked_fill(unknown, torch.nan).to("cpu"),
        spread=spread.masked_fill(unknown, torch.nan).to("cpu"),
        z=((cka - mean) / spread).to("cpu"),
        p=p.masked_fill(unknown, torch.nan).to("cpu"),
        p_best=p_best.masked_fill(unknown | standard.isnan(), torch.nan).to("cpu"),
        permutations=len(permuted),
    )
