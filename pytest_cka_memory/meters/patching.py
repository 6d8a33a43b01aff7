"""Replace attributes of modules and classes, and restore them without harm to other patches."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from pytest_cka_memory.meters.child_locks import Locking
from pytest_cka_memory.meters.users import Users


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
        self._owner, self._name, self.function = owner, name, function
        self._before = vars(owner).get(name)  # None if the attribute is inherited

    def fits(self) -> bool:
        """Whether the attribute is what it was when this was created, so that it can be applied."""
        return vars(self._owner).get(self._name) is self._before

    def apply(self) -> None:
        """Replace the attribute."""
        setattr(self._owner, self._name, self.function)

    def undo(self) -> bool:
        """Restore the attribute; return whether that was possible.

        If other code has patched the attribute since, its patch has to be undone first.
        """
        current = vars(self._owner).get(self._name)
        if current is self._before:  # it was never applied, or undone without this returning
            return True
        if current is not self.function:
            return False
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        return True


class SharedPatches(Locking, ABC):
    """Patches that are applied while any object uses them.

    An exception at any line leaves at most what the next start or stop repairs.
    """

    kind: type[Patch] = Patch
    """What :meth:`patch` makes."""

    def __init__(self) -> None:
        super().__init__()
        _all.add(self)
        self._users = Users()
        self._patches: list[Undoable] = []
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
            patch = self._last[owner, name] = self.kind(owner, name, wrapper(getattr(owner, name)))
        return patch

    @abstractmethod
    def make_patches(self) -> Iterable[Undoable]:
        """Return the patches; each is applied before the next one is made."""

    def start(self, user: object) -> None:
        """Apply the patches until `user` stops them or is freed."""
        if not self._users:
            left = [shared for shared in _all if shared.has_patches()]
            for shared in left * 2:  # one that interrupted calls have left may hide another
                shared.undo_if_unused()
        with self._lock:
            if not (self._users and self._are_complete):
                self._undo()
                self._apply()
                self._are_complete = True
            self._users.add(user)

    def stop(self, user: object) -> None:
        """Undo what `user` has started; do nothing if it has started nothing."""
        with self._lock:
            self._users.remove(user)
            if not self._users:
                self._undo()

    def has_patches(self) -> bool:
        """Whether any patch is not undone yet."""
        return bool(self._patches)

    def undo_if_unused(self) -> None:
        """Undo what is left of users that were freed without stopping."""
        with self._lock:
            if not self._users:
                self._undo()

    def _apply(self) -> None:
        for patch in self.make_patches():
            self._patches.append(patch)
            patch.apply()

    def _undo(self) -> None:
        self._are_complete = False
        newest_first = self._patches[::-1]
        self._patches = [patch for patch in newest_first if not patch.undo()][::-1]


class JoinedPatches(SharedPatches):
    """Several that are only used together: to start them takes little longer than to start one."""

    def __init__(self, *parts: SharedPatches) -> None:
        super().__init__()
        self._parts = parts

    def make_patches(self) -> Iterator[Undoable]:
        for part in self._parts:
            yield from part.make_patches()


_all: weakref.WeakSet[SharedPatches] = weakref.WeakSet()


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Replace an attribute by `function`; return a function that restores it, as `Patch.undo`."""
    patch = Patch(owner, name, function)
    patch.apply()
    return patch.undo
