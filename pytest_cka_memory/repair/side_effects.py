"""What must not happen twice, as a forward that runs again in backward would do it, or earlier, as
an optimizer that steps in backward.
"""

import functools
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from pytest_cka_memory.repair.edits import is_users
from pytest_cka_memory.repair.modules import tensors_in


def side_effect(module: torch.nn.Module) -> Callable[[], str]:
    """Return a function that says what `module` has changed since; empty if nothing that shows."""
    buffers = {name: buffer._version for name, buffer in module.named_buffers(recurse=False)}
    before = dict(_comparable(module))
    known = dict(_globals_used(module))
    state = random.getstate()
    numpy = _numpy_state()

    def changed() -> str:
        for name, buffer in module.named_buffers(recurse=False):
            if buffers.get(name) != buffer._version:
                return f"its forward changes the buffer {name}"
        after = dict(_comparable(module))
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                return f"its forward changes self.{name}"
        if dict(_globals_used(module)) != known:
            return "its forward changes a global variable"
        if random.getstate() != state:
            return "its forward draws from Python's random"
        if _numpy_state() != numpy:
            return "its forward draws from NumPy's random numbers"
        return ""

    return changed


def _comparable(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    # Without torch's own attributes: registries of parameters, modules and hooks.
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, (dict, set)):
            continue
        if isinstance(value, (bool, int, float, str, type(None))):
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, (id(value), value._version)
        elif isinstance(value, (list, dict, set, tuple)):
            yield name, (id(value), len(value))
        else:
            yield name, id(value)


def _globals_used(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the global variables that the forward of a user's class names, as :func:`_comparable`
    does: those that it may change.
    """
    kind: Any = type(module)
    for name, values in _names_used(kind):
        value = values.get(name)
        if isinstance(value, (list, dict, set)):
            yield name, (id(value), len(value))
        elif isinstance(value, (bool, int, float, str)):
            yield name, value


@functools.lru_cache(maxsize=256)
def _names_used(kind: Hashable) -> list[tuple[str, dict[str, Any]]]:
    """Return the names that a forward uses, and the user's functions and methods it calls."""
    found: list[tuple[str, dict[str, Any]]] = []
    seen: set[CodeType] = set()
    left: list[Any] = [getattr(kind, "forward", None)]
    while left:
        function = left.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen or not is_users(code.co_filename):
            continue
        seen.add(code)
        values = function.__globals__
        for name in code.co_names:
            found.append((name, values))
            for value in (values.get(name), getattr(kind, name, None)):
                if isinstance(value, FunctionType):
                    left.append(value)
                elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    left += [value.forward, value.backward]
    return found


class UntilStep:
    """What a step does with the weights and options of an optimizer between backward and its step.

    An optimizer that steps in backward has updated the weights by then.
    """

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._options: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]
        self._options = weakref.WeakKeyDictionary()
        self._is_waiting = False
        self.because = ""
        """What makes an earlier step wrong; empty if nothing."""

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer and what it updates."""
        self._options[optimizer] = None
        for group in optimizer.param_groups:
            self._weights.update(map(id, group["params"]))

    def begins_backward(self) -> None:
        """Note the options with which an optimizer would step in this backward pass."""
        if not self._is_waiting:
            for optimizer in list(self._options):
                self._options[optimizer] = _options_of(optimizer)
            self._is_waiting = True

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether the options are still the same."""
        known = self._options.get(optimizer)
        if known is not None and known != _options_of(optimizer):
            self.because = "options of the optimizer change between backward and step"
        self.has_stepped()

    def has_stepped(self) -> None:
        """Note that an optimizer has stepped: also one whose closure ran the backward pass."""
        self._is_waiting = False

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note a call of a function of torch, outside of backward passes and optimizers."""
        if not self._is_waiting or self.because:
            return
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _VIEWS:
                return
        if name not in _WITHOUT_VALUES and any(id(t) in self._weights for t in tensors_in(args, 3)):
            self.because = "weights are read between backward and step"


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
_WITHOUT_VALUES = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "get_device"),
    *("register_hook", "requires_grad_", "__set__", "__len__", "type", "storage_offset"),
    *("register_post_accumulate_grad_hook", "zeros_like", "empty_like", "ones_like", "backward"),
    *("new_zeros", "new_empty", "is_pinned", "is_shared", "__hash__", "__delete__"),
}


def _options_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                found.append((name, (id(value), value._version)))
            elif name != "params":
                found.append((name, value))
    return found


def random_state(device: str) -> object:
    """Return the states of torch's generators, for the host and a device."""
    states = [torch.get_rng_state().numpy().tobytes()]
    if device != "cpu":
        states.append(torch.get_device_module(device).get_rng_state().numpy().tobytes())
    return states


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, position, *_ = numpy.random.get_state()
    return kind, keys.tobytes(), position
