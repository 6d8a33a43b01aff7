"""The Hilbert-Schmidt Independence Criterion (HSIC) of Gram matrices.

Unbiased: Song et al. 2012, in the U-centred form of Székely & Rizzo 2014 (eq. 2.1), which has the
same value and avoids cancellation. Biased: Gretton et al. 2005, tr(KHLH) / (n-1)².
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional import full_precision, real_float, sum_dtype

HSICEstimator: TypeAlias = Literal["unbiased", "biased"]

# Size of the float64 copies that one matrix product reads; the Gram matrices keep their dtype.
SLAB_BYTES = 2 * 2**20
# Rounding error of a matrix product of equal rows, relative to its entries.
_EQUAL_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def min_samples(estimator: HSICEstimator) -> int:
    """Return the smallest n for which the divisor n (n-3) or (n-1)² is positive."""
    return 4 if estimator == "unbiased" else 2


def hsic(gram_x: Tensor, gram_y: Tensor, *, estimator: HSICEstimator = "unbiased") -> Tensor:
    """Return HSIC of two (n, n) Gram matrices of the same n samples.

    >>> x, y = torch.randn(2, 50, 8)
    >>> hsic(x @ x.T, y @ y.T).shape
    torch.Size([])

    Args:
        gram_x: Gram matrix (n, n) of any real dtype; it need not be centred.
        gram_y: Gram matrix (n, n) of the same samples in the same order.
        estimator: ``"unbiased"`` (Song et al. 2012, n ≥ 4) or ``"biased"`` (Gretton et al. 2005,
            n ≥ 2).

    Returns:
        A 0-d float64 tensor on the CPU. Gradients are propagated.

    Raises:
        InputError: if the matrices are not real, not square, differ in size, or are too small.
        SettingError: if the estimator is unknown.
    """
    check_estimator(estimator)
    for gram in (gram_x, gram_y):
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise InputError(
                f"a Gram matrix must be square, got shape {tuple(gram.shape)}; "
                "pass (n, n) similarities of n samples, e.g. x @ x.T"
            )
    if gram_x.shape != gram_y.shape:
        raise InputError(
            f"the Gram matrices have {gram_x.shape[0]} and {gram_y.shape[0]} samples; "
            "compute both from the same samples"
        )
    check_sample_count(len(gram_x), estimator)
    of_x, of_y = real_float(gram_x), real_float(gram_y)
    return hsic_products([of_x], [of_y], estimator)[0][0, 0].to("cpu", torch.float64)


def check_estimator(estimator: str) -> None:
    """Check that the estimator is known.

    Raises:
        SettingError: if it is not.
    """
    if estimator == "sampled_neurons":
        raise SettingError(
            "estimator='sampled_neurons' needs features, not Gram matrices; use cka_from_features "
            "or CKA, or write estimator='unbiased' or 'biased'"
        )
    if estimator not in get_args(HSICEstimator):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write 'unbiased' or 'biased'"
        )


def check_sample_count(samples: int, estimator: HSICEstimator) -> None:
    """Check that the estimate exists for n samples.

    Raises:
        InputError: if there are too few samples.
    """
    if samples < min_samples(estimator):
        raise InputError(
            f"the {estimator} estimator needs at least {min_samples(estimator)} samples, "
            f"got {samples}; pass more samples"
        )


def hsic_products(
    grams_x: Sequence[Tensor], grams_y: Sequence[Tensor] | None, estimator: HSICEstimator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return HSIC of every pair, (L1, L2), and of each matrix with itself, (L1,) and (L2,).

    The (n, n) matrices are centred and multiplied in float64, a few rows of all of them at a time.
    ``grams_y=None`` means the same matrices as ``grams_x``, which are then centred only once.
    """
    device = grams_x[0].device
    dtype = sum_dtype(device)
    samples = len(grams_x[0])
    cross: Tensor = torch.zeros((), device=device, dtype=dtype)
    self_x, self_y = cross, cross
    # Both sides have slabs of the same rows, also if the number of matrices differs.
    rows = rows_per_slab(max(len(grams_x), len(grams_y or ())), samples)
    with full_precision(device):
        if grams_y is None:
            for x in centred_slabs(grams_x, estimator, rows):
                cross = cross + x @ x.T
            self_x = self_y = cross.diagonal()
        else:
            for x, y in zip(
                centred_slabs(grams_x, estimator, rows),
                centred_slabs(grams_y, estimator, rows),
                strict=True,
            ):
                cross = cross + x @ y.T
                self_x = self_x + x.square().sum(1)
                self_y = self_y + y.square().sum(1)
    scale = _scale(samples, estimator)
    return cross * scale, self_x * scale, self_y * scale


