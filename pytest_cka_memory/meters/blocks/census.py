"""Find garbage in reference cycles without collecting it; see ``csrc/census.c``."""

import gc
from collections.abc import Sequence
from typing import Any

from pytest_cka_memory.meters.blocks.library import functions
from pytest_cka_memory.meters.storages.generations import PROMOTED_TOGETHER

BEGIN, LATER, ALL = 0, 1, -1
"""Which objects a census looks at: those created since its begin, since the last call but one of
:meth:`CompiledCensus.advance`, or all."""


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
