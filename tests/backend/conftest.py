"""Run sessions in which torch finds the accelerator ``hostdevice``; it is compiled once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Not HERE, which pytest puts on the path: torch would find the device in every test's process.
INSTALLABLE = HERE / "installable"
BUILD = "import hostdevice; print(hostdevice.build().__file__)"
LONGEST_BUILD_SECONDS = 300
NEUTRAL = [f"-pno:{name}" for name in ("cacheprovider", "randomly", "rerunfailures")]
"""Without what writes here, shuffles, or holds on to the last failure and so to its tensors."""


@dataclass(frozen=True)
class Session:
    """An inner session that has ended."""

    code: int
    text: str
    report: dict[str, Any]
    """Its JSON report; empty where it wrote none."""

    def of(self, test: str) -> dict[str, Any]:
        """The only region of the test of this name."""
        (region,) = [r for r in self.report["regions"] if r["nodeid"].endswith(f"::{test}")]
        return region


@pytest.fixture(scope="session")
def builder_environment() -> dict[str, str]:
    """What a process needs in its environment to compile; skips where that cannot be."""
    beside_python = str(Path(sys.executable).parent)  # where pip puts ninja
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"no {tool}: what these tests need in C++ cannot be compiled")
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for name in ("PYTEST_ADDOPTS", "CI"):
        environment.pop(name, None)
    return environment


@pytest.fixture(scope="session")
def device_environment(builder_environment: dict[str, str]) -> dict[str, str]:
    """What a process needs in its environment for torch to load the device."""
    environment = {**builder_environment, "PYTHONPATH": str(INSTALLABLE)}
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_BUILD_SECONDS,
    )
    assert built.returncode == 0, built.stderr
    return {**environment, "HOSTDEVICE_LIBRARY": built.stdout.splitlines()[-1]}


Run = Callable[..., Session]


@pytest.fixture(scope="session")
def on_device(device_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run tests, given as text or as a path, where the host device is torch's accelerator."""

    def run(tests: str | Path, *options: str, **variables: str) -> Session:
        folder = tmp_path_factory.mktemp("session")
        if isinstance(tests, str):
            (folder / "test_it.py").write_text(tests, encoding="utf-8")
            tests = folder / "test_it.py"
        json_file = folder / "r.json"
        options = (*NEUTRAL, f"--cka-memory-json={json_file}", *options)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", str(tests), *options],
            cwd=ROOT if tests.is_relative_to(ROOT) else folder,
            env={**device_environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        report = json.loads(json_file.read_text("utf-8")) if json_file.exists() else {}
        return Session(done.returncode, done.stdout + done.stderr, report)

    return run
