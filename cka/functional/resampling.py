"""Resamples of the samples of a batch: how they are drawn, their HSIC, and its sums over batches.

Both kinds of resamples go one way, :meth:`Resampling.add`. A permutation assigns the samples of one
side to those of the other (:func:`cka.functional.permuted_products`). A bootstrap draws n of n
samples with replacement, which gives sample i the weight w_i: how often it was drawn. Its biased
HSIC is that of the matrices with repeated rows and columns (Gretton et al. 2005).

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cka.functional import (
    SLAB_BYTES,
    HSICEstimator,
    centred_pairs,
    centred_slabs,
    full_precision,
    min_samples,
    permuted_products,
    rows_per_slab,
    sum_dtype,
)
from cka.functional.sums import Exponents, Sums, powers

Products: TypeAlias = Iterator[tuple[slice, Tensor]]
"""Parts of HSIC: the numbers of k of the N resamples, and their values (k, G) for G pairs of
outputs. The parts of a resample add up to its HSIC."""


@dataclass(frozen=True)
class Kind:
    """A kind of resample: what is drawn for a batch, and the HSIC of it."""

    draw: Callable[[int, int, HSICEstimator, torch.Generator], Tensor]
    """Function of N, n, estimator and generator that returns what defines each resample, (N, n)."""
    products: Callable[[Sequence[Tensor], Sequence[Tensor] | None, HSICEstimator, Tensor], Products]
    """Function of the Gram matrices of both sides, the estimator and what was drawn.

    It yields HSIC of all pairs of outputs; if ``with_self_terms`` and there are two sides, the
    pairs of each side's outputs with themselves follow."""
    with_self_terms: bool
    """Whether a resample changes the HSIC of a layer with itself, so that this is added up too."""


@dataclass(frozen=True)
class Resampled:
    """N resampled sums of P pairs of outputs, which are the sums of E pairs of layers.

    The E pairs are the L1 L2 pairs of the result; if layers are resampled with themselves, their
    L1 and L2 pairs follow.
    """

    values: Tensor
    """Sums, (N, P)."""
    columns: Tensor
    """The column of ``values`` for each pair of layers, (E,), on the CPU."""

    @classmethod
    def of_each_pair(cls, values: Tensor) -> Resampled:
        """Wrap sums (N, E) whose columns belong to distinct pairs of layers: none is shared."""
        return cls(values, torch.arange(values.shape[1], device="cpu"))

    def expanded(self) -> Resampled:
        """Return the same sums with one column for each pair of layers."""
        return self.of_each_pair(self.values[:, self.columns.to(self.values.device)])

    def columns_of(
        self, counts: tuple[int, int], rows: list[int], columns: list[int]
    ) -> list[Tensor]:
        """Return the columns of ``values`` for some of the layers, on the device of the values.

        Args:
            counts: numbers L1 and L2 of all layers.
            rows: positions of R of the L1 layers.
            columns: positions of C of the L2 layers.

        Returns:
            Columns of the pairs (R, C), and, if layers are resampled with themselves, those of
            their pairs with themselves, (R,) and (C,).
        """
        sizes = [counts[0] * counts[1], *counts]
        parts = self.columns.split(sizes[: 1 if len(self.columns) == sizes[0] else 3])
        cross = parts[0].view(counts)[rows][:, columns]
        own = [part[chosen] for part, chosen in zip(parts[1:], (rows, columns), strict=False)]
        return [part.to(self.values.device) for part in (cross, *own)]


