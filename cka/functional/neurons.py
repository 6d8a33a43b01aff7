"""The correction of HSIC for a finite number of features: the estimator "sampled_neurons".

Chun et al. 2025 (arXiv 2502.15104) regard the features of a layer, its neurons, as a sample of a
larger population. The kernel of the population is the mean over neurons i of the matrices x_i x_iᵀ,
so HSIC of a layer with itself is a mean over pairs of neurons (i, j). The p pairs (i, i) in an
estimate from p neurons make it too high, and CKA too low. They are left out:

    HSIC'(X, X) = (HSIC(XXᵀ, XXᵀ) - Σ_i HSIC(x_i x_iᵀ, x_i x_iᵀ)) / (p (p-1))

Here HSIC is the unbiased estimate for finite samples (Song et al. 2012). HSIC of two layers is
bilinear in their kernels, and unbiased if their neurons are sampled independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cka.functional.precision import sum_dtype

_CHUNK_ENTRIES = 256 * 1024

HSICTerms = tuple[Tensor, Tensor, Tensor]
"""HSIC of every pair, (L1, L2), and of each matrix with itself, (L1,) and (L2,)."""


def hsic_of_each_feature(rows: Tensor, exponent: int = 0) -> Tensor:
    """Return Σ_i HSIC(x_i x_iᵀ, x_i x_iᵀ) over the features i of (n, p) rows, a 0-d tensor.

    With the power sums s_k = Σ_a x_ai^k of a centred feature, the unbiased HSIC is
    (s_2² (1 + 1/((n-1)(n-2))) - s_4 (1 + 2/(n-2))) / (n (n-3)).

    Args:
        rows: features (n, p), n ≥ 4.
        exponent: e of their Gram matrix K 2**e, of which K is used. It is even.
    """
    samples = rows.shape[0]
    dtype = sum_dtype(rows.device)
    scale = 2.0 ** max(-1000, min(1000, -exponent // 2))
    squares = fourth = torch.zeros((), dtype=dtype, device=rows.device)
    for part in rows.split(max(1, _CHUNK_ENTRIES // samples), 1):
        centred = part.to(dtype) * scale
        square = (centred - centred.mean(0)).square()
        squares = squares + square.sum(0).square().sum()
        fourth = fourth + square.square().sum()
    pairs = (samples - 1) * (samples - 2)
    total = squares * (1 + 1 / pairs) - fourth * (1 + 2 / (samples - 2))
    return total / (samples * (samples - 3))


def corrected_terms(
    terms: HSICTerms, own: Sequence[Sequence[Tensor]], features: Sequence[Sequence[int]]
) -> HSICTerms:
    """Return HSIC terms in which pairs of a feature and itself are left out.

    The terms with themselves are those above times p², because the others are those of sums over
    features too. They are negative infinity for a layer with one feature, which has no pair.

    Args:
        terms: unbiased HSIC terms of Gram matrices.
        own: :func:`hsic_of_each_feature` of the matrices of each side. One side only means that
            both sides are the same matrices, and then a layer's CKA with itself is 1.
        features: number p of features of each matrix of each side.
    """
    cross, *self_terms = terms
    found = []
    for term, shared, widths in zip(self_terms, own, features, strict=False):
        width = torch.tensor(widths, dtype=term.dtype, device="cpu").to(term.device)
        rest = (term - torch.stack(list(shared))) * width / (width - 1).clamp(min=1)
        found.append(torch.where(width > 1, rest, -math.inf))
    if len(found) == 1:
        on_diagonal = torch.eye(len(cross), dtype=torch.bool, device=cross.device)
        cross = torch.where(on_diagonal, found[0], cross)
    return cross, found[0], found[-1]
