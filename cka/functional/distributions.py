"""Whether a CKA value is above chance, and its confidence interval, both from resampled CKA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional import HSICEstimator, centred, full_precision
from cka.functional.features import checked_grams
from cka.functional.kernels import Kernel
from cka.functional.resampling import random_orders
from cka.functional.sums import Sums, cka_scale, root_of_product

# Values that differ by rounding only count as equal.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Calibration:
    """CKA of every pair against its values after permutations of the samples.

    >>> from cka import CKA
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    >>> result = CKA(model, device="cpu").compare(torch.randn(2, 64, 8), progress=False, null=99)
    >>> print(result.calibration)
    4 of 4 pairs above chance (p_best ≤ 0.05, 99 permutations)

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

        If no two layers are related, at most this share of comparisons has any such pair.

        Args:
            level: the share, between 0 and 1. With N permutations no p-value is below 1 / (1 + N),
                so if ``level`` is below that, no pair is significant.

        Returns:
            A bool tensor (L1, L2).
        """
        return self.p_best <= level

    def __str__(self) -> str:
        significant, pairs = int(self.is_significant().sum()), self.p_best.numel()
        above = f"{significant} of {pairs} pairs above chance"
        return f"{above} (p_best ≤ 0.05, {self.permutations} permutations)"

    def __repr__(self) -> str:
        return f"<Calibration: {self}>"


def calibrate(sums: Sums, permuted: Tensor, columns: Sequence[Tensor]) -> Calibration:
    """Return the calibration of CKA, (L1, L2), by its values after N permutations.

    ``p_best`` is the single-step max statistic (Westfall & Young 1993, ch. 2): a pair's value is
    compared with the highest value in the whole matrix of each permutation. Pairs whose CKA varies
    little by chance count as much as others, because values are first standardised by the mean and
    standard deviation of their pair, over the N permutations and the samples as they are. Pairs
    whose CKA is NaN have NaN, and do not count in the maximum; if N is 1, spread and z are NaN.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        permuted: permuted HSIC of P pairs of outputs, (N, P), in the same units.
        columns: one tensor, the column of ``permuted`` for each pair of layers, (L1, L2).
    """
    cka = sums.cross / cka_scale(sums)
    mean, spread, standard, p = (torch.empty_like(cka) for _ in range(4))
    highest = cka.new_full((len(permuted),), -torch.inf)  # of each permutation
    for row, values in enumerate(_rows_of_cka(sums, permuted, columns)):
        mean[row], spread[row] = values.mean(0), values.std(0)
        p[row] = _p_values(cka[row], values)
        with_own = torch.cat([cka[row][None], values])
        deviation = with_own.std(0)
        with_own -= with_own.mean(0)
        with_own /= torch.where(deviation > 0, deviation, torch.nan)
        standard[row] = with_own[0]
        highest = torch.maximum(highest, with_own[1:].nan_to_num(-torch.inf).amax(1))
    p_best = torch.ones_like(cka)
    for value in highest:  # one at a time: all would be N L1 L2 numbers
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

    >>> from cka import CKA
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    >>> batches = torch.randn(2, 64, 8)
    >>> result = CKA(model, device="cpu").compare(batches, progress=False, bootstrap=200)
    >>> bool(result.confidence.low[0, 1] < result["0", "1"] < result.confidence.high[0, 1])
    True

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


def confidence(sums: Sums, resampled: Tensor, columns: Sequence[Tensor]) -> Confidence:
    """Return standard errors and intervals of CKA, (L1, L2), by its values in N resamples.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        resampled: HSIC of P pairs of outputs in N resamples, (N, P).
        columns: the column of ``resampled`` for each pair of layers, (L1, L2), and for each
            layer's pair with itself, (L1,) and (L2,).
    """
    cka = sums.cross / cka_scale(sums)
    error, low, high = (torch.empty_like(cka) for _ in range(3))
    tails = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=torch.float64, device="cpu")
    tails = tails.to(cka.dtype).to(cka.device)
    for row, values in enumerate(_rows_of_cka(sums, resampled, columns)):
        error[row] = values.std(0)
        lowest, highest = values.quantile(tails, 0)
        low[row] = (2 * cka[row] - highest).clamp(max=1)
        high[row] = (2 * cka[row] - lowest).clamp(max=1)
    return Confidence(error.to("cpu"), low.to("cpu"), high.to("cpu"), len(resampled))


def _rows_of_cka(sums: Sums, resampled: Tensor, columns: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the resampled CKA of one row of the matrix after the other, each (N, L2).

    All rows together would take N L1 L2 numbers.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        resampled: HSIC of P pairs of outputs in N resamples, (N, P).
        columns: the column of ``resampled`` for each pair of layers, (L1, L2); if resamples change
            the HSIC of layers with themselves, also those of these pairs, (L1,) and (L2,).
    """
    cross, *self_columns = columns
    scales = cka_scale(sums)
    if self_columns:
        of_rows, self2 = self_columns[0], resampled[:, self_columns[1]]
    for row in range(len(cross)):
        scale = (
            root_of_product(resampled[:, of_rows[row], None], self2)
            if self_columns
            else scales[row]
        )
        yield resampled[:, cross[row]] / scale


