"""The objects for which something is started, so that it ends with the last of them."""

import threading
import weakref


class Users:
    """Objects that use something, held weakly: one that was freed no longer uses it.

    So nothing stays on for ever if an exception, which a signal handler may raise at any line,
    keeps an object from ending its use. Each change is one assignment, which is done or not.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[object], int]] = []
        """With the number of the thread that added it."""

    def __bool__(self) -> bool:
        return any(user() is not None for user, _ in self._known)

    def add(self, user: object) -> None:
        """Add `user`, also if it is known already."""
        live = [known for known in self._known if known[0]() is not None]
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
