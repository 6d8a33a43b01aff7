"""Resampled HSIC, computed from the Gram matrices of each batch of a comparison."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cka.errors import SettingError
from cka.functional.hsic import HSICEstimator, permuted_products
from cka.functional.sums import Sums
from cka.functional.weighted import draw_weights, weighted_products
from cka.running.resampled_sums import Resampled, ResampledSums


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
