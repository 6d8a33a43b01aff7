"""Run pytest on the CPU meter in a new process, so that faults do not affect this session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_processes
import pytest

OPTIONS = (
    "-p", "cka_memory", "-p", "no:cacheprovider", "--cka-memory-report", "--cka-memory-device=cpu",
    "--cka-memory-json=r.json",
)  # fmt: skip


@dataclass(frozen=True)
class Session:
    """The result of an inner pytest session."""

    status: int
    text: str
    regions: list[dict[str, Any]]
    missing: list[str]

    def regions_of(self, test: str) -> list[dict[str, Any]]:
        """Return the regions of a test, with any parameters."""
        named = ((region["nodeid"].partition("[")[0], region) for region in self.regions)
        return [region for name, region in named if name.endswith(f"::{test}")]


Run = Callable[..., Session]


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a test file, given as text or as a path, with this plugin and those in the options.

    In a new interpreter, or in a process that has imported torch already (``forked=True``).
    """

    def run(tests: str | Path, *options: str, forked: bool = False) -> Session:
        folder = tmp_path_factory.mktemp("faulty")
        if isinstance(tests, str):
            (folder / "test_it.py").write_text(tests, encoding="utf-8")
            tests = folder / "test_it.py"
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100"}
        for name in ("PYTEST_ADDOPTS", "CI", "GITHUB_ACTIONS"):
            environment.pop(name, None)
        words = [
            "pytest", str(tests), "--rootdir", str(tests.parent), "--confcutdir", str(folder),
            *OPTIONS, *options,
        ]  # fmt: skip
        if forked:
            done = forked_processes.run(words, folder=folder, environment=environment)
        else:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=folder, env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
        text = done.stdout + done.stderr
        file = folder / "r.json"
        report = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return Session(done.returncode, text, report.get("regions", []), report.get("missing", []))

    return run
