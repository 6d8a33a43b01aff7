"""Walks over Python's objects in C: what garbage references, and who references an object."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple

from pytest_cka_memory.meters import collector
from pytest_cka_memory.meters.blocks import functions
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

    last: "ClassVar[CompiledCensus | None]" = None
    """Begun at the last call of :meth:`remember_now`."""
    handle: int | None = None
    """None only if an exception of a signal handler has ended the constructor."""

    def __init__(self, library: Any, handle: int) -> None:
        self._library, self.handle = library, handle
        self._earlier = type(self).last

    @classmethod
    def remember_now(cls) -> None:
        """Let censuses that begin later look back to this moment: see :meth:`look_back`."""
        cls.last = None
        cls.last = cls.begin()

    @classmethod
    def begin(cls) -> "CompiledCensus | None":
        """Return a census; None without the compiled library, or if Python's lists are unknown."""
        library = functions()
        if not PROMOTED_TOGETHER or not hasattr(library, "census_leave_out"):
            return None
        handle = library.census_begin(*gc.get_threshold())
        return None if handle is None else cls(library, handle)

    def __del__(self) -> None:
        if self.handle is not None:
            self._library.census_end(self.handle)

    def look_back(self, most: int) -> None:
        """Also look at what was created since :meth:`remember_now` was called before the begin.

        Not if that is more than `most` objects.
        """
        if self._earlier is not None:
            self._library.census_reach_back(self.handle, self._earlier.handle, most)
            self._earlier = None

    def is_small(self, most: int) -> bool:
        """Whether at most so many objects have been created since the begin and are live."""
        return bool(self._library.census_is_small(self.handle, most))

    def advance(self) -> None:
        """Take note of this moment: see ``LATER``."""
        self._library.census_advance(self.handle)

    def unreachable(self, since: int, fresh: list[Any] | None = None) -> tuple[list[Any], int]:
        """Return the objects that are garbage, and how many objects were looked at.

        The list references them: a collection while it exists does not free them. Those that were
        not found since :meth:`forget` was last called are added to `fresh`.
        """
        garbage: list[Any] = []
        added_to = None if fresh is None else id(fresh)
        return garbage, self._library.census_unreachable(self.handle, since, garbage, added_to)

    def leave_out(self, kind: type) -> None:
        """Look at no object of a type any more, in any census: none references what may be garbage.

        Those that a region makes for itself at each boundary would take most of the time.
        """
        self._library.census_leave_out(kind)

    def forget(self) -> None:
        """Forget what was found, because other objects may have got the same identities."""
        self._library.census_forget(self.handle)


class Asked(IntEnum):
    """What a function tells of an object with which the library calls it."""

    MUST_BE = 0
    """Whether the library can follow it: if it returns the expected object."""
    REFERENCE = 1
    """An object that it references in C++, or None."""
    NODES = 2
    """Tuples whose first items it references in C++, if they are not None."""
    SAVED = 3
    """What an autograd node has saved."""
    HAS_MEMORY = 4
    """Nothing: the object has memory."""


class HowToFollow(NamedTuple):
    """How to find what objects of a type reference, and how many references to them are in C++."""

    steps: tuple[tuple[Asked, Callable[[Any], object] | None, object], ...]
    """What is asked, the function, and the object that it must return."""
    of_object: int
    """How many of the references in C++ are those of the Python object itself."""
    of_cpp: int
    """How many references to the Python object are C++'s, as long as there are any in C++."""
    counter: Callable[[Any], int] | None = None
    """Returns the number of references in C++; None if it is read:"""
    place_of_counts: int = 0
    """where in the object the address is behind which they are counted."""
    may_wait: bool = True
    """Whether to say of an object that only references in C++ keep it."""


def learn(kind: type, how: HowToFollow) -> None:
    """Let the library follow objects of a type, which has to exist as long as the process."""
    functions().release_learn(
        *(kind, None if how.counter is None else id(how.counter), how.place_of_counts),
        *(how.of_object, how.of_cpp, how.may_wait, how.steps),
    )


def learn_saved(place_of_hooks: int | None) -> None:
    """Let the library read what nodes have saved; hooks are at that place in C++."""
    place = -1 if place_of_hooks is None else place_of_hooks
    functions().release_learn_saved(place, _DATA, RuntimeError, None)


_DATA = sys.intern("data")


class CompiledRelease:
    """Follows what is freed with garbage.

    Args:
        garbage: objects that count as freed.
        bases: types; objects of these and of derived types are special: they reference others in
            C++, and the caller follows them unless it is learned how to.
        like: a type; those that the collector traverses by the same function are treated so, too.
        deepest: deeper nodes are also followed by the caller.
    """

    def __init__(
        self, garbage: Sequence[Any], bases: tuple[type, ...], like: type, deepest: int
    ) -> None:
        self._library = functions()
        self._bases = bases
        self._handle = None  # an exception may end the next call
        self.met: list[Any] = []
        """Special objects that have lost references."""
        self.storages: list[Any] = []
        """Those that are freed."""
        self._handle = self._library.release_begin(
            garbage, bases, id(like), deepest, self.met, self.storages
        )

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.release_end(self._handle)

    def follow(self) -> list[Any]:
        """Follow all that has lost its references; return objects that the caller has to follow."""
        left_over: list[Any] = []
        self._library.release_follow(self._handle, left_over)
        return left_over

    def is_freed(self, ident: int) -> bool:
        """Whether an object is known to be freed."""
        return bool(self._library.release_is_freed(self._handle, ident))

    def is_unused(self, ident: int, in_cpp: int, of_cpp: int) -> bool:
        """Whether an object has lost all of its references.

        Args:
            ident: identity of the object.
            in_cpp: how many references there are in C++.
            of_cpp: how many of those in Python C++ holds as long as there are any in C++.
        """
        return bool(self._library.release_is_unused(self._handle, ident, in_cpp, of_cpp))

    def depth(self, ident: int) -> int:
        """Return how deep a node is below the garbage."""
        return int(self._library.release_depth(self._handle, ident))

    def note(self, values: list[Any]) -> None:
        """Note how many references objects have besides those of this list, the caller's only."""
        self._library.release_note(self._handle, values)

    def left(self, ident: int) -> int:
        """Return how many references of Python an object still has, if it is noted or special."""
        return int(self._library.release_left(self._handle, ident))

    def lose(self, ident: int) -> None:
        """Let an object that was noted lose a reference of Python."""
        self._library.release_lose(self._handle, ident)

    def lose_in_cpp(self, values: list[Any], nodes: int = 0, depth: int = 0) -> None:
        """Let noted objects lose a reference of C++; the first `nodes` are nodes at a depth."""
        self._library.release_lose_in_cpp(self._handle, values, nodes, depth)

    def free(self, ident: int) -> None:
        """Let a special object lose all that it references in Python."""
        self._library.release_free(self._handle, ident)

    def waiting(self) -> tuple[list[Any], list[Any]]:
        """Return what only references of C++ keep, and what may be such an object."""
        waiting: list[Any] = []
        left_over: list[Any] = []
        self._library.release_waiting(self._handle, waiting, left_over)
        return waiting, left_over


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
        met: list[Any] = self._library.walk_met(self._handle, first, end)
        return met

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
        parents = self._library.walk_parents(self._handle, first, end, wanted)
        values = iter(parents)
        return zip(values, values, strict=True)  # a list of pairs would take 80 bytes for each

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        unmet = self._library.walk_unmet(self._handle, gc.get_objects, ())
        return [it for it in unmet if it is not self]

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        referents: list[Any] = self._library.walk_unmet_referents(self._handle, id(value))
        return referents
