"""Resampled HSIC, computed from the Gram matrices of each batch, and its sums over batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cka.errors import SettingError
from cka.functional.hsic import HSICEstimator, permuted_products
from cka.functional.sums import Exponents, Sums, powers
from cka.functional.weighted import draw_weights, weighted_products


@dataclass(frozen=True)
class Resampled:
    """N resampled sums of P pairs of outputs, which are the sums of E pairs of layers.

    The E pairs are the L1 L2 pairs of the result; if layers are resampled with themselves, their
    L1 and L2 pairs follow.
    """

    values: Tensor
    """Sums, (N, P)."""
    positions: Tensor
    """Position in the second dimension of each pair of layers, (E,), on the CPU."""

    def expanded(self) -> Resampled:
        """Return the same sums with one position for each pair of layers."""
        return self.of_each_pair(self.values[:, self.positions.to(self.values.device)])

    @classmethod
    def of_each_pair(cls, values: Tensor) -> Resampled:
        """Wrap sums (N, E) whose columns belong to distinct pairs of layers: none is shared."""
        return cls(values, torch.arange(values.shape[1], device="cpu"))

    def positions_of(
        self, counts: tuple[int, int], rows: list[int], columns: list[int]
    ) -> list[Tensor]:
        """Return the positions (R, C) of some of the L1 and L2 layers, and (R,) and (C,) if known.

        ``counts`` are L1 and L2. The positions are on the device of the values.
        """
        sizes = [counts[0] * counts[1], *counts]
        parts = self.positions.split(sizes[: 1 if len(self.positions) == sizes[0] else 3])
        cross = parts[0].view(counts)[rows][:, columns]
        own = [part[chosen] for part, chosen in zip(parts[1:], (rows, columns), strict=False)]
        return [found.to(self.values.device) for found in (cross, *own)]


class ResampledSums:
    """Adds up N resampled HSIC matrices over batches.

    Pairs of layers share their sums if their outputs were the same tensors in every batch, and in a
    self-comparison if only the order of the two differs. A ResNet-18 with 75 layers needs the sums
    of 1770 pairs. They are kept during the forward passes of later batches.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: Resampled | None = None
        self._exponents: Exponents | None = None
        self._used = torch.empty(0, device="cpu")
        self._factors: Tensor | None = None

    def begin_batch(self, pairs: Tensor, batch: Sums, total: Sums) -> None:
        """Prepare to add a batch.

        Args:
            pairs: a number for each of the E pairs of layers, (E,), on the CPU: the position of its
                HSIC in the values that are added.
            batch: sums of this batch.
            total: sums of all batches with this one.
        """
        used, positions = torch.unique(pairs, return_inverse=True)
        if self._sums is None:
            zeros = total.cross.new_zeros(self._count, len(used))
            self._sums = Resampled(zeros, positions)
            self._exponents = total.exponents
        elif not torch.equal(positions, self._sums.positions):
            self._sums = self._sums.expanded()
            used = pairs
        self._used = used.to(total.cross.device)
        if self._exponents != total.exponents:
            self._sums.values.mul_(self._powers(self._exponents, total))
        self._exponents = total.exponents
        self._factors = None
        if batch.exponents != total.exponents:
            self._factors = self._powers(batch.exponents, total)

    def _powers(self, before: Exponents | None, total: Sums) -> Tensor:
        """Return what brings sums (P,) from the exponents ``before`` to the total's."""
        assert self._sums is not None
        of_layers = factors(before, total, len(self._sums.positions))
        # Layers that share their sums have the same exponents.
        found = of_layers.new_empty(self._sums.values.shape[1])
        return found.index_copy_(0, self._sums.positions.to(found.device), of_layers)

    def add(self, numbers: slice, values: Tensor) -> None:
        """Add HSIC of one batch's pairs of outputs for k of the N resamples, (k, G)."""
        assert self._sums is not None
        chosen = values[:, self._used]
        self._sums.values[numbers] += chosen if self._factors is None else chosen * self._factors

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums

    def clear(self) -> None:
        """Drop the sums."""
        self._sums = None


def factors(before: Exponents | None, after: Sums, pairs: int) -> Tensor:
    """Return what brings HSIC of E pairs from the exponents ``before`` to those of ``after``."""
    zeros = ((0,) * len(after.self1), (0,) * len(after.self2))
    one, two = (
        powers(*side, like=after.cross)
        for side in zip(before or zeros, after.exponents or zeros, strict=True)
    )
    cross = (one[:, None] * two[None, :]).flatten()
    return cross if pairs == len(cross) else torch.cat([cross, one.square(), two.square()])


