"""Fast garbage collections and searches for the tests that search for references."""

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_cka_memory.holders import Root, globals_of, growing, proof, survivors
from pytest_cka_memory.holders.search import RulesForType, SearchResult, search

_FOLDER = Path(__file__).parent
_OTHER_TESTS = (str(_FOLDER.parent), str(_FOLDER.parents[1] / "benchmarks"))
_PACKAGES = ("torch", "torchgen", "numpy", "pytest", "_pytest", "pluggy", "cka", "emulated_cuda")
"""Packages whose names a search here begins with, beside Python's own and the plugin."""


@pytest.fixture(autouse=True, scope="module")
def _fast_collections(imports_excluded_from_collection: None) -> None:
    """Apply to every test of this folder."""


@pytest.fixture(autouse=True, scope="module")
def _fast_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out of searches what this session has of the ten thousand tests of other folders.

    They take longer than all that a search here is about: the tests themselves, with all their
    parameters, their modules, and the packages that these have imported.
    """

    def search_here(
        rules: RulesForType,
        wanted: Collection[int],
        roots: Collection[Root],
        late_roots: Collection[Root],
        avoided: Iterable[Any] = (),
        on_progress: Callable[[], None] = lambda: None,
    ) -> SearchResult:
        used, used_late = ([*filter(_is_used, each)] for each in (roots, late_roots))
        left_out = [*avoided, request.session.items]
        return search(rules, wanted, used, used_late, left_out, on_progress)

    with pytest.MonkeyPatch.context() as patch:
        for module in (growing, proof, survivors):
            patch.setattr(module, "search", search_here)
        yield


def _is_used(root: Root) -> bool:
    """Whether names are not those of a module that only tests of other folders use."""
    module = sys.modules.get(root.prefix.removesuffix("."))
    if not issubclass(type(module), ModuleType):  # the locals of a frame
        return True
    top = root.prefix.partition(".")[0]
    if top in sys.stdlib_module_names or top in _PACKAGES or top.startswith("pytest_cka_memory"):
        return True
    file = globals_of(module).get("__file__") or ""  # without loading a module that is lazy
    return not root.is_library and not _is_of_other_tests(file)


@functools.cache  # each search asks for all modules
def _is_of_other_tests(file: str) -> bool:
    return file.startswith(_OTHER_TESTS) and not Path(file).is_relative_to(_FOLDER)
