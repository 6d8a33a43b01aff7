"""The CKA that features would have by chance: the permutation distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional.features import checked_grams
from cka.functional.hsic import HSICEstimator, centred
from cka.functional.kernels import Kernel
from cka.functional.precision import full_precision

# Values that differ by rounding only count as equal.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class NullDistribution:
    """CKA of two sets of features, and CKA after random permutations of the samples of one."""

    value: float
    """CKA of the features as they are."""
    values: Tensor
    """CKA after each of the n permutations, (n,), float64 on the CPU."""

    @property
    def mean(self) -> float:
        """CKA by chance, on average: about 0 if unbiased, up to 1 if biased with wide features."""
        return float(self.values.mean())

    def quantile(self, q: float) -> float:
        """Return the value below which a fraction ``q`` of the permuted values is."""
        return float(self.values.quantile(q))

    @property
    def p_value(self) -> float:
        """Share of permutations with at least this CKA, (1 + #{permuted >= value}) / (1 + n).

        The features as they are count as one permutation, so it is never 0: the smallest p-value
        of n permutations is 1 / (1 + n). It is NaN if the value is.
        """
        if math.isnan(self.value):
            return math.nan
        higher = int((self.values >= self.value - _EQUAL).sum())
        return (1 + higher) / (1 + len(self.values))

    def is_above_chance(self, level: float = 0.05) -> bool:
        """Whether the p-value is at most ``level``: the features are more similar than by chance.

        Raises:
            SettingError: if no p-value of so few permutations can be that small.
        """
        smallest = 1 / (1 + len(self.values))
        if not smallest <= level < 1:
            raise SettingError(
                f"the p-value of {len(self.values)} permutations is at least {smallest:.2g}, but "
                f"level={level}; write a level between them and 1, or use more permutations"
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
        raise SettingError(f"the number of permutations must be at least 1, got {n}; write 999")
    for features in (x, y):
        if isinstance(features, (list, tuple)):
            raise InputError(
                f"null_distribution takes one pair of features, got a {type(features).__name__}; "
                "pass two (m, p) tensors, and call it once for each pair of layers"
            )
    (gram_x,), (gram_y,) = checked_grams(x, y, kernel, estimator)
    one, other = centred(gram_x, estimator), centred(gram_y, estimator)
    scale = float(one.norm() * other.norm())
    generator = torch.Generator().manual_seed(seed)
    products = [(one * other).sum()]
    with full_precision(one.device):
        for _ in range(n):
            order = torch.randperm(len(other), generator=generator, device="cpu").to(other.device)
            products.append((one * other[order][:, order]).sum())
    values = torch.stack(products).to("cpu", torch.float64) / scale
    return NullDistribution(float(values[0]), values[1:])