class Resampling:
    """N resamples of the samples of each batch, whose HSIC is added up over batches.

    Of a batch nothing is kept. Pairs of layers share their sums if their outputs were the same
    tensors in every batch, and in a self-comparison if only the order of the two differs: a
    ResNet-18 with 75 layers needs the sums of 1770 pairs. The memory is that of N float64 numbers
    for each of these pairs, also during the forward passes of later batches.
    """

    def __init__(self, kind: Kind, count: int, seed: int) -> None:
        """Prepare N = ``count`` resamples of a kind, which are drawn from their own generator."""
        self._kind = kind
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._sums: Resampled | None = None
        self._exponents: Exponents | None = None

    def add(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        positions: tuple[Sequence[int], Sequence[int]],
        batch: Sums,
        total: Sums,
    ) -> None:
        """Add the resampled HSIC of one batch.

        Args:
            grams_x: Gram matrices (n, n) of the distinct outputs of the rows' model.
            grams_y: those of the columns' model; None if both models are one.
            estimator: the estimator of HSIC.
            positions: position of the matrix of each of the L1 rows and L2 columns.
            batch: sums of this batch.
            total: sums of all batches with this one.
        """
        sizes = (len(grams_x), None if grams_y is None else len(grams_y))
        sums, used = self._shared(
            _pair_numbers(positions, sizes, self._kind.with_self_terms), total
        )
        if self._exponents != total.exponents:
            sums.values.mul_(self._factors(self._exponents, total))
        self._exponents = total.exponents
        factors = None
        if batch.exponents != total.exponents:
            factors = self._factors(batch.exponents, total)
        drawn = self._kind.draw(self._count, len(grams_x[0]), estimator, self._generator)
        for numbers, products in self._kind.products(
            grams_x, grams_y, estimator, drawn.to(total.cross.device)
        ):
            # Nothing here has a name: it would still be alive while the next part is computed.
            if factors is None:
                sums.values[numbers] += products[:, used]
            else:
                sums.values[numbers] += products[:, used] * factors

    def _shared(self, pairs: Tensor, total: Sums) -> tuple[Resampled, Tensor]:
        """Return the sums, and the position in a batch's products of each of their columns, (P,).

        Layers that shared an output in every batch before, but do not in this one, get sums of
        their own from now on.
        """
        used, columns = torch.unique(pairs, return_inverse=True)
        if self._sums is None:
            self._sums = Resampled(total.cross.new_zeros(self._count, len(used)), columns)
            self._exponents = total.exponents
        elif not torch.equal(columns, self._sums.columns):  # on the CPU, so no wait for a device
            self._sums = self._sums.expanded()
            used = pairs
        return self._sums, used.to(total.cross.device)

    def _factors(self, before: Exponents | None, total: Sums) -> Tensor:
        """Return what brings sums (P,) from the exponents ``before`` to those of ``total``."""
        assert self._sums is not None
        of_layers = _factors_of_pairs(before, total, with_self_terms=self._kind.with_self_terms)
        # Layers that share their sums have the same exponents.
        of_columns = of_layers.new_empty(self._sums.values.shape[1])
        return of_columns.index_copy_(0, self._sums.columns.to(of_columns.device), of_layers)

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums

    def sums_of_each_pair(self, total: Sums) -> Tensor:
        """Return the sums (N, E) of this rank, 0 if it has none, with the exponents of ``total``.

        Unlike :meth:`sums`, they have the same shape on every rank.
        """
        factors = _factors_of_pairs(
            self._exponents, total, with_self_terms=self._kind.with_self_terms
        )
        if self._sums is None:
            return total.cross.new_zeros(self._count, len(factors))
        return self._sums.expanded().values * factors

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None


def _pair_numbers(
    positions: tuple[Sequence[int], Sequence[int]],
    sizes: tuple[int, int | None],
    with_self_terms: bool,
) -> Tensor:
    """Return the position of each pair of layers in the products of their outputs, (E,).

    Args:
        positions: position of the output of each of the L1 rows and L2 columns.
        sizes: number of outputs of each model; the second is None in a self-comparison.
        with_self_terms: whether pairs of each layer with itself follow.
    """
    # On the CPU: how many pairs are distinct would have to be waited for on an accelerator.
    of_rows, of_columns = (torch.tensor(side, device="cpu") for side in positions)
    first, second = of_rows[:, None], of_columns[None, :]
    if sizes[1] is None:  # a layer and itself in the other order are one pair
        first, second = torch.minimum(first, second), torch.maximum(first, second)
    size = sizes[1] or sizes[0]
    cross = (first * size + second).flatten()
    if not with_self_terms:
        return cross
    if sizes[1] is None:  # on the diagonal of the pairs
        return torch.cat([cross, of_rows * (size + 1), of_columns * (size + 1)])
    end = sizes[0] * size
    return torch.cat([cross, end + of_rows, end + sizes[0] + of_columns])


