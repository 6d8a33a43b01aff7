"""Features as rows, CKA of feature matrices, and HSIC corrected for a finite number of features.

For the estimator "sampled_neurons", Chun et al. 2025 (arXiv 2502.15104) regard the features of a
layer, its neurons, as a sample of a larger population. The kernel of the population is the mean
over neurons i of the matrices x_i x_iᵀ, so HSIC of a layer with itself is a mean over pairs of
neurons (i, j). The p pairs (i, i) in an estimate from p neurons make it too high, and CKA too low.
They are left out:

    HSIC'(X, X) = (HSIC(XXᵀ, XXᵀ) - Σ_i HSIC(x_i x_iᵀ, x_i x_iᵀ)) / (p (p-1))

Here HSIC is the unbiased estimate for finite samples (Song et al. 2012). HSIC of two layers is
bilinear in their kernels, and unbiased if their neurons are sampled independently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cka.errors import CKAWarning, InputError
from cka.functional import (
    HSICEstimator,
    check_estimator,
    check_sample_count,
    hsic_products,
    sum_dtype,
)
from cka.functional.kernels import (
    RBF,
    Kernel,
    check_linear,
    linear_gram,
    resolve_kernel,
    scaled_gram,
)
from cka.functional.sums import batch_sums, cka_with_error

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
    corrected = []
    for term, shared, widths in zip(self_terms, own, features, strict=False):
        width = torch.tensor(widths, dtype=term.dtype, device="cpu").to(term.device)
        rest = (term - torch.stack(list(shared))) * width / (width - 1).clamp(min=1)
        corrected.append(torch.where(width > 1, rest, -math.inf))
    if len(corrected) == 1:
        on_diagonal = torch.eye(len(cross), dtype=torch.bool, device=cross.device)
        cross = torch.where(on_diagonal, corrected[0], cross)
    return cross, corrected[0], corrected[-1]


def cka_from_features(
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    kernel: str | Kernel = "linear",
    estimator: HSICEstimator | Literal["sampled_neurons"] = "unbiased",
) -> Tensor:
    """Return CKA between features of the same n samples, computed in float64.

    >>> x = torch.randn(100, 16)
    >>> value = cka_from_features(x, 3 * x)  # linear CKA does not depend on the scale
    >>> print(f"{value:.4f}")
    1.0000
    >>> cka_from_features([x, x[:, :4]], x).shape
    torch.Size([2, 1])

    Features may have any scale that their dtype can represent.

    Args:
        x: features (n, p), a tensor or an array, or a sequence of L1 of them. Further dimensions
            are flattened: (n, c, h, w) counts as (n, c h w).
        y: features (n, q) of the same samples in the same order, or a sequence of L2 of them.
        kernel: ``"linear"``, ``"rbf"``, ``RBF(threshold=0.5)``, or a function from (n, p) features
            to their (n, n) Gram matrix.
        estimator: ``"unbiased"`` (HSIC of Song et al. 2012), ``"biased"`` (the formula of
            Kornblith et al. 2019), or ``"sampled_neurons"``, see below.

    Returns:
        A 0-d float64 tensor, or (L1, L2) if ``x`` or ``y`` is a sequence. CKA is NaN if the
        features of one side do not vary; a CKAWarning says so. Gradients are propagated.

    ``"sampled_neurons"`` estimates CKA of populations of neurons. The features are random samples
    of them, such as recorded cells, or the units of a layer that could be wider (Chun et al. 2025,
    "Estimating Neural Representation Alignment from Sparsely Sampled Inputs and Features", arXiv
    2502.15104). With p features, pairs of a feature and itself make HSIC of a side with itself too
    high, and CKA too low: by a factor of two if p is the dimension of the representation. They are
    left out: ``(HSIC(XXᵀ, XXᵀ) - Σ_i HSIC(x_i x_iᵀ, x_i x_iᵀ)) / (p (p-1))`` is unbiased in samples
    and features, and so is HSIC of two sides if their features were drawn independently. CKA is a
    ratio of such estimates, and so is consistent. It needs the linear kernel, at least four samples
    and two features on each side, features that were drawn at random (neighbouring pixels of one
    channel were not), and x and y from different draws; one tensor on both sides has CKA 1. The
    value may exceed 1. It is NaN if the corrected HSIC of a side with itself is not positive,
    which happens if there are too few features or samples to estimate it.

    Raises:
        InputError: if the sample counts differ or are too small for the estimator.
        SettingError: if the kernel or estimator is unknown.
    """
    if estimator == "sampled_neurons":
        terms = _terms_of_sampled_neurons(x, y, kernel)
    else:
        terms = hsic_products(*checked_grams(x, y, kernel, estimator), estimator)
    matrix, _ = cka_with_error(batch_sums(*terms))
    if bool(matrix.detach().isnan().any()):
        finite = all(bool(each.detach().isfinite().all()) for each in (*_as_list(x), *_as_list(y)))
        warnings.warn(
            (
                "CKA is NaN because the features of one side do not vary over the samples"
                if finite
                else "CKA is NaN because the features contain NaN or infinity"
            )
            + (
                ", or there are too few features for estimator='sampled_neurons'"
                if estimator == "sampled_neurons"
                else ""
            ),
            CKAWarning,
            stacklevel=2,
        )
    pair = not _is_sequence(x) and not _is_sequence(y)
    return (matrix[0, 0] if pair else matrix).to(torch.float64)


def checked_grams(
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    kernel: str | Kernel,
    estimator: HSICEstimator,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the Gram matrices (n, n) of the L1 features ``x`` and the L2 features ``y``.

    A matrix whose entries or their fourth powers would leave the range of float64 is multiplied by
    a power of two, which changes no CKA.

    Raises:
        InputError: if the sample counts differ or are too small for the estimator.
        SettingError: if the kernel or estimator is unknown.
    """
    check_estimator(estimator)
    gram = resolve_kernel(kernel)
    left, right = _checked(x, y, estimator)
    grams_x = [
        scaled_gram(gram, _rows(features), unbiased=estimator == "unbiased")[0] for features in left
    ]
    grams_y = [
        scaled_gram(gram, _rows(features), unbiased=estimator == "unbiased")[0]
        for features in right
    ]
    return grams_x, grams_y


