"""Replace functions of modules and classes, and restore them without harm to other patches.

Whatever a region has changed in the process ends with the last object that uses it, also if an
exception of a signal handler comes at any line. Such an exception may also come in a callback of
the garbage collector, where Python drops it: :func:`collection_callbacks` raises it again.
"""

import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from _thread import interrupt_main, start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_Collection = Callable[[str, Mapping[str, int]], None]
"""What ``gc.callbacks`` takes: called with the phase and facts of a collection."""
_MOMENT_SECONDS = 0.001


class Users:
    """Objects that use something, held weakly: one that was freed no longer uses it.

    So nothing stays on for ever if an exception, which a signal handler may raise at any line,
    keeps an object from ending its use. Each change is one assignment, which is done or not.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[object], int]] = []
        """With the number of the thread that added it."""

    def __bool__(self) -> bool:
        if not self._known:  # mostly, and asked for several times in each region
            return False
        return any(user() is not None for user, _ in self._known)

    def add(self, user: object) -> None:
        """Add `user`, also if it is known already."""
        live = [known for known in self._known if known[0]() is not None] if self._known else []
        self._known = [*live, (weakref.ref(user), threading.get_ident())]

    def remove(self, user: object) -> None:
        """Undo the last :meth:`add` of `user`; do nothing if there was none."""
        for index in reversed(range(len(known := self._known))):
            if known[index][0]() is user:
                self._known = [*known[:index], *known[index + 1 :]]
                return

    def in_this_thread(self) -> bool:
        """Whether this thread has added one that is still there."""
        thread = threading.get_ident()
        return any(added_by == thread and user() is not None for user, added_by in self._known)


class Locking:
    """Base class of objects with a lock, which a forked child process replaces by a free one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _with_locks.add(self)

    def replace_lock(self) -> None:
        """Take a free lock."""
        self._lock = threading.RLock()


_with_locks: weakref.WeakSet[Locking] = weakref.WeakSet()


def _replace_locks() -> None:
    for owner in list(_with_locks):
        owner.replace_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_replace_locks)


class Undoable(Protocol):
    """A change that can be undone at any time: before it is applied, half applied, or twice."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> bool:
        """Undo the change; return False if that has to wait."""


class Patch:
    """A replacement of an attribute of a module or class.

    It is created before it is applied, so that it can be undone even if an exception of a signal
    handler comes in between.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.owner, self.name, self.function = owner, name, function
        self.attributes = vars(owner)
        self.before = self.attributes.get(name)  # None if the attribute is inherited

    def fits(self) -> bool:
        """Whether the attribute is what it was when this was created, so that it can be applied."""
        return self.attributes.get(self.name) is self.before

    def apply(self) -> None:
        """Replace the attribute."""
        setattr(self.owner, self.name, self.function)

    def undo(self) -> bool:
        """Restore the attribute; return whether that was possible.

        If other code has patched the attribute since, its patch has to be undone first.
        """
        current = self.attributes.get(self.name)
        if current is self.before:  # it was never applied, or undone without this returning
            return True
        if current is not self.function:
            return False
        if self.before is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)
        return True


class PatchGroup:
    """Patches that are applied together, in the third of the time that one by one takes.

    Half applied or undone, it can be undone again, as each of its patches.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = patches

    def fits(self) -> bool:
        """Whether each attribute is what it was when its patch was created."""
        return not [it for it in self.patches if it.attributes.get(it.name) is not it.before]

    def apply(self) -> None:
        """Replace the attributes."""
        for patch in self.patches:  # here and below: a call for each would take longer
            setattr(patch.owner, patch.name, patch.function)

    def undo(self) -> bool:
        """Restore the attributes; return whether that was possible for all of them."""
        are_undone = True
        for patch in self.patches:
            if patch.attributes.get(patch.name) is not patch.function:
                are_undone &= patch.undo()
            elif patch.before is None:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)
        return are_undone


class SharedPatches(Locking, ABC):
    """Patches that are applied while any object uses them.

    An exception at any line leaves at most what the next start or stop repairs.
    """

    def __init__(self) -> None:
        super().__init__()
        _all[:] = [*(known for known in _all if known() is not None), weakref.ref(self)]
        self._users = Users()
        self.applied: list[Undoable] = []
        """Those that are not undone yet, for example because a user's own patch hides them."""
        self._are_complete = False
        """Whether all are applied; False if applying them was interrupted."""
        self._last: dict[tuple[Any, str], Patch] = {}
        """The last patch of each function, to be applied again: a new one takes ten times as long.
        """

    def patch(self, owner: Any, name: str, wrapper: Callable[..., Callable[..., Any]]) -> Patch:
        """Return a patch of an attribute by what `wrapper` returns for it; the last if it fits."""
        patch = self._last.get((owner, name))
        if patch is None or not patch.fits():
            patch = self._last[owner, name] = Patch(owner, name, wrapper(getattr(owner, name)))
        return patch

    @abstractmethod
    def make_patches(self) -> Iterable[Undoable]:
        """Return the patches; each is applied before the next one is made."""

    def start(self, user: object) -> None:
        """Apply the patches until `user` stops them or is freed."""
        if not self._users:
            left = [it for known in _all if (it := known()) is not None and it.applied]
            for shared in left * 2:  # one that interrupted calls have left may hide another
                shared.undo_if_unused()
        with self._lock:
            if not (self._are_complete and self._users):
                self.undo_patches()
                self._apply()
                self._are_complete = True
            self._users.add(user)

    def stop(self, user: object) -> None:
        """Undo what `user` has started; do nothing if it has started nothing."""
        with self._lock:
            self._users.remove(user)
            if not self._users:
                self.undo_patches()

    def undo_if_unused(self) -> None:
        """Undo what is left of users that were freed without stopping."""
        with self._lock:
            if not self._users:
                self.undo_patches()

    def _apply(self) -> None:
        for patch in self.make_patches():
            self.applied.append(patch)
            patch.apply()

    def undo_patches(self) -> None:
        """Undo what was applied, as far as other code does not hide it; the lock is held."""
        self._are_complete = False
        newest_first = self.applied[::-1]
        self.applied = [patch for patch in newest_first if not patch.undo()][::-1]


