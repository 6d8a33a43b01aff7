"""Tensors of integers, masks or addresses that are arithmetic progressions in each dimension.

Most positions and addresses of a kernel are: ``base + program * SIZE + arange(0, SIZE)`` is one
number for each program and a step of 1. Only these are kept, and sums, differences, products with a
number and comparisons with a bound are computed from them. The elements are written only when
something needs them, see :meth:`Progression.tensor`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from emulated_cuda.values import uncounted


class Progression:
    """Element (p, i, j, ...) is ``base[p] + i * steps[0] + j * steps[1] + ...``, which may wrap.

    Attributes:
        base: (programs or 1,) the first element of each program, in the dtype of the elements.
        steps: from one element to the next, along each dimension.
        shape: the lengths of the dimensions, without that of the programs; at least one.
    """

    __slots__ = ("_limits", "_tensor", "base", "shape", "steps")

    def __init__(self, base: torch.Tensor, steps: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.base = base
        self.steps = steps
        self.shape = shape
        self._limits: tuple[int, int] | None = None
        self._tensor: torch.Tensor | None = None

    @property
    def is_one_number(self) -> bool:
        """Whether all elements of a program are the same."""
        return not any(self.steps)

    @property
    def number(self) -> int | None:
        """What all elements of all programs are; None if they differ."""
        if self.base.shape[0] > 1 or any(self.steps):
            return None
        number: int = self.base.item()  # type: ignore[assignment]
        return number

    def limits(self) -> tuple[int, int]:
        """Return the smallest and the largest element, as they would be if none wrapped."""
        if self._limits is None:
            low, high = _ends(self.base)
            for step, length in zip(self.steps, self.shape, strict=True):
                if step < 0:
                    low += step * (length - 1)
                else:
                    high += step * (length - 1)
            self._limits = low, high
        return self._limits

    def distance(self) -> int:
        """Return how far the last element of a program is from its first."""
        return sum(step * (length - 1) for step, length in zip(self.steps, self.shape, strict=True))

    @property
    def wraps(self) -> bool:
        """Whether an element exceeds the range of its dtype, so that steps differ."""
        low, high = self.limits()
        half = 1 << (8 * self.base.element_size() - 1)
        return low < -half or high >= half

    def compact(self) -> torch.Tensor:
        """Return the elements, with length 1 for each dimension along which they are the same."""
        if self._tensor is None:
            base = self.base.view(-1, *[1] * len(self.shape))
            if not self.is_one_number:
                base = base + self.offsets()
            self._tensor = base
        return self._tensor

    def offsets(self) -> torch.Tensor:
        """Return the differences from the first element (1, ...), as compact as the elements."""
        return _offsets(self.steps, self.shape, self.base.dtype)

    def tensor(self) -> torch.Tensor:
        """Return the elements (programs or 1, ...)."""
        return self.compact().expand(-1, *self.shape)

    def chosen(self, mask: torch.Tensor, other: Any) -> Any:
        """Return this value where the mask (programs,) is true and the other where it is false."""
        if isinstance(other, Progression) and other.steps == self.steps:
            return Progression(torch.where(mask, self.base, other.base), self.steps, self.shape)
        return torch.where(mask.view(-1, *[1] * len(self.shape)), self.tensor(), as_tensor(other))


def as_tensor(value: Any) -> Any:
    """Return the elements of a progression; any other value as it is."""
    return value.tensor() if type(value) is Progression else value


def _ends(base: torch.Tensor) -> tuple[int, int]:
    if base.shape[0] == 1:
        only: int = base.item()  # type: ignore[assignment]
        return only, only
    low, high = base.aminmax()
    return low.item(), high.item()  # type: ignore[return-value]


@lru_cache(64)
def _offsets(steps: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the base of a program (1, ...)."""
    offsets = torch.zeros([1] * (1 + len(shape)), dtype=torch.int64)
    for axis, (step, length) in enumerate(zip(steps, shape, strict=True)):
        if step:
            wrapped = (step + 2**63) % 2**64 - 2**63
            line = torch.arange(length) * wrapped
            offsets = offsets + line.view(-1, *[1] * (len(shape) - 1 - axis))
    return uncounted(offsets.to(dtype))
