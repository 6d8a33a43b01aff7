"""Emulates the device in processes that ``multiprocessing`` spawns, too.

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


class _LoadsWhenUnpickled:
    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _load, self._arguments


def _load(*arguments: Any) -> None:
    from pytest_cka_memory.emulated import loading

    loading.load(*arguments)


def emulate_in_children(*arguments: Any) -> None:
    """Have processes that are spawned from now on call ``loading.load`` with these arguments."""
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {_KEY: _LoadsWhenUnpickled(*arguments), **original(name)}

    spawn.get_preparation_data = get_preparation_data
