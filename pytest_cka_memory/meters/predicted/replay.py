"""Answers an operator on fake tensors as it was answered before, in a fraction of the time.

Only operators that make no storage: those that return what they wrote to, and views. Whether a call
is a mistake depends on what is in the key, so a mistake is never answered.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters.torch_private import FakeTensor, in_kernel, schema_of, storage_key

_VALUES = (type(None), bool, int, float, str)
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset((*_VALUES, *_KINDS))
UNKNOWN = object()
"""The answer to what was not asked before."""


class _Written(NamedTuple):
    """The result is the argument at this place."""

    place: int | str


class _View(NamedTuple):
    """The result is a view of the first argument."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Replay:
    """What one mode has answered, by operator and kinds of arguments."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[Hashable, _Written | _View] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """All that the answer depends on; None where that is more than is asked here."""
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
                if not all(type(one) in _PLAIN for one in value):
                    return None
            elif kind in _PLAIN:
                parts += [kind, value]
            else:
                return None
        return tuple(parts)

    def answer(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call with this key, or `UNKNOWN`."""
        known = self._known.get(key)
        if known is None:
            return UNKNOWN
        if isinstance(known, _Written):
            return kwargs[known.place] if isinstance(known.place, str) else args[known.place]
        base = args[0]
        with in_kernel(self._mode):
            view = base.as_strided(*known)
        return FakeTensor(self._mode, view, base.fake_device)

    def learn(
        self, key: Hashable, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note a result, if it is one that can be given again. Call with the key of before."""
        if type(result) is not FakeTensor or key != self.key(func, args, kwargs):
            return  # the key has changed: an argument was given another shape
        returned = schema_of(func).returns[0].alias_info
        if returned is None:
            return
        if returned.is_write:
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for place, value in places:
                if value is result:
                    self._known[key] = _Written(place)
        elif _is_plain_view(result, args[0]):
            offset = int(result.storage_offset())
            self._known[key] = _View(tuple(result.shape), result.stride(), offset)


def _is_plain_view(result: FakeTensor, base: torch.Tensor) -> bool:
    """Whether as_strided makes the one of the other."""
    same = storage_key(result.untyped_storage()) == storage_key(base.untyped_storage())
    return same and result.dtype == base.dtype and not (result.is_conj() or result.is_neg())
