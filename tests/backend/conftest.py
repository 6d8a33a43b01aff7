"""Run sessions in which torch finds the accelerator ``hostdevice``; it is compiled once.

``tests/gpu`` tests the meter's figures on torch's CUDA allocator. ``hostdevice`` adds what the
emulated CUDA device cannot show: a backend from outside torch, which has a name of its own and an
allocator without a history, and in whose process a backward pass on the CPU can run after a fork.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_processes
import pytest

HERE = Path(__file__).parent
# Not HERE, which pytest adds to the path: torch would find the device in every test's process.
INSTALLABLE = HERE / "installable"
BUILD = "import hostdevice; print(hostdevice.build())"
NEUTRAL = [f"-pno:{name}" for name in ("cacheprovider", "randomly", "rerunfailures")]
"""Without plugins that write files here, shuffle, or keep the last failure and so its tensors."""
INSTALLED = """
from importlib.metadata import entry_points

for entry in entry_points(group="torch.backends"):
    entry.load()()
"""
"""A plugin that does what torch does when it is imported, for a process that has imported it."""


@dataclass(frozen=True)
class Session:
    """An inner session that has ended."""

    code: int
    text: str
    report: dict[str, Any]
    """Its JSON report; empty if it wrote none."""

    def of(self, test: str) -> dict[str, Any]:
        """Return the only region of the test of this name."""
        (region,) = [r for r in self.report["regions"] if r["nodeid"].endswith(f"::{test}")]
        return region


@pytest.fixture(scope="session")
def builder_environment() -> dict[str, str]:
    """Return the environment of a process that compiles; skip if there is no compiler."""
    beside_python = str(Path(sys.executable).parent)  # where pip puts ninja
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"requires {tool} to compile C++ code")
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for name in ("PYTEST_ADDOPTS", "CI"):
        environment.pop(name, None)
    return environment


@pytest.fixture(scope="session")
def device_environment(builder_environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process in which torch loads the device."""
    path = os.pathsep.join([str(INSTALLABLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**builder_environment, "PYTHONPATH": path}
    built = forked_processes.run(
        ["python", "-c", BUILD],
        environment={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert built.returncode == 0, built.stderr
    return {**environment, "HOSTDEVICE_LIBRARY": built.stdout.splitlines()[-1]}


Run = Callable[..., Session]


@pytest.fixture(scope="session")
def on_device(device_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a test file's text with ``hostdevice`` as the accelerator.

    In a process that has imported torch already, or in a new interpreter (``forked=False``).
    """

    def run(tests: str, *options: str, forked: bool = True, **variables: str) -> Session:
        folder = tmp_path_factory.mktemp("session")
        (folder / "test_it.py").write_text(tests, encoding="utf-8")
        json_file = folder / "r.json"
        options = (*NEUTRAL, f"--cka-memory-json={json_file}", "test_it.py", *options)
        environment = {**device_environment, **variables}
        if forked:
            (folder / "installed.py").write_text(INSTALLED, encoding="utf-8")
            environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
            done = forked_processes.run(
                ["pytest", "-pinstalled", *options], folder=folder, environment=environment
            )
        else:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        report = json.loads(json_file.read_text("utf-8")) if json_file.exists() else {}
        return Session(done.returncode, done.stdout + done.stderr, report)

    return run