def _factors_of_pairs(before: Exponents | None, total: Sums, *, with_self_terms: bool) -> Tensor:
    """Return what brings HSIC of E pairs of layers from the exponents ``before`` to the total's."""
    zeros = ((0,) * len(total.self1), (0,) * len(total.self2))
    of_rows, of_columns = (
        powers(*side, like=total.cross)
        for side in zip(before or zeros, total.exponents or zeros, strict=True)
    )
    cross = (of_rows[:, None] * of_columns[None, :]).flatten()
    return torch.cat([cross, of_rows**2, of_columns**2]) if with_self_terms else cross


def random_orders(count: int, samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield N random permutations of n samples, (n,), on the CPU.

    One at a time, because a null distribution needs no more, and N of them take 8 N n bytes.
    """
    for _ in range(count):
        yield torch.randperm(samples, generator=generator, device="cpu")


def draw_orders(
    count: int, samples: int, estimator: HSICEstimator, generator: torch.Generator
) -> Tensor:
    """Return N random permutations, (N, n); they do not depend on the estimator.

    Args:
        count: N.
        samples: n.
        estimator: not used.
        generator: a generator on the CPU.
    """
    return torch.stack(list(random_orders(count, samples, generator)))


def draw_weights(
    count: int, samples: int, estimator: HSICEstimator, generator: torch.Generator
) -> Tensor:
    """Return how often each sample was drawn in each of N resamples, (N, n), on the CPU.

    A resample with too few different samples for the estimator is drawn again.

    Args:
        count: N.
        samples: n.
        estimator: the estimator, which needs at least 4 or 2 different samples.
        generator: a generator on the CPU, so that every device has the same resamples.
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
) -> Products:
    """Yield parts of HSIC with each of the N weights (N, n), which are on the matrices' device.

    Args:
        grams_x: L1 Gram matrices (n, n).
        grams_y: L2 Gram matrices of the same samples; None for ``grams_x`` again.
        estimator: the estimator of HSIC.
        weights: how often each sample was drawn, (N, n).

    Returns:
        Parts ``(numbers, values)`` for the k weights ``numbers``. The values (k, L1 L2) are those
        of every pair; if ``grams_y`` is given, those of each matrix with itself follow, which makes
        (k, L1 L2 + L1 + L2). The parts of a weight add up to its HSIC.
    """
    weights = weights.to(sum_dtype(grams_x[0].device))
    divisors = _divisors(weights, estimator)
    with full_precision(weights.device):
        for terms in (_pair_terms, _row_terms):
            for numbers, values in terms(grams_x, grams_y, estimator, weights):
                yield numbers, values / divisors[numbers, None]


PERMUTATIONS = Kind(draw_orders, permuted_products, with_self_terms=False)
BOOTSTRAP = Kind(draw_weights, weighted_products, with_self_terms=True)


def _divisors(weights: Tensor, estimator: HSICEstimator) -> Tensor:
    """Return the sum of the weights of all sets of four samples, (N,); (n-1)² if biased."""
    sum_1, sum_2, sum_3, sum_4 = (weights.pow(power).sum(1) for power in (1, 2, 3, 4))
    if estimator == "biased":
        return (sum_1 - 1) ** 2
    return sum_1**4 - 6 * sum_1**2 * sum_2 + 3 * sum_2**2 + 8 * sum_1 * sum_3 - 6 * sum_4


