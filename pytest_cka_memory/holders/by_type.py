"""Values that depend on the type of an object only, computed once for each type."""

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class ByType(dict[type, Value]):
    """What a function returns for each type.

    ``map(values.__getitem__, map(type, objects))`` runs no Python code for an object of a type that
    is known, which matters if there are millions.
    """

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[type], Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, kind: type) -> Value:
        found = self[kind] = self._compute(kind)
        return found
