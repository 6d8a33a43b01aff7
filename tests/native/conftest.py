"""Fixtures for the counter in torch's CPU allocator; its tests are skipped where it is missing."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import forked_processes
import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import blocks
from pytest_cka_memory.meters.blocks.counter import Counter
from pytest_cka_memory.meters.cpu import BlockMeter
from pytest_cka_memory.meters.selection import cpu_meter


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if find_spec(f"{blocks.__name__}._counter") is None:  # one that is broken is a fault
        pytest.skip("the native counter was not compiled")


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded(imports_excluded_from_collection: None) -> None:
    """Hide what was imported from collections in every module of this folder."""


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture(scope="session")
def meter() -> BlockMeter:
    chosen = cpu_meter()
    return chosen if isinstance(chosen, BlockMeter) else BlockMeter()


@pytest.fixture
def probe(meter: BlockMeter) -> MemoryProbe:
    return MemoryProbe(meter=meter)


@pytest.fixture
def open_regions() -> Callable[[], int]:
    """Return how many regions are open in C."""
    count: Callable[[], int] = blocks.functions().counter_open_regions
    return count


@pytest.fixture
def run_code(tmp_path: Path) -> Callable[..., str]:
    """Run Python code in a new process and return what it prints; it must not fail or hang.

    It is a new interpreter, or a process that has imported torch already (``forked=True``).
    Keyword arguments are added to the environment.
    """

    def run(code: str, *, forked: bool = False, **environment: str) -> str:
        given = {**os.environ, **environment}
        if forked:
            words = ["python", "-c", code]
            done = forked_processes.run(words, folder=tmp_path, environment=given)
        else:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=tmp_path,
                env=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
