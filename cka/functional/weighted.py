"""HSIC of resampled Gram matrices, in which every sample has a weight.

A resample of n samples, drawn with replacement, gives sample i the weight w_i: how often it was
drawn. The biased HSIC is that of the matrices with repeated rows and columns (Gretton et al. 2005).

The unbiased HSIC is a mean over sets of four different samples (Song et al. 2012, eq. 5). In a
matrix with repeated samples some sets would contain a sample twice, and with it entries of the
diagonal, which the estimate leaves out. The resampled HSIC is therefore the weighted mean over sets
of four different samples of the original ones, in which a set has the product of its weights:
the weighted bootstrap of a U-statistic (Janssen 1994, "Weighted bootstrapping of U-statistics").
With W_k = Σ w_i^k, A and B the matrices K and L with a zero diagonal, a = Aw, a' = Aw², b = Bw and
b' = Bw², the sum over ordered sets is

    Σ_{i<j} 2 w_i w_j (W_1² - W_2 - W_1 (w_i + w_j) + 2 w_i w_j) A_ij B_ij
    + 2 Σ_i w_i ((a'_i - (W_1 + w_i) a_i / 2) b_i + a_i (b'_i - (W_1 + w_i) b_i / 2))
    + (wᵀAw) (wᵀBw),

and that of the weights W_1⁴ - 6 W_1² W_2 + 3 W_2² + 8 W_1 W_3 - 6 W_4. If every weight is 1, their
ratio is Song's formula. Neither changes if A is centred first, which keeps its digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cka.functional.hsic import (
    SLAB_BYTES,
    HSICEstimator,
    centred_pairs,
    centred_slabs,
    min_samples,
    rows_per_slab,
)
from cka.functional.precision import full_precision, sum_dtype


def draw_weights(
    count: int, samples: int, estimator: HSICEstimator, generator: torch.Generator
) -> Tensor:
    """Return how often each sample was drawn in each of N resamples, (N, n), on the CPU.

    A resample with too few different samples for the estimator is drawn again.
    """
    weights = torch.zeros(count, samples, device="cpu", dtype=torch.float64)
    missing = torch.ones(count, dtype=torch.bool, device="cpu")
    while missing.any():
        drawn = torch.randint(
            samples, (int(missing.sum()), samples), generator=generator, device="cpu"
        )
        ones = torch.ones(drawn.shape, dtype=torch.float64, device="cpu")
        weights[missing] = torch.zeros_like(ones).scatter_add_(1, drawn, ones)
        missing = (weights > 0).sum(1) < min_samples(estimator)
    return weights


def weighted_products(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    weights: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of HSIC with each of the N weights (N, n), which are on the matrices' device.

    A part is ``(numbers, values)`` for the k weights ``numbers``. The values (k, L1 L2) are those
    of every pair; if ``grams_y`` is given, those of each matrix with itself follow, which makes
    (k, L1 L2 + L1 + L2). The parts of a weight add up to its HSIC.
    """
    weights = weights.to(sum_dtype(grams_x[0].device))
    divisors = _divisors(weights, estimator)
    with full_precision(weights.device):
        for parts in (_of_pairs, _of_sums):
            for numbers, values in parts(grams_x, grams_y, estimator, weights):
                yield numbers, values / divisors[numbers, None]


def _divisors(weights: Tensor, estimator: HSICEstimator) -> Tensor:
    """Return the sum of the weights of all sets of four samples, (N,); n² if biased."""
    one, two, three, four = (weights.pow(power).sum(1) for power in (1, 2, 3, 4))
    if estimator == "biased":
        return (one - 1) ** 2
    return one**4 - 6 * one**2 * two + 3 * two**2 + 8 * one * three - 6 * four