class JoinedPatches(SharedPatches):
    """Several that are only used together: to start them takes little longer than to start one."""

    def __init__(self, *parts: SharedPatches) -> None:
        super().__init__()
        self._parts = parts

    def make_patches(self) -> Iterator[Undoable]:
        for part in self._parts:
            yield from part.make_patches()


_all: list[weakref.ref[SharedPatches]] = []


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Replace an attribute by `function`; return a function that restores it, as `Patch.undo`."""
    patch = Patch(owner, name, function)
    patch.apply()
    return patch.undo


class CollectionCallback(Undoable):
    """A callback of the garbage collector."""

    def __init__(self, callback: _Collection) -> None:
        self._callback = callback

    def apply(self) -> None:
        gc.callbacks.append(self._callback)

    def undo(self) -> bool:
        if self._callback in gc.callbacks:  # a test may clear or restore the list
            gc.callbacks.remove(self._callback)
        return True


def collection_callbacks(on_collection: _Collection) -> Iterator[Undoable]:
    """Call `on_collection` as ``gc.callbacks`` describes; signals' exceptions in it are raised."""
    yield Patch(sys, "unraisablehook", hook_for(on_collection))
    yield CollectionCallback(on_collection)


def hook_for(callback: object) -> "Callable[[UnraisableHookArgs], Any]":
    """Return a ``sys.unraisablehook`` that raises a signal's exception from `callback` again.

    Ctrl-C and a timeout's alarm raise in the code that the main thread runs at that time. If that
    is a callback of the garbage collector, Python passes the exception to ``sys.unraisablehook``
    and continues, so a test that hangs would never end. Other exceptions go to the hook that is
    installed now.
    """
    before = sys.unraisablehook

    def hook(dropped: "UnraisableHookArgs") -> None:
        error = dropped.exc_value
        # Raised again, it may be dropped in another library's callback of the same collection.
        if error is not None and (
            (_came_from(callback, dropped) and _was_signalled(error)) or _ran(error, [_deliver])
        ):
            _raise_later(error)
        else:
            before(dropped)

    return hook


def _came_from(callback: object, dropped: "UnraisableHookArgs") -> bool:
    """Whether Python called `callback`; since 3.14, only the message names a collector callback."""
    if dropped.object is not None or not dropped.err_msg:
        return dropped.object == callback
    return dropped.err_msg.endswith(f"GC callback {callback!r}")


def _was_signalled(error: BaseException) -> bool:
    """Whether a signal handler raised it; handlers run in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [_deliver, *map(signal.getsignal, signal.valid_signals())]
    return isinstance(error, KeyboardInterrupt) or _ran(error, handlers)


def _ran(error: BaseException, handlers: Iterable[Any]) -> bool:
    """Whether one of `handlers` raised `error`."""
    run = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code_of(handler) in run for handler in handlers)


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def _raise_later(error: BaseException) -> None:
    """Raise `error` in the main thread by means of a SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, functools.partial(_deliver, error, before))
    start_new_thread(_interrupt, ())  # Thread.start waits, and tests patch it


def _deliver(error: BaseException, before: Any, _signal: int, _frame: object) -> None:
    signal.signal(signal.SIGINT, before)
    raise error.with_traceback(None)


def _interrupt() -> None:
    time.sleep(_MOMENT_SECONDS)  # otherwise it may be raised in the same callback
    interrupt_main()
