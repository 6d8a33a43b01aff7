"""Call a function as soon as torch is imported; immediately if it already is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def call(function: Callable[[], None]) -> None:
    """Call `function` now, or as soon as the program has imported torch."""
    if "torch" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(function))


class _Finder(MetaPathFinder):
    """Finds torch as usual, and calls a function after its import."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function()

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec
