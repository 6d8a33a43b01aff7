"""Similarity by nearest neighbours: mutual k-nearest neighbours and CKNNA.

Both are of Huh et al. 2024 ("The Platonic Representation Hypothesis", arXiv 2405.07987), as their
published code computes them: the features of each sample are scaled to length 1, and the neighbours
of a sample are the k others with the highest inner products.

A sample's neighbours within a batch differ from those among all samples, so neither measure has an
unbiased estimate from minibatches: the features of all samples are needed at once.

There are no masks here: pooling leaves padding out before, in :mod:`cka.capture.outputs`, and
:mod:`cka.running.exact` refuses ``pooling="flatten"`` for batches with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional import HSICEstimator, full_precision, sum_dtype
from cka.functional.features import as_rows
from cka.functional.kernels import linear_gram, squared_distances
from cka.functional.resampling import Kind, Products, draw_orders, draw_weights


@dataclass(frozen=True)
class Neighbourhood:
    """The k nearest neighbours of each of n samples in the features of one layer."""

    nearest: Tensor
    """Neighbours of each sample, (n, k)."""
    is_near: Tensor
    """Whether j is a neighbour of i, a bool tensor (n, n)."""
    is_known: Tensor
    """0, or NaN if a feature is not finite; a 0-d float64 tensor."""
    similarity: Tensor | None = None
    """Inner product of i and j if j is a neighbour of i, otherwise 0, (n, n); None if the measure
    does not need it, because it takes eight times the memory of ``is_near``."""

    def __len__(self) -> int:
        """Return the number n of samples."""
        return len(self.nearest)


def neighbourhood(rows: Tensor, measure: Measure) -> Neighbourhood:
    """Return the neighbours in (n, p) features of samples that are scaled to length 1.

    Args:
        rows: features (n, p), n > k.
        measure: says how many neighbours, and whether their similarities are needed.

    Raises:
        InputError: if there are too few samples.
    """
    k = measure.k
    if len(rows) <= k:
        raise InputError(
            f"{k} nearest neighbours need more than {k} samples, got {len(rows)}; pass more "
            f"samples, or a smaller k, e.g. MutualKNN(k={max(1, len(rows) // 4)})"
        )
    wide = rows.to(sum_dtype(rows.device))
    # From features that are scaled by their largest value, a norm neither overflows nor vanishes.
    wide = wide / wide.abs().amax(1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    wide = wide / wide.norm(dim=1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    with full_precision(wide.device):
        # Distances keep their digits if all samples have a large offset in common.
        distances = squared_distances(linear_gram(wide))
    del wide
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    nearest = distances.masked_fill(own, torch.inf).topk(k, largest=False).indices
    is_near = torch.zeros_like(own).scatter_(1, nearest, True)
    known = distances.new_zeros(()).masked_fill(distances.isnan().any(), torch.nan)
    if not measure.needs_similarity:
        return Neighbourhood(nearest, is_near, known)
    distances.div_(-2).add_(1)
    distances.masked_fill_(~is_near, 0)
    return Neighbourhood(nearest, is_near, known, distances)


def _shared(x: Neighbourhood, y: Neighbourhood, order: Tensor | None) -> Tensor:
    """Return which neighbours of x are neighbours in y too, (n, k)."""
    return y.is_near[_entries(x, order)]


def _entries(x: Neighbourhood, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows and columns (n, k) in another layer, whose samples have another order."""
    rows = torch.arange(len(x), device=x.nearest.device)[:, None].expand_as(x.nearest)
    return (rows, x.nearest) if order is None else (order[rows], order[x.nearest])


