"""Tensors in nested mappings, sequences and dataclasses: found, named and replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences, mappings and dataclasses, depth first."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path: ``x``, ``x.mask``, ``x[1]``; depth first.

    >>> import torch
    >>> [name for name, _ in named_tensors({"x": torch.ones(2), "y": [torch.ones(1)]})]
    ['x', 'y[0]']

    Args:
        value: tensors in mappings, sequences and dataclasses.
        name: the path of the value itself.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    for part_name, part in _parts(value, name):
        yield from named_tensors(part, part_name)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return
    yield from ((f"{name}.{key}" if name else str(key), part) for key, part in inner)


def map_named(value: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Mappings become plain dicts. Objects of other types are returned unchanged, even if they have
    a method ``.to``: they need ``CKA(feed=...)``.

    Args:
        value: tensors in mappings, sequences and dataclasses.
        change: a function of a tensor's path and the tensor.
        name: the path of the value itself.
    """
    if isinstance(value, Tensor):
        return change(name, value)
    parts = [map_named(part, change, part_name) for part_name, part in _parts(value, name)]
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, (list, tuple)):
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            # object.__setattr__ also works on the copy of a frozen dataclass.
            object.__setattr__(changed, field.name, part)
        return changed
    return value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Args:
        value: as for :func:`map_named`.
        change: a function of a tensor.
    """
    return map_named(value, lambda _, tensor: change(tensor))


def shapes_of(named: Mapping[str, Tensor], limit: int = 6) -> str:
    """Return names and shapes for a message.

    >>> import torch
    >>> shapes_of({"x": torch.ones(2, 3), "": torch.ones(4)})
    'x (2, 3), (4,)'
    """
    shown = [f"{name} {tuple(tensor.shape)}".strip() for name, tensor in named.items()]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more
