"""The temporary folder of one ``python -m emulated_cuda``, and those that killed ones have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "emulated-cuda-records-"
_UNLOCKED = "emulated-cuda-new-"


@contextmanager
def new() -> Iterator[Path]:
    """Make a folder, and remove it at the end.

    What was left by processes that were killed is removed too. A folder is in use as long as its
    lock is held, which the system releases when the process ends in any way.
    """
    remove_stale()
    # It gets the name that others look for when it is locked.
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(made.with_name(made.name.replace(_UNLOCKED, _PREFIX)))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale() -> None:
    """Remove the folders of this user that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is locked or gone, or not of this user
            _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
