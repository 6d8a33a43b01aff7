"""Tests of the emulated device: each loads it in a process of its own, because it stays loaded."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked_processes
import pytest

ROOT = Path(__file__).parents[2]
_REMOVED = ("PYTORCH_", "TORCH_", "CUDA_", "CUBLAS", "TRITON_", "NUMBA_", "PYTEST_", "CI")


@pytest.fixture(scope="session")
def python(emulation: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in an environment without CUDA settings.

    It is a new interpreter, or a process that has imported torch already (``forked=True``).
    """
    environment = {name: v for name, v in os.environ.items() if not name.startswith(_REMOVED)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def run(*args: str, forked: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        if forked:
            given = {**environment, **variables}
            return forked_processes.run(["python", *args], folder=ROOT, environment=given)
        return subprocess.run(
            [sys.executable, *args],
            env={**environment, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run
