"""The table of clean programs.

Each is a generator: what stands before its first ``yield`` runs before the region, every further
``yield`` is the end of a batch. Its locals made before the region outlive it: a model, an optimizer
with its state, a list that results went to.
"""

from collections.abc import Callable, Generator
from typing import Any

Running = Generator[None, None, None]
Program = Callable[[], Running]
Table = list[Program]
BATCHES = 9


def clean(table: Table) -> Callable[[Program], Program]:
    """Enter the decorated generator into `table`."""

    def enter(program: Program) -> Program:
        table.append(program)
        return program

    return enter


def made_so_far(running: Running | None) -> list[Any]:
    """The locals of a suspended program, and of the one it has delegated to."""
    found: list[Any] = []
    while running is not None:
        found += dict(running.gi_frame.f_locals).values()
        running = running.gi_yieldfrom  # type: ignore[assignment]
    return found
