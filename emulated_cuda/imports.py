"""Call functions before and after the import of a module, by any code."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_before: dict[str, list[Callable[[], None]]] = defaultdict(list)
_after: dict[str, list[Callable[[], None]]] = defaultdict(list)


def call_before(module: str, function: Callable[[], None]) -> None:
    """Call `function` as soon as the program begins to import a module; not if it already has."""
    if module not in sys.modules:
        _before[module].append(function)
        _watch(module)


def call_after(module: str, function: Callable[[], None]) -> None:
    """Call `function` now, or as soon as the program has imported a module."""
    if module in sys.modules:
        function()
    else:
        _after[module].append(function)
        _watch(module)


def _watch(module: str) -> None:
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    if not any(finder.module == module for finder in finders):
        sys.meta_path.insert(0, _Finder(module))


class _Finder(MetaPathFinder):
    """Finds a module as the other finders do, and calls the functions around its import."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = _spec_by_others(self, name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        create, execute = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            _call_all(_before[name])  # here the module is not in sys.modules yet
            module: ModuleType | None = create(spec)
            return module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _call_all(_after[name])

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