def _terms_of_sampled_neurons(
    x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], kernel: str | Kernel
) -> HSICTerms:
    """Return HSIC terms that are corrected for a finite number of features."""
    gram = resolve_kernel(kernel)
    check_linear(gram)
    sides = _checked(x, y, "unbiased")
    grams, own, widths = [], [], []
    for side in sides:
        rows = [_rows(features) for features in side]
        scaled = [scaled_gram(gram, features) for features in rows]
        grams.append([matrix for matrix, _ in scaled])
        exponents = [exponent for _, exponent in scaled]
        own.append(list(map(hsic_of_each_feature, rows, exponents)))
        widths.append([features.shape[1] for features in rows])
    cross, self1, self2 = corrected_terms(
        hsic_products(grams[0], grams[1], "unbiased"), own, widths
    )
    # A layer's CKA with itself is 1, also if it is on both sides.
    same = [[features is features_y for features_y in sides[1]] for features in sides[0]]
    where = torch.tensor(same, device=cross.device)
    return torch.where(where, self1[:, None], cross), self1, self2


def _checked(
    x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], estimator: HSICEstimator
) -> tuple[list[Tensor], list[Tensor]]:
    """Return both sides as lists of features that can be compared."""
    left, right = _as_list(x), _as_list(y)
    _check_samples([*left, *right], estimator)
    return left, right


def _is_sequence(features: Any) -> bool:
    return isinstance(features, (list, tuple))


def _as_list(features: Any) -> list[Tensor]:
    several = features if _is_sequence(features) else [features]
    if not several:
        raise InputError("got an empty sequence of features; pass at least one (n, p) tensor")
    return [_readable(_as_tensor(each)) for each in several]


def _as_tensor(features: Any) -> Tensor:
    if isinstance(features, Tensor):  # torch.as_tensor would move it to the default device
        return features
    try:
        return torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        of_layers = "; of a dict write list(features.values())"
        raise InputError(
            f"features must be a tensor or an array (n, p), or a list of them, got "
            f"{type(features).__name__}{of_layers if isinstance(features, Mapping) else ''}"
        ) from error


def _readable(features: Tensor) -> Tensor:
    """Return features whose values can be read as numbers.

    Raises:
        InputError: if they are sparse, nested or on the meta device.
    """
    if features.layout != torch.strided or features.is_nested or features.is_meta:
        kind = "nested" if features.is_nested else f"{features.layout} on {features.device}"
        raise InputError(
            f"features must be dense tensors with values, got a tensor that is {kind}; "
            "pass (n, p) tensors, e.g. features.to_dense()"
        )
    return features.dequantize() if features.is_quantized else features


def _check_samples(features: Sequence[Tensor], estimator: HSICEstimator) -> None:
    for tensor in features:
        if tensor.ndim < 2:
            raise InputError(
                f"features must have at least 2 dimensions, got shape {tuple(tensor.shape)}; "
                "pass (n, p) tensors, one row per sample"
            )
    counts = sorted({len(tensor) for tensor in features})
    if len(counts) > 1:
        raise InputError(
            f"features have different sample counts: {' and '.join(map(str, counts))}; "
            "compute row i of every tensor from the same sample"
        )
    check_sample_count(counts[0], estimator)


def as_rows(features: Tensor) -> Tensor:
    """Return (n, ...) features as (n, p), without a copy if their memory layout allows it.

    The columns are in memory order: a Gram matrix does not depend on their order, and flattening
    a channels-last image in its logical order would copy it.
    """
    features = _arithmetic(features)
    if features.ndim == 1:
        return features.unsqueeze(1)
    if features.is_contiguous():
        return features.flatten(1)
    strides = features.stride()
    inner = sorted(range(1, features.ndim), key=lambda dim: -strides[dim])
    return features.permute(0, *inner).reshape(features.shape[0], -1)


