"""Run a test with smaller sizes than it asks for, where its values would take too long."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_cka_memory.repair.edits import is_users

_BY_SIZE = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.full)
_RANDOM_INTEGERS = torch.randint
_SMALL_BATCHES = (4, 2, 1)
"""A multiple of what micro-batches divide it into, if possible."""
_FEW_TOKENS = 64


@dataclass(frozen=True)
class Sizes:
    """How large the inputs of a test are."""

    batch: int = 0
    """Rows of the first input of each model; 0 if models differ in it."""
    tokens: int = 0
    """Columns of that input, if it is a matrix of integers; otherwise 0."""

    @property
    def smaller(self) -> "Iterator[Sizes]":
        """Smaller sizes to try, the largest first."""
        batch = next((n for n in _SMALL_BATCHES if n < self.batch and self.batch % n == 0), 0)
        if batch:
            yield Sizes(batch, self.tokens)
        if self.tokens > _FEW_TOKENS:
            yield Sizes(batch or self.batch, _FEW_TOKENS)

    @property
    def share(self) -> int:
        """What the work is proportional to."""
        return max(self.batch, 1) * max(self.tokens, 1)


_FLOPS = 5e9
"""Floating-point operations that the host surely computes in a second."""


def sizes_to_try(before: Sizes, *, peak_bytes: int, flops: int, seconds: float) -> Iterator[Sizes]:
    """Yield sizes for a run with values: as they are unless that is too much, then smaller ones.

    Args:
        before: the sizes of the test.
        peak_bytes: what a run with them needs.
        flops: what it computes.
        seconds: how long a run may take.
    """
    tried = [before, *before.smaller]
    for number, sizes in enumerate(tried):
        share = sizes.share / before.share
        fits = peak_bytes * share < _available_bytes() / 2 and flops * share < _FLOPS * seconds
        if fits or number == len(tried) - 1:
            yield from tried[number:]
            return


def _available_bytes() -> float:
    """Return the bytes that the host has available; infinity where it does not say so."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return math.inf
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * float(next(kilobytes, math.inf))


def instead_of(before: Sizes, now: Sizes) -> str:
    """Return in words how sizes differ."""
    parts = [f"batches of {now.batch} instead of {before.batch}"] * (now.batch != before.batch)
    if now.tokens != before.tokens:
        parts.append(f"{now.tokens} tokens instead of {before.tokens}")
    return ", ".join(parts)


class Shrunk:
    """Counts the tensors that were made smaller."""

    def __init__(self) -> None:
        self.tensors = 0


@contextmanager
def made_smaller(before: Sizes, now: Sizes) -> Iterator[Shrunk]:
    """Make tensors smaller in the block whose first size is a batch, as a test's own code does it.

    What models make, and what is made while they are made, keeps its size.
    """
    shrunk = Shrunk()
    with _Smaller(before, now, shrunk):
        yield shrunk


class _Smaller(TorchFunctionMode):
    def __init__(self, before: Sizes, now: Sizes, shrunk: Shrunk) -> None:
        super().__init__()
        self._before, self._now, self._shrunk = before, now, shrunk

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (func in _BY_SIZE or func is _RANDOM_INTEGERS) and _is_of_test():
            args, kwargs = self._with_sizes(func, args, kwargs)
        return func(*args, **kwargs)

    def _with_sizes(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "size" in kwargs:
            return args, {**kwargs, "size": self._smaller(kwargs["size"])}
        if all(isinstance(each, int) for each in args) and func is not _RANDOM_INTEGERS:
            return tuple(self._smaller(args)), kwargs
        sized = (tuple, list)  # randint may have one bound or two before its size
        return tuple(self._smaller(a) if isinstance(a, sized) else a for a in args), kwargs

    def _smaller(self, size: Any) -> Any:
        before, now = self._before, self._now
        if not size or size[0] != before.batch:
            return size
        self._shrunk.tensors += 1
        rest = tuple(size[1:])
        if rest and before.tokens and rest[0] == before.tokens:
            rest = (now.tokens, *rest[1:])
        return (now.batch, *rest)


def _is_of_test() -> bool:
    """Whether the user's code that makes a tensor is not part of a module."""
    frame: Any = sys._getframe(2)  # what called the factory
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name in ("__init__", "forward"):
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name not in ("__init__", "forward")
