"""Tests of the emulated device: each loads it in a process of its own, because it stays loaded."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cka_memory.emulated import loading
from pytest_cka_memory.errors import DeviceError

ROOT = Path(__file__).parents[2]
_REMOVED = ("PYTORCH_", "TORCH_", "CUDA_", "CUBLAS", "TRITON_", "NUMBA_", "PYTEST_", "CI")


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip where the device cannot be emulated; fail where only a compiled library is missing."""
    try:
        loading.check_available()
    except DeviceError as error:
        if "compiled" in str(error) and shutil.which("g++") is not None:
            pytest.fail(f"there is a compiler, and yet: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def python(emulation: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in an environment without CUDA settings."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith(_REMOVED)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            env={**environment, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run
