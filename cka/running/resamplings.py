"""Resampled HSIC, computed from the Gram matrices of each batch of a comparison."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cka.errors import SettingError
from cka.functional.hsic import HSICEstimator, permuted_products
from cka.functional.sums import Sums
from cka.running.resampled_sums import Resampled, ResampledSums


class Resampling:
    """N resamples of the samples of each batch, whose HSIC is added up over batches.

    Of a batch nothing is kept. The memory is that of N float64 numbers for each pair of distinct
    outputs.
    """

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
        # On the CPU: how many pairs are distinct would have to be waited for on an accelerator.
        one, other = (torch.tensor(side, device="cpu") for side in positions)
        rows, columns = one[:, None], other[None, :]
        if grams_y is None:  # a layer and itself in the other order are one pair
            rows, columns = torch.minimum(rows, columns), torch.maximum(rows, columns)
        size = len(grams_x if grams_y is None else grams_y)
        self._sums.begin_batch(rows * size + columns, batch, total)
        drawn = self._draw(len(grams_x[0])).to(total.cross.device)
        for numbers, products in self._products(grams_x, grams_y, estimator, drawn):
            self._sums.add(numbers, products)

    @abstractmethod
    def _draw(self, samples: int) -> Tensor:
        """Return what defines each resample of a batch, (N, n)."""

    @abstractmethod
    def _products(
        self,
        grams_x: Sequence[Tensor],
        grams_y: Sequence[Tensor] | None,
        estimator: HSICEstimator,
        drawn: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of HSIC (k, L1, L2) of the resamples of a slice, which are added up."""

    def sums(self) -> Resampled | None:
        """Return the sums with the exponents of the last total; None if there are none."""
        return self._sums.sums()

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()


class Permutations(Resampling):
    """Every batch is permuted within itself, N times and independently of the others."""

    def _draw(self, samples: int) -> Tensor:
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


@dataclass(frozen=True)
class Resamples:
    """How the samples of a comparison are resampled."""

    null: int | None
    """Number of permutations; None for no calibration."""
    seed: int
    """Seed of what is drawn."""

    @classmethod
    def checked(cls, null: int | None, generator: torch.Generator | None) -> Resamples:
        """Return the settings, with a seed from the generator, or 0.

        Raises:
            SettingError: if ``null`` is not a positive integer.
        """
        if null is None:
            return cls(None, 0)
        if not isinstance(null, int) or isinstance(null, bool) or null < 1:
            raise SettingError(
                f"null must be a number of permutations, at least 1, got {null!r}; write e.g. 200"
            )
        if generator is None:
            return cls(null, 0)
        return cls(null, int(torch.randint(2**53, (), generator=generator, device="cpu")))

    def permutations(self, rank: int) -> Permutations | None:
        """Return what permutes the batches of one pair of models on a rank."""
        return None if self.null is None else Permutations(self.null, self.seed + rank)
