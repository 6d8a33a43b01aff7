"""What resampled CKA says of each value: whether it is above chance, and how exact it is."""

from __future__ import annotations

from collections.abc import Sequence
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


SHARE = 0.95


@dataclass(frozen=True, eq=False)
class Confidence:
    """Standard error and 95 % interval of the CKA of every pair, by a bootstrap over samples.

    The samples of each batch are drawn N times with replacement (Efron 1979, "Bootstrap Methods"),
    and CKA is computed from the Gram matrices, whose samples have the weights that were drawn. The
    models, the batches' sizes and the kernel's bandwidth are fixed. So this estimates how much CKA
    would vary with other samples from the same source, like ``CKAResult.standard_error``. That one
    compares whole batches; it is unreliable for few batches, and unknown for one.

    If a resample repeats a sample, the unbiased HSIC must not count the pair of the sample and
    itself. HSIC of a resample is therefore a weighted mean over sets of four different samples
    (Janssen 1994, "Weighted bootstrapping of U-statistics").

    Limits:

    - Samples must be independent, which frames of one video are not.
    - If two layers are unrelated, the errors are about √3 times too large, because a U-statistic is
      then degenerate (Arcones & Giné 1992, "On the bootstrap of U and V statistics"). Whether a
      value is above chance is a question for ``null``.
    - Batches, or parts of ``hsic_batch_size``, of fewer than about 16 samples have too few
      different resamples.
    - Errors and intervals are NaN if a layer's resampled HSIC with itself is not positive, as is
      possible for a few samples of a layer that is almost constant.
    """

    standard_error: Tensor
    """Standard deviation of CKA over the resamples, with divisor N - 1, (L1, L2), float64 on the
    CPU."""
    low: Tensor
    """Lower limit of the 95 % interval, (L1, L2). It is the basic interval (Davison & Hinkley 1997,
    "Bootstrap Methods and their Application", ch. 5): from 2 CKA - q to 2 CKA - p for the quantiles
    p and q of the resampled values, and not above 1. It allows for the bias of the estimator."""
    high: Tensor
    """Upper limit of the 95 % interval, (L1, L2)."""
    resamples: int
    """N. The limits need about 200 or more."""

    def __str__(self) -> str:
        return f"{SHARE:.0%} intervals by {self.resamples} resamples"

    def __repr__(self) -> str:
        return f"<Confidence: {self}>"


def confidence(sums: Sums, resampled: Tensor, positions: Sequence[Tensor]) -> Confidence:
    """Return the confidence of CKA (L1, L2) by its values in N resamples.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        resampled: HSIC of P pairs of outputs in N resamples, (N, P).
        positions: position in ``resampled`` of each pair of layers, (L1, L2), and of each layer's
            pair with itself, (L1,) and (L2,).
    """
    cross, rows, columns = positions
    cka = sums.cross / cka_scale(sums)
    error, low, high = (torch.empty_like(cka) for _ in range(3))
    tails = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=torch.float64, device="cpu")
    tails = tails.to(cka.dtype).to(cka.device)
    own = resampled[:, columns]
    # A row at a time, so that the working space is that of N L2 numbers.
    for at in range(len(cka)):
        one = resampled[:, rows[at], None]
        scale = (one * own).sqrt().masked_fill((one < 0) | (own < 0), torch.nan)
        values = resampled[:, cross[at]] / scale
        error[at] = values.std(0)
        lowest, highest = values.quantile(tails, 0)
        low[at] = (2 * cka[at] - highest).clamp(max=1)
        high[at] = (2 * cka[at] - lowest).clamp(max=1)
    return Confidence(error.to("cpu"), low.to("cpu"), high.to("cpu"), len(resampled))
