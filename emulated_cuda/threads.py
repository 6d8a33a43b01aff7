"""Threads of this process by their names, also those that Python did not start."""

from __future__ import annotations

from pathlib import Path

_THREADS = Path("/proc/self/task")


def may_exist(prefix: str) -> bool:
    """Whether a thread has a name that starts so; True if the system does not list threads."""
    if not _THREADS.is_dir():
        return True
    return any(_name(thread).startswith(prefix) for thread in _THREADS.iterdir())


def _name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text("utf-8", errors="replace")
    except OSError:  # the thread has ended meanwhile
        return ""
