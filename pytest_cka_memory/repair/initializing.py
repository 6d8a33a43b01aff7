"""Leave out the random values of large parameters, where no values are computed with them."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_cka_memory.repair.trials import replaced

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