def permuted_products(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    orders: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of HSIC after each of the N permutations ``orders`` (N, n) of ``grams_y``.

    A part is ``(numbers, values)`` with values (k, L1 L2) for the k permutations ``numbers``; the
    parts of a permutation add up to its HSIC. Only ``grams_x`` is centred: a centred matrix is
    orthogonal to what centring subtracts from the other one. Both are symmetric, so each pair of
    samples is multiplied once.
    """
    flat = [gram.reshape(-1) for gram in (grams_x if grams_y is None else grams_y)]
    size = orders.shape[1]
    for pairs, x in centred_pairs(grams_x, estimator, len(grams_x)):
        # A pair (i, j) stands for (j, i) too.
        x *= (2 - (pairs[0] == pairs[1]).to(x.dtype)) * _scale(size, estimator)
        several = max(1, SLAB_BYTES // (len(flat) * x.shape[1] * x.itemsize))
        for start in range(0, len(orders), several):
            some = orders[start : start + several]
            entries = (some[:, pairs[0]] * size + some[:, pairs[1]]).flatten()
            y = torch.stack([gram.index_select(0, entries) for gram in flat]).to(x.dtype)
            with full_precision(x.device):
                products = x @ y.view(-1, x.shape[1]).T
            values = products.view(len(x), len(flat), len(some)).permute(2, 0, 1)
            yield slice(start, start + len(some)), values.flatten(1)


def centred_pairs(
    grams: Sequence[Tensor], estimator: HSICEstimator, matrices: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of samples (2, m), and the entries of the L centred matrices for them, (L, m).

    A pair is (i, j) with i < j, or i = j if the estimate is biased: the diagonal of a matrix that
    is U-centred is zero. The parts have a suitable size for that many ``matrices``.
    """
    size = len(grams[0])
    dtype = sum_dtype(grams[0].device)
    offsets, not_constant = _offsets(grams, estimator, dtype), _not_constant(grams)[:, :, 0]
    flat = [gram.reshape(-1) for gram in grams]
    pairs = torch.triu_indices(
        size, size, offset=1 if estimator == "unbiased" else 0, device=grams[0].device
    )
    for some in pairs.split(max(1, SLAB_BYTES // (matrices * dtype.itemsize)), 1):
        first, second = some
        entries = first * size + second
        values = torch.stack([gram.index_select(0, entries) for gram in flat]).to(dtype)
        values -= offsets[:, first]
        values -= offsets[:, second]
        values *= not_constant
        yield some, values


def _scale(samples: int, estimator: HSICEstimator) -> float:
    """Return the factor of the inner product of two centred matrices in their HSIC."""
    return 1 / (samples * (samples - 3) if estimator == "unbiased" else (samples - 1) ** 2)


def _offsets(grams: Sequence[Tensor], estimator: HSICEstimator, dtype: torch.dtype) -> Tensor:
    """Return the vectors m, (L, n), for which K - m1ᵀ - 1mᵀ is centred.

    Unbiased: m = u - Σu/(2(n-1)) with u = K̃1/(n-2), where K̃ is K with a zero diagonal.
    Biased: m = u - Σu/(2n) with u = K1/n, for which K - m1ᵀ - 1mᵀ = HKH.
    """
    n = len(grams[0])
    sums = torch.stack([gram.sum(1, dtype=dtype) for gram in grams])
    if estimator == "biased":
        means = sums / n
        return means - means.sum(1, keepdim=True) / (2 * n)
    means = (sums - torch.stack([gram.diagonal() for gram in grams])) / (n - 2)
    return means - means.sum(1, keepdim=True) / (2 * (n - 1))


def _not_constant(grams: Sequence[Tensor]) -> Tensor:
    """Return which of the L matrices have different entries, a bool tensor (L, 1, 1).

    The HSIC of a matrix with equal entries is exactly 0, but centring would leave its rounding
    error. Entries count as equal within the rounding error of a matrix product: the entries of
    features that vary around a centre differ by far more.
    """
    lowest = torch.stack([gram.amin() for gram in grams])
    highest = torch.stack([gram.amax() for gram in grams])
    size = torch.maximum(lowest.abs(), highest.abs())
    differ = highest - lowest > _EQUAL_TOLERANCE[lowest.dtype] * size
    # Comparisons with NaN are false, but the HSIC of a matrix with NaN must be NaN.
    return (differ | size.isnan())[:, None, None]


def rows_per_slab(matrices: int, samples: int) -> int:
    """Return how many rows of that many (n, n) matrices are copied at a time."""
    return max(1, SLAB_BYTES // (matrices * samples * torch.float64.itemsize))


def centred_slabs(grams: Sequence[Tensor], estimator: HSICEstimator, rows: int) -> Iterator[Tensor]:
    """Yield the L centred matrices a few rows at a time, flattened to (L, rows * n)."""
    n = len(grams[0])
    dtype = sum_dtype(grams[0].device)
    offsets = _offsets(grams, estimator, dtype)
    not_constant = _not_constant(grams)
    for start in range(0, n, rows):
        slab = torch.stack([gram[start : start + rows] for gram in grams]).to(dtype)
        slab -= offsets[:, start : start + rows, None]
        slab -= offsets[:, None, :]
        slab *= not_constant
        if estimator == "unbiased":
            slab.diagonal(offset=start, dim1=1, dim2=2).zero_()
        yield slab.flatten(1)


def centred(gram: Tensor, estimator: HSICEstimator) -> Tensor:
    """Return the whole centred matrix (n, n), of which HSIC is the inner product."""
    slabs = centred_slabs([gram], estimator, rows_per_slab(1, len(gram)))
    return torch.cat([slab.view(-1, len(gram)) for slab in slabs])
