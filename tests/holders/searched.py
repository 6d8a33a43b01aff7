"""Regions that leak one tensor, and what the search says about it."""

from collections.abc import Callable
from typing import Any

import torch
from planted import KEEP

from pytest_cka_memory import MemoryProbe, Region


def leaking(make: Callable[[torch.Tensor], Any], size: int = 250) -> Region:
    """Return a searched region that leaks one tensor inside what `make` returns."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.append(make(torch.ones(size)))
    assert region.retained_bytes == 4 * size
    assert len(region.retained) == 1
    return region


def path_to(make: Callable[[torch.Tensor], Any]) -> str:
    """Return the path to the holder of the tensor inside what `make` returns."""
    (holding,) = leaking(make).retained
    assert holding.held_by is not None, holding.hint
    return holding.held_by


def held_by_cpp(x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return a function for a Future in C++ to keep, so that no name leads to `x`."""
    return lambda _: x


class Source:
    """Knows one allocation."""

    def __init__(self, *, lives: bool = True) -> None:
        self.lives = lives

    def is_live(self, key: int, serial: int) -> bool:
        return self.lives

    def is_shared(self, key: int) -> bool:
        return False
