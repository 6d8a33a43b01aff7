"""The table of planted leaks: what each retains, who holds it, which line made it."""

import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_cka_memory.core.figures import Holding

KEEP: list[Any] = []
"""What most leaks are kept in; emptied after each."""
CLEANUP = ExitStack()
"""How a leak puts back what else it changed."""
NOBODY = "no Python holder found"


@dataclass(frozen=True)
class Leak:
    """A way of keeping a tensor for too long."""

    plant: Callable[[], None]
    held_by: str
    """Part of the path that must be named; :data:`NOBODY` where there is no path to name."""
    hint: str | None
    bytes: int
    made: str
    """What stands in the line that made it."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    def is_made_by(self, frame: str) -> bool:
        """Whether `frame`, as a report writes it, is the line of :attr:`made` in this leak."""
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
    """Enter the decorated function into `table`."""

    def enter(plant: Callable[[], None]) -> Callable[[], None]:
        table.append(Leak(plant, held_by, hint, size, made))
        return plant

    return enter


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Undo what a leak did."""
    try:
        yield
    finally:
        KEEP.clear()
        CLEANUP.close()


def told(holding: Holding) -> str:
    """All that a report says of who holds it."""
    return f"{holding.held_by} | {holding.hint}"