@dataclass(frozen=True)
class MutualKNN:
    """The share of the k nearest neighbours of a sample that two layers have in common.

    >>> from cka import measure_from_features
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> float(measure_from_features(x, 3 * x, measure=MutualKNN(k=5)))
    1.0

    1 means the same neighbours. By chance it is k / (n - 1) for n samples, so values of different
    n or k cannot be compared.

    Raises:
        SettingError: if k is not a positive integer.
    """

    k: int = 10
    """Number of neighbours."""

    name: ClassVar[str] = "mutual_knn"
    least_k: ClassVar[int] = 1
    has_bootstrap: ClassVar[bool] = True
    is_symmetric: ClassVar[bool] = True
    needs_similarity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the number of neighbours."""
        _check_k(self)

    def of_pair(self, x: Neighbourhood, y: Neighbourhood, order: Tensor | None = None) -> Tensor:
        """Return the share, a 0-d float64 tensor.

        Args:
            x: the neighbours in one layer.
            y: those in the other.
            order: the sample of ``y`` that is compared with each sample of ``x``, (n,).

        Returns:
            The share, from 0 to 1; NaN if the neighbours in a layer are not known.
        """
        return _shared(x, y, order).to(x.is_known.dtype).mean() + x.is_known + y.is_known

    def of_weights(self, x: Neighbourhood, y: Neighbourhood, weights: Tensor) -> Tensor:
        """Return the weighted share for each of N weights of samples, (N,).

        Args:
            x: the neighbours in one layer.
            y: those in the other.
            weights: how often each sample was drawn, (N, n).

        Returns:
            The shares, (N,).
        """
        shared = _shared(x, y, None).to(weights.dtype).mean(1)
        return weights @ shared / weights.sum(1)


@dataclass(frozen=True)
class CKNNA:
    """CKA restricted to pairs of samples that are neighbours in both layers.

    >>> from cka import measure_from_features
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> print(f"{measure_from_features(x, 3 * x, measure=CKNNA(k=5)):.4f}")
    1.0000

    With M_ij = 1 if j is among the k nearest neighbours of i in both layers, it is
    S(K, L) / √(S(K, K) S(L, L)) with S(K, L) = HSIC(M∘K, M∘L), the sums of the unbiased estimate of
    Song et al. 2012. S(K, K) has the neighbours of K alone. M∘K is not symmetric, so S(K, L) and
    S(L, K) differ a little, as in the published code. With k = n - 1 it is CKA of features of
    length 1.

    Raises:
        SettingError: if k is not an integer of at least 2.
    """

    k: int = 10
    """Number of neighbours."""

    name: ClassVar[str] = "cknna"
    least_k: ClassVar[int] = 2
    has_bootstrap: ClassVar[bool] = False
    is_symmetric: ClassVar[bool] = False
    needs_similarity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the number of neighbours."""
        _check_k(self)

    def of_pair(self, x: Neighbourhood, y: Neighbourhood, order: Tensor | None = None) -> Tensor:
        """Return S, a 0-d float64 tensor.

        Args:
            x: the neighbours in one layer.
            y: those in the other.
            order: the sample of ``y`` that is compared with each sample of ``x``, (n,).

        Returns:
            S(K, L), which is divided by the root of S(K, K) S(L, L) later.
        """
        assert x.similarity is not None
        assert y.similarity is not None
        n = len(x)
        entries = _entries(x, order)
        shared = y.is_near[entries]
        rows = torch.arange(n, device=shared.device)[:, None]
        of_x = torch.where(shared, x.similarity[rows, x.nearest], 0)  # M∘K at (i, j)
        of_y = y.similarity[entries]  # M∘L at (i, j)
        # M∘L at (j, i): it counts if i is a neighbour of j in both layers.
        back = torch.where(x.is_near[x.nearest, rows], y.similarity[entries[1], entries[0]], 0)
        products = (of_x * back).sum()
        column_sums = torch.zeros_like(of_x[:, 0]).index_add_(
            0, x.nearest.flatten(), of_x.flatten()
        )
        whole = of_x.sum() * of_y.sum() / ((n - 1) * (n - 2))
        mixed = 2 * (column_sums * of_y.sum(1)).sum() / (n - 2)
        return (products + whole - mixed) / (n * (n - 3)) + x.is_known + y.is_known

    def of_weights(self, x: Neighbourhood, y: Neighbourhood, weights: Tensor) -> Tensor:
        """Not available; :meth:`cka.CKA.compare` refuses ``bootstrap`` before.

        Args:
            x: the neighbours in one layer.
            y: those in the other.
            weights: how often each sample was drawn, (N, n).

        Raises:
            SettingError: always.
        """
        raise SettingError(
            "measure='cknna' does not support a bootstrap; use null=, or measure='mutual_knn'"
        )


Measure: TypeAlias = MutualKNN | CKNNA


def _check_k(measure: Measure) -> None:
    if not isinstance(measure.k, int) or isinstance(measure.k, bool) or measure.k < measure.least_k:
        raise SettingError(
            f"{type(measure).__name__} needs a number of neighbours k of at least "
            f"{measure.least_k}, got {measure.k!r}; write e.g. {type(measure).__name__}(k=10)"
        )


def resolve_measure(measure: str | Measure) -> Measure | None:
    """Return the measure with this name; None for CKA itself.

    Args:
        measure: what the user passed as ``measure=``.

    Raises:
        SettingError: if it is unknown.
    """
    if isinstance(measure, (MutualKNN, CKNNA)):
        return measure
    known = {"cka": None, "mutual_knn": MutualKNN(), "cknna": CKNNA()}
    if not isinstance(measure, str) or measure not in known:
        raise SettingError(
            f"cannot use {measure!r} as a measure; write 'cka', 'mutual_knn', 'cknna', "
            "MutualKNN(k=20) or CKNNA(k=20)"
        )
    return known[measure]


