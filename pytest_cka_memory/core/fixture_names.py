"""The names of fixtures, classes and modules in reports, beside the names of tests."""

import re

_FIXTURE = re.compile(r"::[^:]+ \((?:class|module|package|session) fixture\)")
_SCOPE = re.compile(r"::all tests \((?:class|module) scope\)$")


def fixture_nodeid(place: str, name: str, scope: str) -> str:
    """Return ``tests/conftest.py::model (session fixture)``."""
    return f"{place}::{name} ({scope} fixture)"


def is_fixture(nodeid: str) -> bool:
    """Whether it names a fixture, which is not collected as a test is."""
    return (bool(_FIXTURE.search(nodeid)) and nodeid.endswith(" fixture)")) or is_scope(nodeid)


def scope_nodeid(place: str, scope: str) -> str:
    """Return ``tests/test_model.py::TestModel::all tests (class scope)``."""
    return f"{place}::all tests ({scope} scope)"


def is_scope(nodeid: str) -> bool:
    """Whether it names the region of a whole class or module, whose limits fail its last test."""
    return bool(_SCOPE.search(nodeid))
