"""Fixtures for the tests of cka: which code multiplies features, subprocesses, counted passes."""

import subprocess
import sys
from collections.abc import Callable

import forked_processes
import pytest
from torch import nn

from cka import functional as precision

VECTOR_FLOATS = {"avx2": 8, "avx512": 16}


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded(imports_excluded_from_search: None) -> None:
    """Hide what was imported from collections and from the meter in every module of this folder."""


@pytest.fixture(params=VECTOR_FLOATS)
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply features by the compiled kernel, with vectors of each width."""
    floats = VECTOR_FLOATS[request.param]
    if precision._vector_floats() < floats:
        pytest.skip(f"{request.param}: not compiled, or not supported by this processor")
    monkeypatch.setattr(precision, "_vector_floats", lambda: floats)


@pytest.fixture(params=["torch", "compiled"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Multiply features by operators of torch, and by the compiled kernel."""
    if request.param == "torch":
        monkeypatch.setattr(precision, "_vector_floats", lambda: 0)
    elif precision._vector_floats() == 0:
        pytest.skip("cka.functional._gram: not compiled, or not supported by this processor")
    name: str = request.param
    return name


@pytest.fixture
def count_passes() -> Callable[[nn.Module], list[int]]:
    """Return a function that returns a list, which gets the number of samples of each pass."""

    def register(model: nn.Module) -> list[int]:
        passes: list[int] = []
        model.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
        return passes

    return register


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Return a function that runs code in a new process and returns its standard output.

    It is a new interpreter, or a process that has imported torch already (``forked=True``).
    """

    def run(code: str, *, forked: bool = False) -> str:
        if forked:
            done = forked_processes.run(["python", "-c", code])
        else:
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