def _p_values(value: Tensor | float, resampled: Tensor) -> Tensor:
    """Return one-sided p-values, (1 + #{resampled >= value}) / (1 + N), by N values (N, ...).

    The values as they are count as one resample, so it is never 0.
    """
    higher = (resampled >= value - _EQUAL).sum(0)
    return (1 + higher).to(resampled.dtype) / (1 + len(resampled))


@dataclass(frozen=True, eq=False)
class NullDistribution:
    """CKA of two sets of features, and CKA after random permutations of the samples of one.

    :func:`cka.null_distribution` computes it. ``str`` of it has the value, the mean and the 95 %
    quantile by chance, and the p-value.
    """

    value: float
    """CKA of the features as they are."""
    values: Tensor
    """CKA after each of the n permutations, (n,), float64 on the CPU."""

    @property
    def mean(self) -> float:
        """CKA by chance, on average: about 0 if unbiased, up to 1 if biased with wide features."""
        return float(self.values.mean())

    def quantile(self, q: float) -> float:
        """Return the value below which a fraction ``q`` of the permuted values is.

        Args:
            q: the fraction, from 0 to 1.

        Returns:
            The value, interpolated between two permuted ones.
        """
        return float(self.values.quantile(q))

    @property
    def p_value(self) -> float:
        """Share of permutations with at least this CKA, (1 + #{permuted >= value}) / (1 + n).

        The features as they are count as one permutation, so it is never 0: the smallest p-value
        of n permutations is 1 / (1 + n). It is NaN if the value is.
        """
        if math.isnan(self.value):
            return math.nan
        return float(_p_values(self.value, self.values))

    def is_above_chance(self, level: float = 0.05) -> bool:
        """Whether the p-value is at most ``level``: the features are more similar than by chance.

        Args:
            level: probability, between 1 / (1 + n) and 1, of a wrong "yes" for unrelated features.

        Returns:
            Whether it is.

        Raises:
            SettingError: if no p-value of so few permutations can be that small.
        """
        smallest = 1 / (1 + len(self.values))
        if not smallest <= level < 1:
            raise SettingError(
                f"{len(self.values)} permutations give a p-value of at least {smallest:.2g}, but "
                f"got level={level}; write a level from {smallest:.2g} to below 1, or use more "
                "permutations"
            )
        return self.p_value <= level

    def __str__(self) -> str:
        return (
            f"CKA {self.value:.4f}, by chance {self.mean:.4f} "
            f"(95 % below {self.quantile(0.95):.4f}): p = {self.p_value:.4f}, "
            f"{len(self.values)} permutations"
        )

    def __repr__(self) -> str:
        return f"<NullDistribution: {self}>"


@torch.no_grad()
def null_distribution(
    x: Tensor,
    y: Tensor,
    n: int = 999,
    *,
    kernel: str | Kernel = "linear",
    estimator: HSICEstimator = "unbiased",
    seed: int = 0,
) -> NullDistribution:
    """Return CKA of two sets of features and its distribution by chance.

    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> null_distribution(x, x + 0.1, n=99).is_above_chance(0.01)
    True

    A permutation test (Good 2005, "Permutation, Parametric, and Bootstrap Tests of Hypotheses";
    for HSIC: Gretton et al. 2007, "A Kernel Statistical Test of Independence"): if the features
    were independent, each assignment of the samples of ``y`` to those of ``x`` would be equally
    likely. The test is one-sided and requires that the samples are exchangeable, which frames of
    one video or tokens of one text are not.

    The Gram matrices are computed and centred once. A permutation π of the samples permutes rows
    and columns of the second one, which leaves its norm unchanged:
    ``CKA_π = Σ_ij K_ij L_π(i)π(j) / (‖K‖ ‖L‖)``. The memory is that of five (m, m) float64 matrices
    for m samples.

    Args:
        x: features (m, p), as for :func:`cka.cka_from_features`.
        y: features (m, q) of the same samples in the same order.
        n: number of permutations.
        kernel: as for :func:`cka.cka_from_features`.
        estimator: ``"unbiased"`` or ``"biased"``. A biased value can be close to 1 by chance.
        seed: seed of the permutations. The random state of torch is neither used nor changed.

    Returns:
        The value, the permuted values, their mean and quantiles, and the p-value.

    Raises:
        InputError: if the sample counts differ or are too small for the estimator.
        SettingError: if ``n`` is less than 1, or the kernel or estimator is unknown.
    """
    if n < 1:
        raise SettingError(
            f"the number of permutations must be at least 1, got {n}; write e.g. 999"
        )
    for features in (x, y):
        if isinstance(features, (list, tuple)):
            raise InputError(
                f"null_distribution takes one pair of features, got a {type(features).__name__}; "
                "pass two (m, p) tensors, and call it once for each pair of layers"
            )
    (gram_x,), (gram_y,) = checked_grams(x, y, kernel, estimator)
    fixed, permuted = centred(gram_x, estimator), centred(gram_y, estimator)
    scale = float(fixed.norm() * permuted.norm())
    products = [(fixed * permuted).sum()]
    with full_precision(fixed.device):
        for order in random_orders(n, len(permuted), torch.Generator().manual_seed(seed)):
            order = order.to(permuted.device)
            products.append((fixed * permuted[order][:, order]).sum())
    values = torch.stack(products).to("cpu", torch.float64) / scale
    return NullDistribution(float(values[0]), values[1:])
