"""What a module's forward does that would happen twice if it ran again in backward."""

import random
import sys
from collections.abc import Callable, Iterator

import torch

from pytest_cka_memory.repair.edits import is_users


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
    code = getattr(type(module).forward, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return
    values = type(module).forward.__globals__
    for name in code.co_names:
        value = values.get(name)
        if isinstance(value, (list, dict, set)):
            yield name, (id(value), len(value))
        elif isinstance(value, (bool, int, float, str)):
            yield name, value


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, position, *_ = numpy.random.get_state()
    return kind, keys.tobytes(), position
