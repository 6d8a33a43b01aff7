"""The names of fixtures in reports, beside the names of tests."""

import re

_FIXTURE = re.compile(r"::[^:]+ \((?:class|module|package|session) fixture\)")


def fixture_nodeid(place: str, name: str, scope: str) -> str:
    """Return ``tests/conftest.py::model (session fixture)``."""
    return f"{place}::{name} ({scope} fixture)"


def is_fixture(nodeid: str) -> bool:
    """Whether it names a fixture, which is not collected as a test is."""
    return bool(_FIXTURE.search(nodeid)) and nodeid.endswith(" fixture)")
