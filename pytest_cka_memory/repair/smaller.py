"""Run a test with smaller sizes, or without random values, where values would take too long."""

import copy
import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from pytest_cka_memory.repair import is_users
from pytest_cka_memory.repair.trials import replaced

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
        """A number to which the work of a run is proportional: rows times columns of the inputs."""
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
    """Give tensors that the test's own code makes in the block a smaller batch, their first size.

    What models make, and what is made while they are made, keeps its size. Of the batches of a
    ``DataLoader`` the first rows are kept.
    """
    shrunk = Shrunk()
    iterate = DataLoader.__iter__

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] != (before.batch,):
            return tensor
        shrunk.tensors += 1
        is_text = tensor.ndim > 1 and before.tokens and tensor.shape[1] == before.tokens
        return (tensor[: now.batch, : now.tokens] if is_text else tensor[: now.batch]).clone()

    @functools.wraps(iterate)
    def batches(loader: "DataLoader[Any]") -> Iterator[Any]:
        for batch in iterate(loader):
            yield _with_tensors(cut, batch)

    with _Smaller(before, now, shrunk), replaced(DataLoader, "__iter__", batches):
        yield shrunk


def _with_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a batch of a loader with other tensors: in lists, tuples and mappings, as it makes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        changed.update({key: _with_tensors(change, each) for key, each in value.items()})
        return changed
    if isinstance(value, (list, tuple)):
        every = [_with_tensors(change, each) for each in value]
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    return value


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
        sized = (tuple, list)  # the size of randint is the argument after one bound or two
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
    """Whether a tensor is made by the user's code outside of a module's __init__ and forward."""
    frame: Any = sys._getframe(2)  # what called the factory
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name in ("__init__", "forward"):
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name not in ("__init__", "forward")


_RANDOM = ("uniform_", "normal_")
_AFTER = ("erfinv_", "mul_", "add_", "clamp_")
"""By these functions libraries make other distributions of random values, such as a truncated one.
"""
_INITIALIZERS = ("trunc_normal_", "orthogonal_")
"""Of ``torch.nn.init``: they read the values that they draw."""
_LARGE = 2**16
"""Elements. Smaller parameters cost little, and large ones are in memory that is zero at first."""
_KINDS = (torch.Tensor, torch.nn.Parameter)
_MOST = 4
"""So often the values of one parameter are left out: a loop may draw until it accepts them."""


@contextmanager
def without_random_values() -> Iterator[None]:
    """Leave large parameters on the host as they are allocated, in the block.

    A model of 124 million parameters takes a second to initialize, and its step on an emulated
    device without values less. Libraries use their own functions for it, so that the methods of
    tensors are replaced. What is made on the device is not concerned: it may need memory.
    """
    with ExitStack() as stack:
        left_out = _LeftOut()
        stack.callback(left_out.end)
        register = torch.nn.Module.register_parameter
        stack.enter_context(
            replaced(torch.nn.Module, "register_parameter", left_out.registering(register))
        )
        for owner, names, wrap in (
            (torch.Tensor, _RANDOM, left_out.drawing),
            (torch.nn.init, _INITIALIZERS, left_out.drawing),
            (torch.Tensor, _AFTER, left_out.following),
        ):
            for name in names:
                stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


class _LeftOut:
    """Knows the parameters on the host, and those whose values were left out.

    A library that is imported in the block may keep a function that is replaced in it, so that
    each of them only does what it replaces once the block has ended.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        """Address of a storage -> the parameter that has it; also ``parameter.data`` is found."""
        self._times: Counter[int] = Counter()
        self._has_ended = False

    def end(self) -> None:
        """Let the replaced functions do what they did before."""
        self._has_ended = True
        self._parameters.clear()
        self._times.clear()

    def registering(self, register: Callable[..., None]) -> Callable[..., None]:
        """Return a function that also notes the parameters that modules get."""

        @functools.wraps(register)
        def registered(module: torch.nn.Module, name: str, param: Any) -> None:
            register(module, name, param)
            if not self._has_ended and _is_large(param):
                self._note(param)

        return registered

    def drawing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that leaves large parameters as they are."""

        @functools.wraps(function)
        def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._has_ended or not _is_large(tensor):
                return function(tensor, *args, **kwargs)
            address = self._address(tensor)
            if address is None or self._times[address] >= _MOST:
                return function(tensor, *args, **kwargs)
            self._times[address] += 1
            return tensor

        return draw

    def following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that leaves parameters as they are whose values were left out."""

        @functools.wraps(function)
        def follow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._times and _is_large(tensor):
                address = self._address(tensor)
                if address is not None and self._times[address]:
                    return tensor
            return function(tensor, *args, **kwargs)

        return follow

    def _note(self, parameter: torch.Tensor) -> int:
        address = parameter.untyped_storage().data_ptr()
        known = self._parameters.get(address)
        if known is None or known() is not parameter:
            self._parameters[address] = weakref.ref(parameter)
            del self._times[address]  # of one that was freed
        return address

    def _address(self, tensor: torch.Tensor) -> int | None:
        """Return the address of a parameter's storage; None of other tensors."""
        if isinstance(tensor, torch.nn.Parameter):
            return self._note(tensor)
        address = tensor.untyped_storage().data_ptr()
        known = self._parameters.get(address)
        parameter = None if known is None else known()
        if parameter is None or parameter.untyped_storage().data_ptr() != address:
            return None
        return address


def _is_large(tensor: Any) -> bool:
    # No subclass: torch.compile traces these functions with tensors that have no storage.
    return type(tensor) in _KINDS and tensor.is_cpu and bool(tensor.numel() >= _LARGE)