class Resampling:
    """N resamples of the samples of each batch, whose HSIC is added up over batches.

    Of a batch nothing is kept. The memory is that of N float64 numbers for each pair of distinct
    outputs.
    """

    with_self_terms = False
    """Whether a resample changes the HSIC of a layer with itself, so that this is added up too."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._sums = ResampledSums(count)

    def add(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        positions: tuple[Sequence[int], Sequence[int]],
        batch: Sums,
        total: Sums,
    ) -> None:
        """Add one batch, whose sums are ``batch``; those of all batches are now ``total``.

        ``positions`` are those of the L1 rows' and L2 columns' Gram matrices.
        """
        sizes = (len(grams_x), None if grams_y is None else len(grams_y))
        self._sums.begin_batch(self._pairs(positions, sizes), batch, total)
        drawn = self._draw(len(grams_x[0]), estimator).to(total.cross.device)
        for numbers, products in self._products(grams_x, grams_y, estimator, drawn):
            self._sums.add(numbers, products)

    def _pairs(
        self, positions: tuple[Sequence[int], Sequence[int]], sizes: tuple[int, int | None]
    ) -> Tensor:
        """Return the position of every pair of layers in what :meth:`_products` yields, (E,)."""
        # On the CPU: how many pairs are distinct would have to be waited for on an accelerator.
        one, other = (torch.tensor(side, device="cpu") for side in positions)
        rows, columns = one[:, None], other[None, :]
        if sizes[1] is None:  # a layer and itself in the other order are one pair
            rows, columns = torch.minimum(rows, columns), torch.maximum(rows, columns)
        size = sizes[1] or sizes[0]
        cross = (rows * size + columns).flatten()
        if not self.with_self_terms:
            return cross
        if sizes[1] is None:
            return torch.cat([cross, one * (size + 1), other * (size + 1)])
        after = sizes[0] * size
        return torch.cat([cross, after + one, after + sizes[0] + other])

    @abstractmethod
    def _draw(self, samples: int, estimator: HSICEstimator) -> Tensor:
        """Return what defines each resample of a batch, (N, n)."""

    @abstractmethod
    def _products(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        drawn: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of HSIC (k, G) of the resamples of a slice, which are added up.

        G are all pairs of outputs; if ``with_self_terms`` and there are two sides, the pairs of
        each side's outputs with themselves follow.
        """

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums.sums()

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()


class Permutations(Resampling):
    """Every batch is permuted within itself, N times and independently of the others."""

    def _draw(self, samples: int, estimator: HSICEstimator) -> Tensor:
        return torch.stack(
            [
                torch.randperm(samples, generator=self._generator, device="cpu")
                for _ in range(self.count)
            ]
        )

    def _products(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        drawn: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        yield from permuted_products(grams_x, grams_y, estimator, drawn)


class Bootstrap(Resampling):
    """The samples of every batch are drawn with replacement, N times, independently of others."""

    with_self_terms = True

    def _draw(self, samples: int, estimator: HSICEstimator) -> Tensor:
        return draw_weights(self.count, samples, estimator, self._generator)

    def _products(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        drawn: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        yield from weighted_products(grams_x, grams_y, estimator, drawn)


@dataclass(frozen=True)
class Resamples:
    """How the samples of a comparison are resampled."""

    null: int | None
    """Number of permutations; None for no calibration."""
    bootstrap: int | None
    """Number of resamples with replacement; None for no confidence."""
    seed: int
    """Seed of what is drawn."""

    @classmethod
    def checked(
        cls,
        null: int | None,
        bootstrap: int | None,
        generator: torch.Generator | None,
        estimator: str,
    ) -> Resamples:
        """Return the settings, with a seed from the generator, or 0.

        Raises:
            SettingError: if ``null`` or ``bootstrap`` is not an integer, or too small, or if there
                is no bootstrap for the estimator.
        """
        for name, count, what, least in (
            ("null", null, "permutations", 1),
            ("bootstrap", bootstrap, "resamples", 2),
        ):
            if count is None:
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise SettingError(
                    f"{name} must be a number of {what}, at least {least}, got {count!r}; "
                    "write e.g. 200"
                )
        if bootstrap is not None and estimator == "sampled_neurons":
            raise SettingError(
                f"estimator='sampled_neurons' has no bootstrap, got bootstrap={bootstrap}; "
                "omit it, or use estimator='unbiased'"
            )
        if generator is None or (null is None and bootstrap is None):
            return cls(null, bootstrap, 0)
        seed = torch.randint(2**53, (), generator=generator, device="cpu")
        return cls(null, bootstrap, int(seed))

    def of_pair(self, rank: int) -> ResamplingsOfPair:
        """Return what resamples the batches of one pair of models on a rank."""
        seed = self.seed + rank  # ranks draw independently of each other
        return ResamplingsOfPair(
            None if self.null is None else Permutations(self.null, seed),
            None if self.bootstrap is None else Bootstrap(self.bootstrap, seed),
        )


class ResamplingsOfPair(NamedTuple):
    """What resamples the batches of one pair of models; None if not asked for."""

    permutations: Permutations | None
    bootstrap: Bootstrap | None

    def each(self) -> list[Resampling]:
        """Return those that were asked for."""
        return [one for one in self if one is not None]