def _arithmetic(features: Tensor) -> Tensor:
    """Return features with a dtype that torch can subtract, without a loss of digits."""
    if features.dtype == torch.bool:
        return features.to(torch.uint8)
    if features.is_complex():  # real and imaginary part: gives Re<x, y>, the real inner product
        return torch.view_as_real(features.resolve_conj())
    if features.is_floating_point() and features.itemsize == 1:  # float8
        return features.to(torch.bfloat16)
    return features


def flattened(features: Tensor, kernel: Kernel) -> Tensor:
    """Return (n, ...) features as (n, p) for a kernel; in logical order for a user's function."""
    if kernel is linear_gram or isinstance(kernel, RBF):
        return as_rows(features)
    return _arithmetic(features).reshape(features.shape[0], -1)


def _rows(features: Tensor) -> Tensor:
    rows = as_rows(features)
    return rows.to(sum_dtype(rows.device))


def align_tokens(
    x: Tensor, offsets_x: Tensor, y: Tensor, offsets_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return features of the same pieces of text from two models with different tokenizers.

    Where tokens of both end at the same character, a piece of text ends. The features of a piece
    are the mean of the tokens in it, so that its rows in both results are the same sample.

    >>> x, y = torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[[7.0], [9.0]]])
    >>> un_do_able = torch.tensor([[[0, 2], [2, 4], [4, 8]]])  # "un" "do" "able"
    >>> undo_able = torch.tensor([[[0, 4], [4, 8]]])  # "undo" "able"
    >>> rows_x, rows_y = align_tokens(x, un_do_able, y, undo_able)
    >>> rows_x.flatten().tolist(), rows_y.flatten().tolist()
    ([2.0, 5.0], [7.0, 9.0])

    Args:
        x: features of tokens of n texts, (n, t, d).
        offsets_x: first character of each token and the one behind its last, (n, t, 2), as
            tokenizers return with ``return_offsets_mapping=True``. Tokens without a character
            (special tokens, padding) have two equal numbers, and are left out.
        y: features of the other model's tokens of the same texts, (n, u, e).
        offsets_y: their characters, (n, u, 2).

    Returns:
        Rows (s, d) and (s, e) of the s pieces of all texts, for :func:`cka.cka_from_features` and
        :func:`cka.measure_from_features`.

    Raises:
        InputError: if shapes do not belong together, or no piece is common to both.
    """
    for features, offsets in ((x, offsets_x), (y, offsets_y)):
        if features.ndim != 3 or tuple(offsets.shape) != (*features.shape[:2], 2):
            raise InputError(
                "token features must have shape (n, t, d) and offsets (n, t, 2), got "
                f"{tuple(features.shape)} and {tuple(offsets.shape)}"
            )
    if len(x) != len(y):
        raise InputError(
            f"got {len(x)} and {len(y)} texts; pass the tokens of the same texts in the same order"
        )
    pieces = [_pieces_of_text(*texts) for texts in zip(x, offsets_x, y, offsets_y, strict=True)]
    rows_x, rows_y = (torch.cat(side) for side in zip(*pieces, strict=True))
    if not len(rows_x):
        raise InputError(
            "no token of one model ends at the same character as a token of the other; pass "
            "offsets into the same texts, as a tokenizer returns with return_offsets_mapping=True"
        )
    return rows_x, rows_y


def _pieces_of_text(
    x: Tensor, offsets_x: Tensor, y: Tensor, offsets_y: Tensor
) -> tuple[Tensor, Tensor]:
    ends = [
        offsets[:, 1].masked_fill(offsets[:, 0] >= offsets[:, 1], -1).to("cpu")
        for offsets in (offsets_x, offsets_y)
    ]
    common = ends[0][torch.isin(ends[0], ends[1])].unique()
    common = common[common >= 0]
    means = [_means(*side, common) for side in zip((x, y), ends, strict=True)]
    return means[0], means[1]


def _means(features: Tensor, ends: Tensor, common: Tensor) -> Tensor:
    """Return the mean of the tokens of each piece, (s, d): those that end behind the one before."""
    segment = torch.searchsorted(common, ends)
    # A token behind the last common end, as in a truncated text, is in no piece.
    inside = (ends >= 0) & (segment < len(common))
    segment, tokens = segment[inside].to(features.device), features[inside.to(features.device)]
    dtype = torch.float32 if features.itemsize < 4 else features.dtype
    sums = torch.zeros(len(common), features.shape[1], dtype=dtype, device=features.device)
    sums.index_add_(0, segment, tokens.to(dtype))
    counts = torch.bincount(segment, minlength=len(common)).clamp(min=1)
    return sums / counts[:, None]
