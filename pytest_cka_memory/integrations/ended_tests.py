"""A plugin for ``pytest -p``: write how tests ended, and the largest sizes that they have found.

``python -m pytest_cka_memory cards`` starts sessions with it. The file is named by the environment
variable :data:`VARIABLE`.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_cka_memory.integrations import is_worker
from pytest_cka_memory.reports.tables import LARGEST_PROPERTY

VARIABLE = "PYTEST_CKA_MEMORY_ENDED_TESTS"


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path and not is_worker(config):
        config.pluginmanager.register(EndedTests(Path(path)))


class Ended(NamedTuple):
    """What is known of the tests of a session, by node ID."""

    messages: dict[str, tuple[str, str]]
    """Outcome and message of tests that failed or were skipped."""
    largest: dict[str, list[int]]
    """What ``cka_memory.largest`` has returned, of tests that called it."""


class EndedTests:
    """Collects how the tests of a session ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended: dict[str, tuple[str, str]] = {}
        self._largest: dict[str, list[int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The properties of the last phase include those of the phases before.
        sizes = [value for name, value in report.user_properties if name == LARGEST_PROPERTY]
        if sizes:
            self._largest[report.nodeid] = [int(str(size)) for size in sizes]
        if report.passed or report.nodeid in self._ended:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        message = crash.message if crash is not None else text
        self._ended[report.nodeid] = report.outcome, message

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps([self._ended, self._largest]), encoding="utf-8")


def read(path: Path) -> Ended:
    """Return what such a file says."""
    ended, largest = json.loads(path.read_text(encoding="utf-8"))
    return Ended({test: tuple(both) for test, both in ended.items()}, largest)
