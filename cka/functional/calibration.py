"""Calibration of CKA by permutations: what each pair of layers would have by chance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Values that differ by rounding only count as equal.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Calibration:
    """CKA of every pair against its values after permutations of the samples."""

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


def calibrate(cka: Tensor, permuted: Tensor) -> Calibration:
    """Return the calibration of CKA (L1, L2) by its values (N, L1, L2) after N permutations.

    ``p_best`` is the single-step max statistic (Westfall & Young 1993, ch. 2): a pair's value is
    compared with the highest value in the whole matrix of each permutation. Pairs whose CKA varies
    little by chance count as much as others, because values are first standardised by the mean and
    standard deviation of their pair, over the N permutations and the samples as they are. Pairs
    whose CKA is NaN have NaN, and do not count in the maximum; if N is 1, spread and z are NaN.
    """
    mean, spread = permuted.mean(0), permuted.std(0)
    all_values = torch.cat([cka[None], permuted])
    scale = all_values.std(0)
    standard = (all_values - all_values.mean(0)) / torch.where(scale > 0, scale, torch.nan)
    highest = standard[1:].nan_to_num(-torch.inf).flatten(1).amax(1)
    count = 1 + len(permuted)
    # A quotient of integers would be float32.
    p = (1 + (permuted >= cka - _EQUAL).sum(0)).to(cka.dtype) / count
    p_best = torch.ones_like(cka)
    for value in highest:
        p_best += value >= standard[0] - _EQUAL
    unknown = cka.isnan()
    return Calibration(
        mean=mean,
        spread=spread,
        z=(cka - mean) / spread,
        p=p.masked_fill(unknown, torch.nan),
        p_best=(p_best / count).masked_fill(unknown | standard[0].isnan(), torch.nan),
        permutations=len(permuted),
    )
