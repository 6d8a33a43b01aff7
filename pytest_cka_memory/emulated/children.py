"""Load the emulated device also in processes that ``multiprocessing`` spawns.

A spawned process starts with no library of its parent. The first thing that it reads is a
dictionary of preparation data; an object in it loads the emulated device while it is unpickled,
before the child imports the main module and torch. Forked processes need nothing. A process that
``subprocess`` starts has to call :func:`pytest_cka_memory.emulated.loading.load` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

_KEY = "pytest_cka_memory_emulated"


class _CallWhenUnpickled:
    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self._call


def call_in_children(function: Callable[..., None], *arguments: Any) -> None:
    """Have processes that are spawned from now on call a function of a module when they start."""
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {_KEY: _CallWhenUnpickled(function, *arguments), **original(name)}

    spawn.get_preparation_data = get_preparation_data
