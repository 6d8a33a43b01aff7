"""A cache of operator results on fake tensors, because fake tensors are slow to compute.

It contains only operators that allocate no storage: in-place operators and views. Whether a call
raises an error depends only on its key, so a call that raises is never in the cache.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters.torch_private import FakeTensor, in_kernel, schema_of, storage_key

_VALUE_TYPES = (type(None), bool, int, float, str)
_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN_TYPES = frozenset((*_VALUE_TYPES, *_TYPES))
_MOST_ENTRIES = 1024
"""A model runs a few hundred different calls; more shapes than this would only fill memory."""
NOT_CACHED = object()
"""What a lookup returns for a call that is not in the cache."""


class _Argument(NamedTuple):
    """The result is an argument: its position or its keyword."""

    place: int | str


class _View(NamedTuple):
    """The result is a view of the first argument."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class OperatorCache:
    """Results of one mode, by operator and by the properties of the arguments."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._entries: dict[Hashable, _Argument | _View] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Return everything that the result depends on; None if the call cannot be cached."""
        parts: list[Any] = [func, *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.layout is not torch.strided:
                    return None
                parts += [value.shape, value.stride(), value.storage_offset()]
                parts += [value.dtype, value.fake_device, value.is_conj(), value.is_neg()]
            elif kind is list:
                parts.append(tuple(value))
                if not all(type(one) in _PLAIN_TYPES for one in value):
                    return None
            elif kind in _PLAIN_TYPES:
                parts += [kind, value]
            else:
                return None
        return tuple(parts)

    def lookup(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call with this key, or `NOT_CACHED`."""
        entry = self._entries.get(key)
        if entry is None:
            return NOT_CACHED
        if isinstance(entry, _Argument):
            return kwargs[entry.place] if isinstance(entry.place, str) else args[entry.place]
        base = args[0]
        with in_kernel(self._mode):
            view = base.as_strided(*entry)
        return FakeTensor(self._mode, view, base.fake_device)

    def store(
        self, key: Hashable, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Store a result if it can be reproduced; `key` was computed before the call."""
        if type(result) is not FakeTensor or key != self.key(func, args, kwargs):
            return  # the call has changed the shape of an argument
        returned = schema_of(func).returns[0].alias_info
        if returned is None:
            return
        if returned.is_write:
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for place, value in places:
                if value is result:
                    self._add(key, _Argument(place))
        elif _is_plain_view(result, args[0]):
            offset = int(result.storage_offset())
            self._add(key, _View(tuple(result.shape), result.stride(), offset))

    def _add(self, key: Hashable, entry: _Argument | _View) -> None:
        if len(self._entries) >= _MOST_ENTRIES:
            del self._entries[next(iter(self._entries))]  # the oldest
        self._entries[key] = entry


def _is_plain_view(result: FakeTensor, base: torch.Tensor) -> bool:
    """Whether ``as_strided`` can make `result` from `base`."""
    same = storage_key(result.untyped_storage()) == storage_key(base.untyped_storage())
    return same and result.dtype == base.dtype and not (result.is_conj() or result.is_neg())