def _pair_terms(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    weights: Tensor,
) -> Products:
    """Yield the sums over pairs of samples, i < j; with i = j too if biased."""
    most = max(len(grams_x), len(grams_y or ()))
    totals = weights.sum(1, keepdim=True)
    rest = totals**2 - weights.square().sum(1, keepdim=True)
    chunks_x = centred_pairs(grams_x, estimator, most)
    chunks_y = chunks_x if grams_y is None else centred_pairs(grams_y, estimator, most)
    for (pairs, x), (_, y) in _together(chunks_x, chunks_y):
        for numbers in _slices(len(weights), SLAB_BYTES // (len(x) * x.shape[1] * x.itemsize)):
            first, second = weights[numbers][:, pairs[0]], weights[numbers][:, pairs[1]]
            factors = first * second
            if estimator == "unbiased":
                added = 2 * factors + rest[numbers] - totals[numbers] * (first + second)
                factors = factors * added
            factors *= 2 - (pairs[0] == pairs[1]).to(x.dtype)  # (i, j) stands for (j, i) too
            cross = (factors[:, None, :] * x).flatten(0, 1) @ y.T
            yield (
                numbers,
                _joined(
                    cross.view(len(factors), len(x), len(y)),
                    None if grams_y is None else (factors @ x.square().T, factors @ y.square().T),
                ),
            )


def _row_terms(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    weights: Tensor,
) -> Products:
    """Yield the terms with weighted sums over a row of a matrix, and over the whole matrix."""
    samples = weights.shape[1]
    rows = rows_per_slab(max(len(grams_x), len(grams_y or ())), samples)
    sides = [grams_x] if grams_y is None else [grams_x, grams_y]
    whole_sums = [weights.new_zeros(len(weights), len(side)) for side in sides]  # wᵀAw, wᵀBw
    slabs = (centred_slabs(side, estimator, rows) for side in sides)
    for start, slab in zip(range(0, samples, rows), zip(*slabs, strict=True), strict=True):
        matrices = [side.view(len(side), -1, samples) for side in slab]
        # Sums of that many weights, (k, L, rows), take an eighth of a slab, which is (L, rows, n).
        for numbers in _slices(len(weights), samples // 8):
            all_weights, row_weights = weights[numbers], weights[numbers, start : start + rows]
            # a and b, (k, L, rows)
            sums = [(all_weights @ matrix.mT).transpose(0, 1) for matrix in matrices]
            totals = all_weights.sum(1)[:, None]
            if estimator == "unbiased":
                squares = [
                    (all_weights.square() @ matrix.mT).transpose(0, 1) for matrix in matrices
                ]
                half = ((totals + row_weights) / 2)[:, None, :]
                terms = [
                    of_squares - half * of_rows
                    for of_rows, of_squares in zip(sums, squares, strict=True)
                ]
            else:
                terms = [of_rows / (-2 * totals[:, None]) for of_rows in sums]
            for whole_sum, of_rows in zip(whole_sums, sums, strict=True):
                whole_sum[numbers] += (of_rows * row_weights[:, None, :]).sum(2)
            weighted = [2 * row_weights[:, None, :] * term for term in terms]
            cross = weighted[0] @ sums[-1].mT + sums[0] @ weighted[-1].mT
            own = [
                2 * (term * of_rows).sum(2) for term, of_rows in zip(weighted, sums, strict=True)
            ]
            yield numbers, _joined(cross, None if grams_y is None else (own[0], own[1]))
    factor = weights.sum(1) ** -2 if estimator == "biased" else torch.ones_like(weights[:, 0])
    for numbers in _slices(len(weights), samples // 8):
        x, y = whole_sums[0][numbers], whole_sums[-1][numbers]
        wholes = _joined(
            x[:, :, None] * y[:, None, :], None if grams_y is None else (x.square(), y.square())
        )
        yield numbers, wholes * factor[numbers, None]


def _slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` numbers, at least 1, that cover ``count`` of them."""
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, start + size)


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
