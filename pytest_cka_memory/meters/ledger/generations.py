"""Look for objects of some types, among the young ones only where that is proved to be enough.

In CPython up to 3.13, objects leave the two young generations of the garbage collector all at once.
So when the oldest was seen without an object of these types, and a list made then is still young,
none has joined it since: all there are, are young. What this saves is most of a region's cost.
"""

import gc
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress
from typing import Any

LEAVE_AT_ONCE = sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Generations:
    """The objects of the types that `kinds` returns, which may become more."""

    def __init__(self, kinds: Callable[[], set[type]]) -> None:
        self._kinds = kinds
        self._witness: list[Any] | None = None
        """Made when the oldest generation was seen to hold no such object."""

    def young(self) -> Iterator[Any]:
        """Those that are young."""
        kinds = self._kinds()
        # One at a time and no list of our own, which would be an object too, and so hold itself.
        return chain.from_iterable(
            _of(kinds, gc.get_objects(generation=number)) for number in (0, 1)
        )

    def all(self) -> Iterator[Any]:
        """Every one."""
        if self._all_are_young():
            yield from self.young()
            if self._all_are_young():  # none has left them during the look
                return
        witness: list[Any] = []  # before the look: what comes after it is younger still
        none = True
        for item in _of(self._kinds(), gc.get_objects()):
            none = False
            yield item
        self._witness = witness if none else None

    def none_after_collecting(self) -> bool:
        """Collect young garbage only, and return whether it is proved that no such object is left.

        False says nothing. Old garbage stays: it holds no such object, but a finalizer of it that
        would make one does not run.
        """
        enabled = gc.isenabled()
        gc.disable()  # or a collection could come between the look and what it proves
        try:
            if not self._all_are_young() or _any(self.young()):
                return False
            gc.collect(1)
            if len(sys._current_frames()) == 1:  # another thread's may have grown old just now
                self._witness = []  # what a finalizer has made is young
            return not _any(self.all())
        finally:
            if enabled:
                gc.enable()

    def _all_are_young(self) -> bool:
        if self._witness is None or not LEAVE_AT_ONCE:
            return False
        is_witness = partial(operator.is_, self._witness)
        return any(any(map(is_witness, gc.get_objects(generation=number))) for number in (1, 0))


def _of(kinds: set[type], objects: list[Any]) -> Iterator[Any]:
    # By type, never isinstance: that asks __class__, and a dead weak proxy raises.
    return compress(objects, map(kinds.__contains__, map(type, objects)))


def _any(objects: Iterator[Any]) -> bool:
    return next((True for _ in objects), False)
