"""Name the package or plugin that stores an object, if it is not the user's own code."""

import sys
from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any

from pytest_cka_memory.core.libraries import is_of_package
from pytest_cka_memory.holders.tree import Reference

_NOT_KEEPERS = frozenset(
    {"_pytest", "pytest", "pluggy", "torch", "numpy", "pytest_cka_memory", "emulated_cuda"}
)


def keeper_of(path: Sequence[Reference]) -> str | None:
    """Return who stores the exception on a path of references; None if it is the user's own code.

    That is a package that was installed, by a global or an object of one of its classes, or an
    attribute of a test item, which only plugins of pytest set. What the frames of the traceback
    reference does not count, because it did not store the exception.
    """
    root = path[0].root
    modules = [] if root is None else [root.prefix.rstrip(".")]
    storing = _before_exception(path)
    modules += [str(_module_of(step.value)) for step in storing]
    for name in modules:
        package = name.partition(".")[0]
        if package not in _NOT_KEEPERS and _is_installed(package):
            return f"the package {package}"
    for number, step in enumerate(storing):
        if _is_test_item(step.value):
            return f"a plugin that sets {_attribute(step.value, path[number + 1 :])} of a test"
    return None


def _before_exception(path: Sequence[Reference]) -> Sequence[Reference]:
    """Return the steps before the first exception or traceback; all if there is none."""
    kinds = (BaseException, TracebackType)
    return list(takewhile(lambda step: not issubclass(type(step.value), kinds), path))


def _module_of(value: Any) -> Any:
    return type.__dict__["__module__"].__get__(type(value))


def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return isinstance(file, str) and is_of_package(file)


def _is_test_item(value: Any) -> bool:
    pytest = sys.modules.get("pytest")  # not imported outside of its sessions
    return pytest is not None and issubclass(type(value), pytest.Item)


def _attribute(item: Any, path: Sequence[Reference]) -> str:
    """Return the attribute of `item` with which the rest of the path begins."""
    values = {id(found.value) for found in path[:2]}  # the first may be its __dict__
    names = [name for name, value in vars(item).items() if id(value) in values]
    return f"the attribute {names[0]}" if names else "an attribute"
