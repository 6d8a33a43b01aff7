"""Calls of modules while a step runs: which module is the outermost, and how deep a call is."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class CallStack(threading.local):
    """The modules whose calls have not returned yet, outermost first; one for each thread."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


@contextmanager
def calls_followed(
    begins: Callable[[torch.nn.Module, list[torch.nn.Module]], object] = lambda module, outer: None,
    ends: Callable[[torch.nn.Module, list[torch.nn.Module], Any, Any], object] = (
        lambda module, outer, given, result: None
    ),
) -> Iterator[CallStack]:
    """Call `begins` before each forward and `ends` after it, with the modules around it.

    `ends` also gets the arguments of the call, positional and named, and its result.
    """
    stack = CallStack()

    def before(module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return  # torch.compile would trace what follows
        begins(module, stack.modules)
        stack.modules.append(module)

    def after(module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        kwargs, result = rest if len(rest) == 2 else ({}, rest[0])  # no names after an exception
        if module in stack.modules:
            while stack.modules.pop() is not module:
                pass  # calls that ended with an exception
        ends(module, stack.modules, (args, kwargs), result)

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
        stack.modules.clear()


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a module; of one that is sharded, the class that it had before."""
    kind = type(module)
    return kind.__bases__[1] if _is_sharded(kind) else kind


def _is_sharded(kind: type) -> bool:
    bases = kind.__bases__
    return len(bases) == 2 and bases[0].__name__ == "FSDPModule"


def with_own_forward(kind: type[torch.nn.Module]) -> list[type[torch.nn.Module]]:
    """Return a class, and those that sharding has made of it if they have their own forward.

    Transformers gives each subclass of its layers one, which calls that of the class as it is then.
    """
    subclasses = kind.__subclasses__()
    return [kind, *(each for each in subclasses if _is_sharded(each) and "forward" in vars(each))]


def of_class(root: torch.nn.Module, kind: type) -> list[torch.nn.Module]:
    """Return the modules of exactly this class in `root`, in the order of ``root.modules()``."""
    return [module for module in root.modules() if class_of(module) is kind]


_DEEPEST = 4


def tensors_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a function takes or returns, also those in objects of the user."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for each in _parts_of(value):
            yield from tensors_in(each, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (torch.nn.Module, type)):
        return ()
    return list(getattr(value, "__dict__", {}).values())
