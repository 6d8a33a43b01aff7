"""The Hilbert-Schmidt Independence Criterion of stacks of Gram matrices.

Unbiased: Song et al. 2012, in the U-centred form of Székely & Rizzo 2014 (eq. 2.1), which has the
same value and loses no digits to cancellation. Biased: Gretton et al. 2005, tr(KHLH) / (n-1)².
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional.precision import full_precision, sum_dtype

Centring: TypeAlias = Literal["unbiased", "biased"]

# Float64 working space of one product; the Gram matrices themselves stay in their own dtype.
_SLAB_BYTES = 2 * 2**20
# How far entries of a matrix product of equal rows may be apart, relative to their size.
_EQUAL = {torch.float32: 1e-5, torch.float64: 1e-13}


def fewest_samples(estimator: Centring) -> int:
    """Smallest n for which the estimate exists: n (n-3) must not vanish, nor n-1."""
    return 4 if estimator == "unbiased" else 2


def hsic(gram_x: Tensor, gram_y: Tensor, *, estimator: Centring = "unbiased") -> Tensor:
    """HSIC of two (n, n) Gram matrices, a float64 0-d tensor.

    Raises:
        InputError: if the matrices are not square, differ in size, or are too small.
        SettingError: for an unknown estimator.
    """
    if estimator not in get_args(Centring):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write 'unbiased' or 'biased'"
        )
    for gram in (gram_x, gram_y):
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise InputError(f"a Gram matrix is (n, n), got {tuple(gram.shape)}")
    if gram_x.shape != gram_y.shape:
        raise InputError(
            f"the Gram matrices are of {gram_x.shape[0]} and {gram_y.shape[0]} samples; "
            "both must be of the same ones"
        )
    if len(gram_x) < fewest_samples(estimator):
        raise InputError(
            f"the {estimator} estimator needs at least {fewest_samples(estimator)} samples, "
            f"got {len(gram_x)}"
        )
    return hsic_products([gram_x], [gram_y], estimator)[0][0, 0].to("cpu", torch.float64)


def hsic_products(
    grams_x: Sequence[Tensor], grams_y: Sequence[Tensor] | None, estimator: Centring
) -> tuple[Tensor, Tensor, Tensor]:
    """HSIC of every pair, (L1, L2), and of each matrix with itself, (L1,) and (L2,).

    The (n, n) matrices are centred and multiplied in float64, some rows of all of them at a time.
    ``grams_y=None`` stands for ``grams_x`` and costs one centring less.
    """
    device = grams_x[0].device
    dtype = sum_dtype(device)
    samples = len(grams_x[0])
    cross: Tensor = torch.zeros((), device=device, dtype=dtype)
    self_x, self_y = cross, cross
    with full_precision(device):
        if grams_y is None:
            for x in _centred_slabs(grams_x, estimator):
                cross = cross + x @ x.T
            self_x = self_y = cross.diagonal()
        else:
            for x, y in zip(
                _centred_slabs(grams_x, estimator),
                _centred_slabs(grams_y, estimator),
                strict=True,
            ):
                cross = cross + x @ y.T
                self_x = self_x + x.square().sum(1)
                self_y = self_y + y.square().sum(1)
    scale = 1 / (samples * (samples - 3) if estimator == "unbiased" else (samples - 1) ** 2)
    return cross * scale, self_x * scale, self_y * scale


def _shares(grams: Sequence[Tensor], estimator: Centring, dtype: torch.dtype) -> Tensor:
    """The (L, n) vectors m of which K - m1ᵀ - 1mᵀ is centred.

    Unbiased: m = K̃1/(n-2) less Σm/(2(n-1)), with K̃ the matrix without its diagonal.
    Biased: m = K1/n less Σm/(2n), which makes K - m1ᵀ - 1mᵀ = HKH.
    """
    n = len(grams[0])
    sums = torch.stack([gram.sum(1, dtype=dtype) for gram in grams])
    if estimator == "biased":
        means = sums / n
        return means - means.sum(1, keepdim=True) / (2 * n)
    means = (sums - torch.stack([gram.diagonal() for gram in grams])) / (n - 2)
    return means - means.sum(1, keepdim=True) / (2 * (n - 1))


def _informative(grams: Sequence[Tensor]) -> Tensor:
    """Which of the L matrices say anything about the samples, (L, 1, 1).

    One with all entries equal says nothing: its HSIC is 0 exactly, and not what rounding leaves
    of it. Equal means to the rounding of a matrix product: entries of features that vary around
    a centre among them are far further apart.
    """
    lowest = torch.stack([gram.amin() for gram in grams])
    highest = torch.stack([gram.amax() for gram in grams])
    size = torch.maximum(lowest.abs(), highest.abs())
    told_apart = highest - lowest > _EQUAL[lowest.dtype] * size
    # NaN compares false, and has to stay NaN.
    return (told_apart | size.isnan())[:, None, None]


def _centred_slabs(grams: Sequence[Tensor], estimator: Centring) -> Iterator[Tensor]:
    """Yield (L, rows * n) pieces of the L centred matrices, flattened, a few rows at a time."""
    n = len(grams[0])
    dtype = sum_dtype(grams[0].device)
    shares = _shares(grams, estimator, dtype)
    informative = _informative(grams)
    rows = max(1, _SLAB_BYTES // (len(grams) * n * dtype.itemsize))
    for start in range(0, n, rows):
        slab = torch.stack([gram[start : start + rows] for gram in grams]).to(dtype)
        slab -= shares[:, start : start + rows, None]
        slab -= shares[:, None, :]
        slab *= informative
        if estimator == "unbiased":
            slab.diagonal(offset=start, dim1=1, dim2=2).zero_()
        yield slab.flatten(1)
