"""Lets each pytest session search a plugin for its hooks and fixtures only.

Pytest looks at every name of every plugin, twice: for hooks and for fixtures. Nearly all of them
are imports and classes, and to look at them takes a third of a session in a process with pytest
already.
"""

from types import ModuleType

import pytest
from _pytest.fixtures import FixtureFunctionDefinition


def list_hooks_and_fixtures(manager: pytest.PytestPluginManager) -> None:
    """Make `dir` of each module that is a plugin return what pytest uses of it.

    Not of a conftest, nor of a plugin that the tests themselves write.
    """
    for name, plugin in manager.list_name_plugin():
        if isinstance(plugin, ModuleType) and not name.endswith("conftest.py"):
            used = [key for key, value in vars(plugin).items() if _is_used(key, value)]
            plugin.__dir__ = used.copy  # type: ignore[method-assign]


def _is_used(name: str, value: object) -> bool:
    return name.startswith("pytest_") or type(value) is FixtureFunctionDefinition
