"""Walks over Python's objects in C: what garbage references, and who references an object."""

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pytest_cka_memory.meters import collector
from pytest_cka_memory.meters.blocks.library import functions
from pytest_cka_memory.meters.collector import PROMOTED_TOGETHER

BEGIN, LATER = 0, 1
"""Which objects a census looks at: those created since its begin, or since the last call but one of
:meth:`CompiledCensus.advance`."""


def up_to(generation: int) -> int:
    """Return the number for all objects that a collection of a generation looks at."""
    return -1 - generation


@cache
def _collector_count() -> ctypes.c_int | None:
    library = functions()
    if not PROMOTED_TOGETHER or not hasattr(library, "collector_count"):
        return None
    address = library.collector_count(*gc.get_threshold())
    return None if address is None else ctypes.c_int.from_address(address)


collector.find_count = _collector_count


class CompiledCensus:
    """Finds the garbage among objects that are created from now on."""

    def __init__(self, library: Any, handle: int) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def begin(cls) -> "CompiledCensus | None":
        """Return a census; None without the compiled library, or if Python's lists are unknown."""
        library = functions()
        if not PROMOTED_TOGETHER or not hasattr(library, "census_begin"):
            return None
        handle = library.census_begin(*gc.get_threshold())
        return None if handle is None else cls(library, handle)

    def __del__(self) -> None:
        self._library.census_end(self._handle)

    def advance(self) -> None:
        """Take note of this moment: see ``LATER``."""
        self._library.census_advance(self._handle)

    def unreachable(self, since: int) -> tuple[list[Any], int]:
        """Return the objects that are garbage, and how many objects were looked at.

        The list references them: a collection while it exists does not free them.
        """
        found: list[Any] = []
        return found, self._library.census_unreachable(self._handle, since, found)


class CompiledRelease:
    """Follows what is freed with garbage, as far as references of Python lead.

    Args:
        garbage: objects that are to be taken for freed.
        bases: types; the caller follows their objects, and those of types derived from them.
        like: a type; those that the collector traverses by the same function are treated so, too.
    """

    def __init__(self, garbage: Sequence[Any], bases: tuple[type, ...], like: type) -> None:
        self._library = functions()
        self._bases = bases
        self._handle = None  # an exception may end the next call
        self.found: list[Any] = []
        """Special objects: those in the garbage, and others for each reference that they lose."""
        self._handle = self._library.release_begin(garbage, bases, id(like), self.found)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.release_end(self._handle)

    def note(self, values: list[Any]) -> None:
        """Note how many references objects have besides those of this list, the caller's only."""
        self._library.release_note(self._handle, values)

    def left(self, ident: int) -> int:
        """Return how many references of Python an object still has, if it is noted or special."""
        found: int = self._library.release_left(self._handle, ident)
        return found

    def lose(self, ident: int) -> None:
        """Let an object that was noted lose a reference of Python."""
        self._library.release_lose(self._handle, ident)

    def free(self, ident: int) -> None:
        """Let a special object lose all that it references in Python."""
        self._library.release_free(self._handle, ident)


class CompiledWalk:
    """What the functions of ``csrc/walk.c`` have met.

    Objects are given to them by their addresses, which are their ids, or in a list, because ctypes
    reads ``__class__`` of other arguments, which may run code of the user.
    """

    __slots__ = ("_count", "_handle", "_library")

    def __init__(self, library: Any, handle: int) -> None:
        self._library, self._handle = library, handle
        self._count = 0

    @classmethod
    def begin(cls, leaves: list[type]) -> "CompiledWalk | None":
        """Return a walk that never meets objects of the types `leaves`; None if it cannot be had.

        It needs the compiled library, and Python's lock, which a free-threaded Python lacks.
        """
        library = functions()
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        if not has_lock or not hasattr(library, "walk_begin"):
            return None
        handle = library.walk_begin(leaves)
        return None if handle is None else cls(library, handle)

    def __del__(self) -> None:
        self._library.walk_end(self._handle)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, value: object) -> bool:
        return bool(self._library.walk_has(self._handle, id(value)))

    def __getitem__(self, numbers: slice) -> list[Any]:
        first, end, _ = numbers.indices(self._count)
        found: list[Any] = self._library.walk_met(self._handle, first, end)
        return found

    def enter(self, values: list[Any]) -> list[Any]:
        """Meet `values`, and return those that are new and of a type that is not called plain."""
        special: list[Any] = []
        self._count = self._library.walk_enter(self._handle, values, special)
        return special

    def follow(self, first: int, end: int) -> list[Any]:
        """Do the same with all that the objects from number `first` to `end` reference."""
        special: list[Any] = []
        self._count = self._library.walk_follow(self._handle, first, end, special)
        return special

    def add_plain(self, kind: type) -> None:
        """Call a type plain: of its objects, only what they reference is of interest."""
        self._library.walk_add_plain(self._handle, id(kind))

    def parents(self, first: int, end: int, wanted: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Return each object of `wanted` that is referenced, and the first that references it."""
        found = self._library.walk_parents(self._handle, first, end, wanted)
        values = iter(found)
        return zip(values, values, strict=True)  # a list of pairs would take 80 bytes for each

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        found = self._library.walk_unmet(self._handle, gc.get_objects, ())
        return [it for it in found if it is not self]

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        found: list[Any] = self._library.walk_unmet_referents(self._handle, id(value))
        return found