def _of_pairs(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    weights: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the sums over pairs of samples, i < j; with i = j too if biased."""
    most = max(len(grams_x), len(grams_y or ()))
    totals = weights.sum(1, keepdim=True)
    rest = totals**2 - weights.square().sum(1, keepdim=True)
    chunks_x = centred_pairs(grams_x, estimator, most)
    chunks_y = chunks_x if grams_y is None else centred_pairs(grams_y, estimator, most)
    for (pairs, x), (_, y) in _together(chunks_x, chunks_y):
        several = max(1, SLAB_BYTES // (len(x) * x.shape[1] * x.itemsize))
        for start in range(0, len(weights), several):
            numbers = slice(start, start + several)
            first, second = weights[numbers][:, pairs[0]], weights[numbers][:, pairs[1]]
            factors = first * second
            if estimator == "unbiased":
                added = 2 * factors + rest[numbers] - totals[numbers] * (first + second)
                factors = factors * added
            factors *= 2 - (pairs[0] == pairs[1]).to(x.dtype)
            cross = (factors[:, None, :] * x).flatten(0, 1) @ y.T
            yield (
                numbers,
                _joined(
                    cross.view(len(factors), len(x), len(y)),
                    None if grams_y is None else (factors @ x.square().T, factors @ y.square().T),
                ),
            )


def _of_sums(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    weights: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the terms with weighted sums over a row of a matrix, and over the whole matrix."""
    samples = weights.shape[1]
    rows = rows_per_slab(max(len(grams_x), len(grams_y or ())), samples)
    several = max(1, samples // 8)
    sides = [grams_x] if grams_y is None else [grams_x, grams_y]
    wholes = [weights.new_zeros(len(weights), len(side)) for side in sides]
    slabs = (centred_slabs(side, estimator, rows) for side in sides)
    for at, slab in zip(range(0, samples, rows), zip(*slabs, strict=True), strict=True):
        matrices = [one.view(len(one), -1, samples) for one in slab]
        for start in range(0, len(weights), several):
            numbers = slice(start, start + several)
            some, here = weights[numbers], weights[numbers, at : at + rows]
            sums = [(some @ one.mT).transpose(0, 1) for one in matrices]  # (k, L, rows)
            totals = some.sum(1)[:, None]
            if estimator == "unbiased":
                squares = [(some.square() @ one.mT).transpose(0, 1) for one in matrices]
                half = ((totals + here) / 2)[:, None, :]
                others = [two - half * one for one, two in zip(sums, squares, strict=True)]
            else:
                others = [one / (-2 * totals[:, None]) for one in sums]
            for whole, one in zip(wholes, sums, strict=True):
                whole[numbers] += (one * here[:, None, :]).sum(2)
            weighted = [2 * here[:, None, :] * one for one in others]
            left, right = sums[0], sums[-1]
            cross = weighted[0] @ right.mT + left @ weighted[-1].mT
            own = [2 * (one * two).sum(2) for one, two in zip(weighted, sums, strict=True)]
            yield numbers, _joined(cross, None if grams_y is None else (own[0], own[1]))
    factor = weights.sum(1) ** -2 if estimator == "biased" else torch.ones_like(weights[:, 0])
    for start in range(0, len(weights), several):
        numbers = slice(start, start + several)
        left, right = wholes[0][numbers], wholes[-1][numbers]
        found = _joined(
            left[:, :, None] * right[:, None, :],
            None if grams_y is None else (left.square(), right.square()),
        )
        yield numbers, found * factor[numbers, None]


def _together(
    chunks_x: Iterator[tuple[Tensor, Tensor]], chunks_y: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Yield the chunks of both sides, or of one side twice."""
    if chunks_x is chunks_y:
        yield from ((chunk, chunk) for chunk in chunks_x)
    else:
        yield from zip(chunks_x, chunks_y, strict=True)


def _joined(cross: Tensor, own: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return HSIC (k, L1, L2), and of each matrix with itself (k, L1) and (k, L2), in one row."""
    return torch.cat([cross.flatten(1), *(own or ())], 1)
