"""The table of planted leaks: the bytes that each retains, their holder and their line."""

import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_cka_memory.core.retention import Holding

KEEP: list[Any] = []
"""Where most leaks store their tensor; emptied after each of them."""
CLEANUP = ExitStack()
"""Callbacks that undo what else a leak changed."""
NO_HOLDER = "no Python object was found that keeps this memory alive"


@dataclass(frozen=True)
class Leak:
    """A way to keep a tensor alive for too long."""

    plant: Callable[[], None]
    held_by: str
    """Part of the path that a report must name; :data:`NO_HOLDER` if there is none."""
    hint: str | None
    bytes: int
    made: str
    """Part of the line that allocates the tensor."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    def is_made_by(self, frame: str) -> bool:
        """Return whether `frame`, as written in a report, is the line :attr:`made` of this leak."""
        place, _, _ = frame.partition(" in ")
        file, _, line = place.rpartition(":")
        path = inspect.getsourcefile(self.plant) or ""
        code, first = inspect.getsourcelines(self.plant)
        return (
            path.endswith(file)
            and first <= int(line) < first + len(code)
            and self.made in linecache.getline(path, int(line))
        )


Table = list[Leak]


def leak(
    table: Table,
    held_by: str,
    *,
    hint: str | None = None,
    size: int = 1000,
    made: str = "torch.ones(250)",
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add the decorated function to `table`."""

    def add(plant: Callable[[], None]) -> Callable[[], None]:
        table.append(Leak(plant, held_by, hint, size, made))
        return plant

    return add


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Undo what a leak changed, at the end of the block."""
    try:
        yield
    finally:
        KEEP.clear()
        CLEANUP.close()


def holder_text(holding: Holding) -> str:
    """Return everything that a report says about the holder."""
    return f"{holding.held_by} | {holding.hint}"
