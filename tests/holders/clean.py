"""The table of clean programs, which retain nothing.

Each is a generator. The code before its first ``yield`` runs before the region, and every further
``yield`` is the end of a batch. Locals that are assigned before the region outlive it: a model, an
optimizer with its state, a list of results.
"""

from collections.abc import Callable, Generator
from typing import Any

Running = Generator[None, None, None]
Program = Callable[[], Running]
Table = list[Program]
BATCHES = 9


def clean(table: Table) -> Callable[[Program], Program]:
    """Add the decorated generator to `table`."""

    def add(program: Program) -> Program:
        table.append(program)
        return program

    return add


def locals_of(running: Running | None) -> list[Any]:
    """Return the locals of a suspended program and of the generators that it delegates to."""
    found: list[Any] = []
    while running is not None:
        found += dict(running.gi_frame.f_locals).values()
        running = running.gi_yieldfrom  # type: ignore[assignment]
    return found
