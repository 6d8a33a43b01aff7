"""A plugin for ``pytest -p``: write which tests failed or were skipped, and their messages.

``python -m pytest_cka_memory cards`` starts sessions with it. The file is named by the environment
variable :data:`VARIABLE`.
"""

import json
import os
from pathlib import Path

import pytest

from pytest_cka_memory.integrations import xdist

VARIABLE = "PYTEST_CKA_MEMORY_ENDED_TESTS"


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path and not xdist.is_worker(config):
        config.pluginmanager.register(EndedTests(Path(path)))


class EndedTests:
    """Collects the tests of a session that did not pass."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed or report.nodeid in self._ended:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        message = crash.message if crash is not None else text
        self._ended[report.nodeid] = report.outcome, message

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._ended), encoding="utf-8")


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Return test -> outcome and message from such a file."""
    ended = json.loads(path.read_text(encoding="utf-8"))
    return {test: (outcome, message) for test, (outcome, message) in ended.items()}
