"""Locks that are free in a forked child process: the thread that held one does not exist there."""

import os
import threading
import weakref


class Locking:
    """Base class of objects with a lock, which a forked child process replaces by a free one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def replace_lock(self) -> None:
        """Take a free lock."""
        self._lock = threading.RLock()


_all: weakref.WeakSet[Locking] = weakref.WeakSet()


def _replace_locks() -> None:
    for owner in list(_all):
        owner.replace_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_replace_locks)
