"""Call functions before and after the import of torch, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_before: list[Callable[[], None]] = []
_after: list[Callable[[], None]] = []


def call_before(function: Callable[[], None]) -> None:
    """Call `function` as soon as the program begins to import torch; not if it already has."""
    if "torch" not in sys.modules:
        _before.append(function)
        _watch()


def call_after(function: Callable[[], None]) -> None:
    """Call `function` now, or as soon as the program has imported torch."""
    if "torch" in sys.modules:
        function()
    else:
        _after.append(function)
        _watch()


def _watch() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch as the other finders do, and calls the functions around its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = _spec_by_others(self, name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        create, execute = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            _call_all(_before)  # here torch is not in sys.modules yet
            module: ModuleType | None = create(spec)
            return module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _call_all(_after)

        loader.create_module, loader.exec_module = create_module, exec_module
        return spec


def _spec_by_others(
    this: MetaPathFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not this and find is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None


def _call_all(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop(0)()
