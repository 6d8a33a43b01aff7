"""A line that says what takes so long, if many storages are to be explained."""

import sys
import time
from collections.abc import Callable

_MANY = 100_000
"""Storages that are explained without a word."""
_AFTER_SECONDS = 2

Write = Callable[[str], None]
"""Shows one line to the user."""


def to_stderr(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Writes one line if the explanation of `count` storages takes more than 2 s.

    Args:
        count: how many storages there are.
        write: shows the line.
    """

    def __init__(self, count: int, write: Write = to_stderr) -> None:
        self._count, self._write = count, write
        self._due_at = time.monotonic() + _AFTER_SECONDS if count > _MANY else None

    def step(self) -> None:
        """Write the line if it is time; called several times in a second."""
        if self._due_at is not None and time.monotonic() >= self._due_at:
            self._due_at = None
            self._write(
                f"cka-memory: finding what holds {self._count:,} tensors; each 100,000 take "
                "1 to 2 s"
            )
