"""The API reference of the site has every public name, and every public name has a docstring."""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from docs_pages import ROOT

import cka.errors
import emulated_cuda.errors
import pytest_cka_memory.errors
from pytest_cka_memory import hookspecs, limits
from pytest_cka_memory.core.markers import MARKERS

API = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.rst"))
DOCUMENTED = set(re.findall(r"^\.\. (?:auto\w+|data):: ([\w.]+)$", API, re.MULTILINE))
PACKAGES = (pytest_cka_memory, emulated_cuda, cka)


def exported(package: ModuleType) -> dict[str, Any]:
    """Public names of a package, with the exceptions that its functions may raise."""
    found = {f"{package.__name__}.{name}": getattr(package, name) for name in package.__all__}
    exported = set(map(id, found.values()))
    for name, value in vars(package.errors).items():
        is_own = inspect.isclass(value) and value.__module__ == package.errors.__name__
        if is_own and id(value) not in exported:
            found[f"{package.__name__}.errors.{name}"] = value
    return found


def for_plugins() -> dict[str, Any]:
    """Names for authors of plugins: hooks, and the function that builds each marker's limit."""
    hooks = {
        f"{hookspecs.__name__}.{name}": value
        for name, value in vars(hookspecs).items()
        if name.startswith("pytest_cka_memory_")
    }
    builders = {f"{limits.__name__}.{name}": getattr(limits, name, None) for name in MARKERS}
    return hooks | {name: value for name, value in builders.items() if value is not None}


NAMES = {name: value for package in PACKAGES for name, value in exported(package).items()}
NAMES |= for_plugins()


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines itself."""
    if inspect.isclass(value):
        for name, member in vars(value).items():
            is_code = inspect.isfunction(member) or isinstance(
                member, (property, classmethod, staticmethod)
            )
            if not name.startswith("_") and is_code:
                yield name, member


def test_api_reference_has_every_public_name() -> None:
    """Each public name, exception and hook has an entry in docs/api."""
    assert len(NAMES) > 50
    assert sorted(set(NAMES) - DOCUMENTED) == []


def test_api_reference_names_exist() -> None:
    """Each entry of docs/api is a name that can be imported, or Sphinx would not find it."""
    prefixes = tuple(f"{package.__name__}." for package in PACKAGES)
    assert [name for name in DOCUMENTED if not name.startswith(prefixes)] == []


@pytest.mark.parametrize("name", sorted(NAMES))
def test_public_name_and_its_members_have_docstrings(name: str) -> None:
    """A public class or function, and each method and property of a class, has a docstring."""
    value = NAMES[name]
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return  # a constant: docs/api describes it
    assert inspect.getdoc(value), name
    assert [member for member, code in members(value) if not inspect.getdoc(code)] == []
