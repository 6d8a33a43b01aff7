"""Walk over Python's objects, from some of them to all that they reference, each once.

In C if the compiled library is here, which takes a fraction of the time, else in Python.
"""

import gc
import os
import types
from collections.abc import Iterable, Sequence
from itertools import compress, filterfalse
from operator import not_
from typing import Any, Protocol

from pytest_cka_memory.holders.by_type import ByType
from pytest_cka_memory.meters.blocks.library import SWITCH
from pytest_cka_memory.meters.blocks.python_objects import CompiledWalk

LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)
"""Types whose objects reference nothing of interest."""
_AT_ONCE = 10_000
"""Objects that are looked at together: few enough for the caches of a processor."""


class Walk(Protocol):
    """The objects that were met so far, numbered in the order in which they were met.

    All are kept alive, because the id of a freed object may be used again. Objects that lead
    nowhere and are not tracked by the collector may be left out, and of those that were not met,
    objects of plain types that lead only to what was.
    """

    def __len__(self) -> int:
        """Return how many objects were met."""
        ...

    def __contains__(self, value: object) -> bool:
        """Whether an object was met."""
        ...

    def __getitem__(self, numbers: slice) -> list[Any]:
        """Return the objects with these numbers."""
        ...

    def enter(self, values: list[Any]) -> list[Any]:
        """Meet `values`, and return those that are new and of a type that is not called plain."""
        ...

    def follow(self, first: int, end: int) -> list[Any]:
        """Do the same with all that the objects from number `first` to `end` reference."""
        ...

    def add_plain(self, kind: type) -> None:
        """Call a type plain: of its objects, only what they reference is of interest."""
        ...

    def parents(self, first: int, end: int, wanted: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Return each object of `wanted` that is referenced, and the first that references it.

        Args:
            first: the number of the first object that may reference one.
            end: the number after that of the last.
            wanted: the objects whose parents are looked for.
        """
        ...

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        ...

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        ...


def new_walk() -> Walk:
    """Return a walk that has met nothing."""
    found = None if os.environ.get(SWITCH) == "0" else CompiledWalk.begin([*LEAVES])
    return PythonWalk() if found is None else found


class PythonWalk:
    """A walk without a step in Python for each object, except for those of types with rules."""

    __slots__ = ("_idents", "_is_special", "_leads_on", "_met")

    def __init__(self) -> None:
        self._met: list[Any] = []
        self._idents: set[int] = set()
        # Not methods, which would make a cycle: the objects must be freed with the walk.
        self._leads_on = ByType(lambda kind: kind not in LEAVES)
        self._is_special = ByType(lambda _: True)

    def __len__(self) -> int:
        return len(self._met)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._idents

    def __getitem__(self, numbers: slice) -> list[Any]:
        return self._met[numbers]

    def enter(self, values: list[Any]) -> list[Any]:
        """Meet `values`, and return those that are new and of a type that is not called plain."""
        parts = (values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE))
        return [special for part in parts for special in self._enter_part(part)]

    def follow(self, first: int, end: int) -> list[Any]:
        """Do the same with all that the objects from number `first` to `end` reference."""
        return self.enter(gc.get_referents(*self._met[first:end]))

    def add_plain(self, kind: type) -> None:
        """Call a type plain: of its objects, only what they reference is of interest."""
        self._is_special[kind] = False

    def parents(self, first: int, end: int, wanted: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Return each object of `wanted` that is referenced, and the first that references it."""
        left = {id(value): value for value in wanted}
        found: list[tuple[Any, Any]] = []
        for parent in self._met[first:end]:
            for ident in left.keys() & map(id, gc.get_referents(parent)):
                found.append((left.pop(ident), parent))
            if not left:
                break
        return found

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        own = {id(self), id(self._met), id(self._idents)}
        return [it for it in self._unmet(gc.get_objects()) if id(it) not in own]

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        return self._unmet(gc.get_referents(value))

    def _unmet(self, values: list[Any]) -> list[Any]:
        met = map(self._idents.__contains__, map(id, values))
        new = [*compress(values, map(not_, met))]
        return [*compress(new, map(self._leads_on.__getitem__, map(type, new)))]

    def _enter_part(self, values: Sequence[Any]) -> list[Any]:
        kept = [*compress(values, map(self._leads_on.__getitem__, map(type, values)))]
        kept = self._without_plain_data(kept)
        new = dict(zip(map(id, kept), kept, strict=True))
        for ident in new.keys() & self._idents:
            del new[ident]
        self._idents.update(new)
        self._met.extend(new.values())
        kinds = map(type, new.values())
        return [*compress(new.values(), map(self._is_special.__getitem__, kinds))]

    def _without_plain_data(self, values: list[Any]) -> list[Any]:
        """Return `values`, without those that the collector does not track if these lead nowhere.

        It does not track dicts and tuples of numbers and strings, of which there may be very many.
        To look into those of one part together takes less time than to remember each.
        """
        untracked = [*filterfalse(gc.is_tracked, values)]
        if 2 * len(untracked) < len(values):
            return values
        kinds = set(map(type, untracked))
        children = set(map(type, gc.get_referents(*untracked)))
        if any(map(self._is_special.__getitem__, kinds)) or not LEAVES.issuperset(children):
            return values
        return [*filter(gc.is_tracked, values)]
