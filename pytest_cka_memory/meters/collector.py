"""The garbage collector: when a region needs it, when it must not run, and a search of its objects.

How much of a peak or a level was garbage is counted in
:mod:`pytest_cka_memory.measure.batch_samples`.

A region needs a collection rarely, because a full one takes up to a second. To search only the
young generations is often proved to be enough, which saves most of a region's cost: see
:class:`Generations`. This module imports no torch.

A list of all objects that outlives one call in C breaks other threads: ``tuple(generator)`` raises
a SystemError if something else references the tuple that it is building. Every search in
:class:`Generations` is therefore one call, in which the list is created, read to its end and freed.
"""

import gc
import operator
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from gc import collect, disable, enable, isenabled  # at import, because a test may patch them
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from ctypes import c_int

P = ParamSpec("P")
T = TypeVar("T")

_SHARE = 0.05
"""The share of a process's time that full collections may take for regions without limits."""
_SMALL_BYTES = 64 * 2**20
"""Only up to this level may garbage be left, so that the next test does not run out of memory."""
_SLOW_S = 0.02
"""A full collection that takes longer is worth avoiding; a collection of young objects is not."""

PROMOTED_TOGETHER = (
    sys.implementation.name == "cpython"
    and (sys.version_info < (3, 14) or (3, 14, 5) <= sys.version_info < (3, 15))
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
"""Whether the garbage collector promotes all objects of both young generations together. That of
Python 3.14.0 to 3.14.4 is incremental, and that without the GIL has one generation."""
_IMMORTAL = 1000 if sys.version_info[:2] == (3, 12) else 0
"""More than the immortal objects that the collector itself freezes: in Python 3.12 it does so with
some 400, of any program. ``gc.freeze()`` freezes thousands, with torch more than 100,000."""


class Garbage:
    """Frees tensors in reference cycles before and after regions, if there may be any.

    A region that is judged gets every full collection that it may need. One that is only reported
    (`thorough` is False) gets it only within a share of the process's time.

    Args:
        level: returns the bytes that are live now.
        live_between: returns those of them that were allocated after one allocation, by its number,
            and not after another.
        clock: returns the seconds of the processor that the process has used.
    """

    def __init__(
        self,
        level: Callable[[], int],
        live_between: Callable[[int, int], int],
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._level = level
        self._live_between = live_between
        self._clock = clock
        self._clean_levels = {0}
        """Levels that there were without garbage; a process starts without tensors."""
        self._start_level = 0
        """The level at the start of the last region."""
        self._quiet_level: int | None = None
        """The level at the last :meth:`note_quiet_moment`, without garbage; None if not known."""
        self._level_with_garbage = 0
        """The level at that moment, including garbage."""
        self._promotions = _promotions()
        """How often objects had become old when there was last no garbage."""
        self._suspected: tuple[int, int] | None = None
        """The allocations among which there may be garbage that the level does not show."""
        self._kept = False
        """Whether the last region left something, which may become garbage later."""
        self._start_promotions = 0
        """How often objects had become old at the start of the last region."""
        self._spent_s = 0.0
        """The time of all full collections so far."""
        self._last_s = 0.0
        """That of the last one."""

    def suspect(self, since: int, until: int) -> None:
        """Collect before the next region, because objects were dropped that may be garbage.

        Not if what was allocated between the allocations `since` and `until` is freed before.
        """
        old = self._suspected or (since, until)
        self._suspected = min(old[0], since), max(old[1], until)

    def note_quiet_moment(self) -> None:
        """Take note of a moment at which a change of the level would not be garbage's.

        It is before the fixtures of a test are set up. If the level is the same as before those of
        the last test, then everything that these two allocated has been freed.
        """
        level = self._level_with_garbage = self._level()
        # Here and below: mostly nothing is suspected, and to call what says so takes a while.
        is_suspected = self._suspected is not None and self._is_suspected()
        if is_suspected or not (level in self._clean_levels or level == self._quiet_level):
            self._quiet_level = None
            return
        self._quiet_level = level
        # The next test's fixtures may allocate as much as those of the last test.
        self._note_clean({level, self._start_level}, _promotions())

    def collect_before(self, *, thorough: bool = True) -> bool:
        """Free what is garbage, so that the start level does not include it.

        While the level is the same as when there was last none, there is none. Garbage that arose
        since among objects that are still young is found by a collection of these alone.

        Returns:
            False if there may still be garbage, because finding it would take too long.
        """
        level = level_with_garbage = self._level()
        is_clean = True
        is_suspected = self._suspected is not None and self._is_suspected()
        if is_suspected or level not in self._clean_levels:
            has_old = self._promotions != _promotions()
            collect(1)
            was_old = self._is_suspected() or self._kept
            if was_old or (has_old and self._level() not in self._clean_levels):
                is_clean = self._collect_all(thorough)
            level = self._level()
        elif self._last_s > _SLOW_S:
            collect(1)  # what is young at the end of the region has then been made in it
            level = self._level()
        promotions = self._start_promotions = _promotions()
        self._start_level = level
        if is_clean:
            self._suspected = None
            if self._quiet_level is None:
                garbage_bytes = level_with_garbage - self._start_level
                self._quiet_level = self._level_with_garbage - garbage_bytes
            self._note_clean({self._start_level}, promotions)
        return is_clean

    def _is_suspected(self) -> bool:
        """Whether anything is still live of what may be garbage although the level is clean."""
        if self._suspected is not None and not self._live_between(*self._suspected):
            self._suspected = None
        return self._suspected is not None

    def collect_after(self, retained: Callable[[], int], *, thorough: bool = True) -> bool:
        """Free what is garbage if anything that a region has allocated is still live.

        Without `thorough`, objects that are older than the region are taken to be in use.

        Args:
            retained: returns the bytes of it.
            thorough: whether to collect all garbage, however long that takes.

        Returns:
            False if there may still be garbage, because finding it would take too long.
        """
        if not retained():
            return True
        all_young = self._last_s > _SLOW_S and self._start_promotions == _promotions()
        collect(1)
        if not retained():
            return True
        if (thorough or not all_young) and not self._collect_all(thorough):
            self._kept = True
            return False
        kept_bytes = retained()
        # If exactly what the region left is gone, it has been freed.
        self._note_clean({self._level() - kept_bytes}, _promotions())
        self._kept = kept_bytes > 0
        return True

    def _collect_all(self, thorough: bool) -> bool:
        """Collect all garbage and return True, unless it would take too much of the time."""
        start_s = self._clock()
        may_wait = not thorough and self._level() <= _SMALL_BYTES
        expected_s = self._spent_s + self._last_s
        if may_wait and self._last_s > _SLOW_S and expected_s > _SHARE * start_s:
            return False
        collect()
        self._last_s = self._clock() - start_s
        self._spent_s += self._last_s
        return True

    def _note_clean(self, levels: set[int], promotions: int) -> None:
        self._clean_levels = levels
        self._kept = False
        self._promotions = promotions


def _promotions() -> int:
    """Return how often the garbage collector has moved objects into its oldest generation."""
    _, middle, old = gc.get_stats()  # several times for each region, so without a loop
    promotions: int = middle["collections"] + old["collections"]
    return promotions


def collected_objects() -> int:
    """Return how many objects the garbage collector has freed so far."""
    young, middle, old = gc.get_stats()  # at each boundary, so without a loop
    collected: int = young["collected"] + middle["collected"] + old["collected"]
    return collected


def has_frozen() -> bool:
    """Return whether the program hides objects by ``gc.freeze()``.

    This takes 30 ms if a million objects are frozen.
    """
    return gc.get_freeze_count() > _IMMORTAL


def find_count() -> "c_int | None":
    """Return the number of new objects by which the collector decides to run; None if unknown.

    ``blocks`` replaces this function, because only C can find that number.
    """
    return None


_off_in: int | None = None
"""The number of the thread in which :func:`not_counted` has disabled the collector."""


def not_counted(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function during which the collector does not run by itself.

    It runs after so many new objects. What a region makes while the program runs would move that
    to another batch, or into a reading of the levels, and so change them. Where the number of new
    objects is known, it is afterwards as if the function had made none.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        global _off_in
        was_enabled = isenabled()
        count = find_count()
        before = None if count is None else count.value
        try:
            if was_enabled:
                _off_in = threading.get_ident()
                disable()
            return function(*args, **kwargs)
        finally:
            try:
                # Not after a run, which begins to count again.
                if count is not None and before is not None and count.value > before:
                    count.value = before
            finally:
                if was_enabled:
                    enable()
                    _off_in = None

    return call


class Listener(Protocol):
    """What can listen to collections."""

    def note(self, phase: str, generation: int) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""


def listen_to_collections(listener: Listener) -> Callable[[str, Mapping[str, int]], None]:
    """Let an object listen while it lives; return what :func:`listen_no_longer` ends."""
    weak = weakref.ref(listener)

    def callback(phase: str, info: Mapping[str, int]) -> None:
        live_listener = weak()
        if live_listener is not None:
            live_listener.note(phase, info["generation"])
        elif callback in gc.callbacks:  # an exception has ended the region
            gc.callbacks.remove(callback)

    gc.callbacks.append(callback)
    return callback


def listen_no_longer(callback: Callable[[str, Mapping[str, int]], None]) -> None:
    """Undo :func:`listen_to_collections`."""
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)


def without_collections(function: Callable[[], T]) -> T:
    """Call a function while the garbage collector does not run by itself."""
    return not_counted(function)() if isenabled() else function()


def repair() -> None:
    """Enable the collector if an exception has kept :func:`not_counted` in this thread from it.

    Not to be called inside such a function.
    """
    global _off_in
    if _off_in == threading.get_ident():
        _off_in = None
        enable()


class Generations:
    """The objects of the types that `kinds` returns; it may return more types later.

    If the oldest generation was seen without an object of these types, and a list created then is
    still young, no object has been promoted since (in the versions of CPython that promote both
    young generations together). So all objects of these types are young, unless ``gc.unfreeze()``
    has made frozen objects old.
    """

    def __init__(self, kinds: Callable[[], set[type]]) -> None:
        self._kinds = kinds
        self._witness: list[Any] | None = None
        """Created when the oldest generation was seen to contain no such object."""
        self._had_frozen = False
        """Whether objects were frozen then."""

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
        self._had_frozen = none and has_frozen()

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
        if self._had_frozen and _has(2, sys):  # older than any call of gc.freeze()
            return False
        return _has(1, self._witness) or _has(0, self._witness)


def _objects(generation: int) -> Iterator[Any]:
    """Return an iterator that lists the objects of a generation when it is first asked."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


def _has(generation: int, item: object) -> bool:
    """Whether an object is in a generation."""
    return sum(map(partial(operator.is_, item), _objects(generation))) > 0


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


def _any(objects: Iterator[Any]) -> bool:
    return next((True for _ in objects), False)