def check_estimator_of(measure: Measure | None, estimator: str | None) -> str:
    """Return the estimator: by default "unbiased" for CKA, and "exact" for neighbours.

    Args:
        measure: a measure from :func:`resolve_measure`.
        estimator: what the user passed; None if nothing.

    Raises:
        SettingError: if the measure has no such estimate.
    """
    if measure is None:
        return "unbiased" if estimator is None else estimator
    if estimator in (None, "exact"):
        return "exact"
    raise SettingError(
        f"measure={measure.name!r} does not support estimator={estimator!r}, because the "
        "neighbours of a sample within its batch are not its nearest neighbours among all "
        "samples; use estimator='exact', which stores the features of all samples"
    )


def neighbour_terms(
    measure: Measure, x: Sequence[Neighbourhood], y: Sequence[Neighbourhood] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the value of every pair, (L1, L2), and of each layer with itself, (L1,) and (L2,).

    Args:
        measure: the measure; the result is the value of a pair, divided by the root of the values
            of both layers with themselves.
        x: L1 layers.
        y: L2 layers of the same samples; None for ``x`` again.
    """
    own = torch.stack([measure.of_pair(each, each) for each in x])
    others = own if y is None else torch.stack([measure.of_pair(each, each) for each in y])
    return _matrix(measure, x, y, None), own, others


def _matrix(
    measure: Measure,
    x: Sequence[Neighbourhood],
    y: Sequence[Neighbourhood] | None,
    order: Tensor | None,
) -> Tensor:
    if y is not None:
        return torch.stack(
            [torch.stack([measure.of_pair(of_x, of_y, order) for of_y in y]) for of_x in x]
        )
    matrix = x[0].is_known.new_zeros(len(x), len(x))
    for row, of_row in enumerate(x):
        for column, of_column in enumerate(x[row:], start=row):
            matrix[row, column] = matrix[column, row] = measure.of_pair(of_row, of_column, order)
    return matrix


def kinds_of(measure: Measure) -> tuple[Kind, Kind]:
    """Return the kinds of resamples of a measure: permutations and bootstrap.

    A bootstrap draws the samples whose neighbours are compared; the neighbours stay those among all
    samples.

    Args:
        measure: the measure.
    """

    def permuted(
        x: Sequence[Any],
        y: Sequence[Any] | None,
        estimator: HSICEstimator,
        orders: Tensor,
    ) -> Products:
        for number, order in enumerate(orders):
            yield slice(number, number + 1), _matrix(measure, x, y, order).flatten()[None]

    def weighted(
        x: Sequence[Any],
        y: Sequence[Any] | None,
        estimator: HSICEstimator,
        weights: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        weights = weights.to(x[0].is_known.dtype)
        values = [
            measure.of_weights(of_x, of_y, weights)
            for of_x in x
            for of_y in (x if y is None else y)
        ]
        if y is not None:
            values += [torch.ones_like(values[0])] * (len(x) + len(y))
        yield slice(0, len(weights)), torch.stack(values, 1)

    return (
        Kind(draw_orders, permuted, with_self_terms=False),
        Kind(draw_weights, weighted, with_self_terms=True),
    )


def measure_from_features(x: Tensor, y: Tensor, *, measure: str | Measure) -> Tensor:
    """Return the similarity by nearest neighbours of two sets of features, in float64.

    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> value = measure_from_features(x, x + 0.1, measure="mutual_knn")
    >>> bool(value > 0.8)
    True

    Args:
        x: features (n, p). Further dimensions are flattened.
        y: features (n, q) of the same samples in the same order.
        measure: "mutual_knn", "cknna", or ``MutualKNN(k=20)`` or ``CKNNA(k=20)`` for other numbers
            of neighbours than 10.

    Returns:
        A 0-d float64 tensor.

    Raises:
        InputError: if the sample counts differ, or are not above the number of neighbours.
        SettingError: if the measure is unknown, or "cka": use :func:`cka.cka_from_features`.
    """
    chosen = resolve_measure(measure)
    if chosen is None:
        raise SettingError(
            "measure='cka' is computed by another function; call cka_from_features(x, y)"
        )
    if len(x) != len(y):
        raise InputError(
            f"features have different sample counts: {len(x)} and {len(y)}; compute row i of both "
            "from the same sample"
        )
    of_x, of_y = (neighbourhood(as_rows(features), chosen) for features in (x, y))
    cross, own, others = neighbour_terms(chosen, [of_x], [of_y])
    return (cross[0, 0] / (own[0] * others[0]).sqrt()).to("cpu", torch.float64)
