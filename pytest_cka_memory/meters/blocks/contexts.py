"""The functions of torch that show what memory is allocated for: the native counter notes them."""

from collections.abc import Iterator
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_cka_memory.core.allocations import Context
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.blocks import library

_MOVERS = ("to", "to_empty", "cpu", "cuda", "xpu", "type", "half", "bfloat16", "float", "double")
"""The methods of a module that allocate its parameters again."""


def are_noted() -> bool:
    """Whether the library can note contexts; that of an older checkout cannot."""
    return hasattr(library.functions(), "stacks_note_context")


@cache
def note() -> tuple[CodeType, ...]:
    """Make the library note them, and return their code, which must not be freed."""
    codes = dict(_contexts()) if are_noted() else {}
    for code, context in codes.items():
        library.functions().stacks_note_context(id(code), context)
    return (*codes, *_note_engine())


def _note_engine() -> tuple[CodeType, ...]:
    """Make the library note in which function a thread waits for an accelerator's backward pass."""
    code = getattr(torch_private.RUN_BACKWARD, "__code__", None)
    if code is None or not hasattr(library.functions(), "stacks_note_engine"):
        return ()
    library.functions().stacks_note_engine(id(code))
    return (code,)


def _contexts() -> Iterator[tuple[CodeType, Context]]:
    for function, context in _functions():
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code, context


def _functions() -> Iterator[tuple[Any, Context]]:
    yield nn.Module.__call__, Context.FORWARD
    yield torch.autograd.backward, Context.BACKWARD
    yield torch.autograd.grad, Context.BACKWARD
    yield Optimizer.profile_hook_step(Optimizer.step), Context.STEP
    yield getattr(torch_private.LOADER_ITERATOR, "__next__", None), Context.LOADER
    for name in _MOVERS:
        yield getattr(nn.Module, name, None), Context.MODULE
    for kind in _classes_in(nn):
        yield vars(kind).get("__init__"), Context.MODULE
    for kind in _classes_in(torch.optim):
        yield vars(kind).get(torch_private.STATE_MAKER), Context.STATE


def _classes_in(module: ModuleType) -> set[type]:
    """Return the classes of a module, and their bases, that torch defines."""
    found = [value for value in vars(module).values() if isinstance(value, type)]
    bases = {base for kind in found for base in kind.__mro__}
    return {base for base in bases if base.__module__.startswith(("torch.nn.", "torch.optim."))}
