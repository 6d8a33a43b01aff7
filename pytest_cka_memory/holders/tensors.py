"""Describe a tensor or a module for a message, without running code of its class.

Its dtype and shape, whose gradient or hook it is, and the path of a module in its network, such as
``encoder.layers.2.linear1``.
"""

import gc
import math
import re
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from pytest_cka_memory.core.places import shown
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.objects import gradient_of, is_pinned, storages_of
from pytest_cka_memory.units import counted


def class_name(kind: type) -> str:
    """Return the name of a class, even if its metaclass overrides ``__name__``."""
    name: str = type.__dict__["__name__"].__get__(kind)
    return name


def class_module(kind: type) -> str:
    """Return the module of a class, even if its metaclass overrides ``__module__``.

    It is empty if the class has something else than a text under this name.
    """
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else ""


def module_name_of(value: Any) -> str:
    """Return the module of a function or of the class of another object."""
    if type(value) is not types.FunctionType:
        return class_module(type(value))
    name = value.__globals__.get("__name__")
    return name if type(name) is str else ""


def label(value: Any) -> str:
    """Return what an object is: its class, and the shape of a tensor or the line of a function."""
    kind = type(value)
    if kind is types.FunctionType:
        code = value.__code__
        return f"{value.__qualname__} ({shown(code.co_filename)}:{code.co_firstlineno})"
    dtype, shape = dtype_and_shape_of(value)
    name = class_name(kind)
    return name if dtype is None else f"{name} {shape}"


def dtype_and_shape_of(value: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the dtype, such as ``float32``, and the shape of a tensor; None each if unknown."""
    if not issubclass(type(value), torch.Tensor) or torch_private.is_tracing():
        return None, None  # while torch.jit traces, sizes are tensors and become part of the trace
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        dtype = str(_field(value, "dtype")).removeprefix("torch.")
        try:
            shape = tuple(_field(value, "shape"))
        except Exception:  # a strided nested tensor has no shape, a subclass may raise anything
            return dtype, None
    return dtype, shape if all(type(size) is int for size in shape) else None


def has_one_element(value: Any) -> bool:
    """Whether a value is a tensor with one element."""
    _, shape = dtype_and_shape_of(value)
    return shape is not None and math.prod(shape) == 1


def is_part_of_its_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is smaller than its storage; False if it has none or several."""
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        storages = storages_of(tensor)
        inner = torch_private.unwrapped(tensor)  # has all elements, and not those of one example
        tensor = tensor if inner is None else inner
        try:
            return len(storages) == 1 and _field(tensor, "nbytes") < storages[0].nbytes()
        except Exception:  # as in dtype_and_shape_of
            return False


def is_pinned_tensor(value: Any) -> bool:
    """Whether a value is a tensor or storage in pinned memory of the host, as far as is known."""
    if torch_private.is_tracing() or not issubclass(
        type(value), (torch.Tensor, torch.UntypedStorage)
    ):
        return False
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        return is_pinned(value)


def is_gradient(value: Any, tensor: Any) -> bool:
    """Whether `value` is the ``.grad`` of `tensor`, if that is a tensor."""
    if not issubclass(type(tensor), torch.Tensor):
        return False
    with torch_private.no_subclass_function():
        return gradient_of(tensor) is value


def is_hooks(value: Any, tensor: Any) -> bool:
    """Whether `value`, a dict, has the hooks of `tensor`, if that is a tensor.

    In a torch version that does not show which dict has the hooks, any dict of a tensor counts.
    """
    if not issubclass(type(tensor), torch.Tensor):
        return False
    if not torch_private.KNOWS_TENSOR_HOOKS:
        return True
    with torch_private.no_subclass_function():
        return any(getattr(tensor, name) is value for name in torch_private.TENSOR_HOOKS)


def _field(tensor: torch.Tensor, name: str) -> Any:
    """Return an attribute as torch defines it, even if the tensor's class overrides it."""
    return getattr(torch.Tensor, name).__get__(tensor)


_MOST_NAMED = 2


def module_paths(identities: Collection[int]) -> dict[int, str]:
    """Return the paths of live modules in the networks that they are part of.

    The path starts inside the outermost module, which is named by its class if the path would start
    with a number: ``Sequential.0``. A module that has been freed is left out, or, if another module
    has the same identity now, that one is named.

    Args:
        identities: ``id()`` of each module.

    Returns:
        identity -> path.
    """
    if not identities:
        return {}

    modules = [value for value in gc.get_objects() if issubclass(type(value), torch.nn.Module)]
    parents: dict[int, tuple[torch.nn.Module, str]] = {}
    for module in modules:
        for name, child in _children(module):
            parents.setdefault(id(child), (module, name))
    return {id(it): _path(it, parents) for it in modules if id(it) in identities}


def _children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:

    try:  # as torch.nn.Module defines it: the user's class may override it
        yield from list(torch.nn.Module.named_children(module))
    except AttributeError:  # its __init__ has not run
        return


def _path(module: torch.nn.Module, parents: Mapping[int, tuple[torch.nn.Module, str]]) -> str:
    names: list[str] = []
    inside = {id(module)}
    current = module
    while id(current) in parents:
        current, name = parents[id(current)]
        if id(current) in inside:  # a module may contain itself
            break
        inside.add(id(current))
        names.append(name)
    if not names or names[-1].isdecimal():  # "0" alone says nothing
        names.append(class_name(type(current)))
    return ".".join(reversed(names))


def largest_modules(modules: Iterable[tuple[int, int]], paths: Mapping[int, str]) -> str | None:
    """Return the paths of the modules that allocated most bytes, and how many more there are.

    Of modules whose paths differ only in numbers, such as the layers of a network, one is named.

    Args:
        modules: pairs of a module's identity and bytes.
        paths: identity -> path.

    Returns:
        For example ``encoder.layers.1.linear1 (and 1 like it) and head``; None if no path is known.
    """
    sizes: Counter[str] = Counter()
    for identity, size in modules:
        if identity in paths:
            sizes[paths[identity]] += size
    alike: dict[str, list[str]] = {}
    total: Counter[str] = Counter()
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        pattern = re.sub(r"\b\d+\b", "*", path)
        alike.setdefault(pattern, []).append(path)
        total[pattern] += size
    named = [alike.pop(pattern) for pattern, _ in total.most_common(_MOST_NAMED)]
    texts = [f"{path} (and {len(rest)} like it)" if rest else path for path, *rest in named]
    others = sum(map(len, alike.values()))
    texts += [counted(others, "more module")] if others else []
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts) or None
