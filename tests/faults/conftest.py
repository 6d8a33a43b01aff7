"""Inner sessions on the CPU's own meter, each a process of its own: faults must not reach ours."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "-p", "cka_memory", "-p", "no:cacheprovider", "--cka-memory-report", "--cka-memory-device=cpu",
    "--cka-memory-json=r.json",
)  # fmt: skip


@dataclass(frozen=True)
class Session:
    """An inner session that has ended."""

    status: int
    text: str
    regions: list[dict[str, Any]]
    missing: list[str]

    def of(self, test: str) -> list[dict[str, Any]]:
        """The regions of the test of that name, whatever its parameters."""
        named = ((region["nodeid"].partition("[")[0], region) for region in self.regions)
        return [region for name, region in named if name.endswith(f"::{test}")]


Run = Callable[..., Session]


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a file of tests, given as text or as a path, with no plugin but ours and those named."""

    def run(tests: str | Path, *options: str, **how: Any) -> Session:
        folder = tmp_path_factory.mktemp("faulty")
        if isinstance(tests, str):
            (folder / "test_it.py").write_text(tests, encoding="utf-8")
            tests = folder / "test_it.py"
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100"}
        for name in ("PYTEST_ADDOPTS", "CI", "GITHUB_ACTIONS"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", str(tests), "--rootdir", str(tests.parent),
             "--confcutdir", str(folder), *OPTIONS, *options],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, **how,
        )  # fmt: skip
        text = done.stdout + done.stderr
        file = folder / "r.json"
        report = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return Session(done.returncode, text, report.get("regions", []), report.get("missing", []))

    return run
