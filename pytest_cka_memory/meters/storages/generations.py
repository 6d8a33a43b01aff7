"""Find objects of some types; search only the young generations if that is proved to be enough.

In most versions of CPython, the garbage collector promotes all objects of its two young generations
together. If the oldest generation was seen without an object of these types, and a list created
then is still young, no object has been promoted since, so all objects of these types are young.
This saves most of a region's cost.

A list of all objects that outlives one call in C breaks other threads: ``tuple(generator)`` raises
a SystemError if something else references the tuple that it is building. Every search below is
therefore one call, in which the list is created, read to its end and freed.
"""

import gc
import operator
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress, repeat
from typing import Any, TypeVar

T = TypeVar("T")

# Whether the garbage collector promotes both young generations together, as described above. That
# of 3.14.0 to 3.14.4 is incremental, and that without the GIL has one generation.
PROMOTED_TOGETHER = (
    sys.implementation.name == "cpython"
    and (sys.version_info < (3, 14) or (3, 14, 5) <= sys.version_info < (3, 15))
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)


class Generations:
    """The objects of the types that `kinds` returns; it may return more types later."""

    def __init__(self, kinds: Callable[[], set[type]]) -> None:
        self._kinds = kinds
        self._witness: list[Any] | None = None
        """Created when the oldest generation was seen to contain no such object."""

    def young(self) -> Iterator[Any]:
        """Yield those in the young generations."""
        kinds = self._kinds()
        return chain.from_iterable(_of(kinds, number) for number in (0, 1))

    def all(self) -> Iterator[Any]:
        """Yield all of them."""
        if self._all_are_young():
            yield from self.young()
            if self._all_are_young():  # none was promoted during the search
                return
        witness: list[Any] = []  # before the search: later objects are younger
        none = True
        kinds = self._kinds()
        for item in chain.from_iterable(_of(kinds, number) for number in (0, 1, 2)):
            none = False
            yield item
        self._witness = witness if none else None

    def none_after_collecting(self) -> bool:
        """Collect young garbage only, and return whether that proves that no such object is left.

        False proves nothing. Old garbage is not collected: it contains no such object, but its
        finalizers, which might create one, do not run.
        """
        return without_collections(self._is_none_left)  # one would invalidate the proof

    def _is_none_left(self) -> bool:
        if not self._all_are_young() or _any(self.young()):
            return False
        gc.collect(1)
        if len(sys._current_frames()) == 1:  # another thread's objects may have been promoted
            self._witness = []  # objects created by finalizers are young
        return not _any(self.all())

    def _all_are_young(self) -> bool:
        if self._witness is None or not PROMOTED_TOGETHER:
            return False
        is_witness = partial(operator.is_, self._witness)
        return any(sum(map(is_witness, _objects(number))) for number in (1, 0))


def _objects(generation: int) -> Iterator[Any]:
    """Return an iterator that lists the objects of a generation when it is first asked."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


def _of(kinds: set[type], generation: int) -> list[Any]:
    """Return the objects of some types in a generation."""
    # By type and not isinstance, which reads __class__: a dead weak proxy raises. By the type's
    # number, because a type's metaclass may compare and hash it in Python.
    numbers = frozenset(map(id, kinds))

    def search() -> list[Any]:
        chosen = map(numbers.__contains__, map(id, map(type, _objects(generation))))
        # The second list of the youngest generation has the first one too, at its end.
        return list(compress(chain(_objects(generation), repeat(None)), chosen))

    return without_collections(search)  # both lists must have the same objects in the same order


_off_in: int | None = None
"""The number of the thread in which :func:`without_collections` has disabled the collector."""


def without_collections(call: Callable[[], T]) -> T:
    """Call a function while the garbage collector does not run by itself."""
    global _off_in
    if not gc.isenabled():
        return call()
    try:
        _off_in = threading.get_ident()
        gc.disable()
        return call()
    finally:
        gc.enable()
        _off_in = None


def repair() -> None:
    """Enable the collector if an exception has kept an earlier search in this thread from it."""
    if _off_in == threading.get_ident():
        gc.enable()


def _any(objects: Iterator[Any]) -> bool:
    return next((True for _ in objects), False)
