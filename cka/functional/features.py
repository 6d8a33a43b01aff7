"""CKA between feature matrices that are already in memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cka.errors import CKAWarning, InputError, SettingError
from cka.functional.hsic import Centring, fewest_samples, hsic_products
from cka.functional.kernels import Kernel, as_rows, resolve_kernel
from cka.functional.precision import sum_dtype
from cka.functional.sums import compute, of_batch


def cka_from_features(
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    kernel: str | Kernel = "linear",
    estimator: Centring = "unbiased",
) -> Tensor:
    """CKA between features of the same n samples.

    Two (n, p) tensors (arrays will do) give a float64 0-d tensor; if either is a sequence of
    them, the result is (L1, L2). Everything is computed in float64, and gradients flow.
    ``estimator="biased"`` is the formula of Kornblith et al. 2019, ``"unbiased"`` the debiased
    one; NaN where features do not vary, with a warning.

    Raises:
        InputError: if the sample counts differ or are too small for the estimator.
        SettingError: for an unknown kernel or estimator.
    """
    if estimator not in ("unbiased", "biased"):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write 'unbiased' or 'biased'"
        )
    gram = resolve_kernel(kernel)
    left, right = _as_list(x), _as_list(y)
    _check_samples([*left, *right], estimator)
    grams_x = [gram(_rows(features)) for features in left]
    grams_y = [gram(_rows(features)) for features in right]
    matrix, _ = compute(of_batch(*hsic_products(grams_x, grams_y, estimator)))
    if bool(matrix.detach().isnan().any()):
        warnings.warn(
            "CKA is NaN where the features of one side do not vary over the samples",
            CKAWarning,
            stacklevel=2,
        )
    pair = not _is_sequence(x) and not _is_sequence(y)
    return (matrix[0, 0] if pair else matrix).to(torch.float64)


def _is_sequence(features: Any) -> bool:
    return isinstance(features, (list, tuple))


def _as_list(features: Any) -> list[Tensor]:
    several = features if _is_sequence(features) else [features]
    if not several:
        raise InputError("got an empty sequence of features; give at least one (n, p) tensor")
    # A tensor stays where it is: as_tensor would move it to a default device.
    return [one if isinstance(one, Tensor) else torch.as_tensor(one) for one in several]


def _check_samples(features: Sequence[Tensor], estimator: Centring) -> None:
    for one in features:
        if one.ndim < 2:
            raise InputError(f"features are (n, p), got shape {tuple(one.shape)}")
    counts = sorted({len(one) for one in features})
    if len(counts) > 1:
        raise InputError(
            f"features of {' and '.join(map(str, counts))} samples cannot be compared; "
            "row i of every tensor must come from the same sample"
        )
    if counts[0] < fewest_samples(estimator):
        raise InputError(
            f"the {estimator} estimator needs at least {fewest_samples(estimator)} samples, "
            f"got {counts[0]}"
        )


def _rows(features: Tensor) -> Tensor:
    rows = as_rows(features)
    return rows.to(sum_dtype(rows.device))
