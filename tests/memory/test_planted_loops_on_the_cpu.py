"""Planted loops on the CPU have the peaks and levels that torch shows without the plugin."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import forked_processes
import pytest
import torch
from garbage_programs import BATCHES, SIZE, no_automatic_collections
from planted_loops import LOOPS

from pytest_cka_memory import MemoryProbe

TESTS = Path(__file__).parents[1]


@functools.cache
def figures_alone() -> dict[str, Any]:
    """Return the figures of all loops in a process without the plugin."""
    folders = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = forked_processes.run(
        ["python", str(TESTS / "planted_loops.py"), "cpu"],
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def one_thread() -> Any:
    """Let operators run in one thread, because their temporaries depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_on_the_cpu_has_the_levels_that_it_has_without_the_plugin(
    cpu: MemoryProbe, is_native: bool, name: str
) -> None:
    """Peak and level after each batch are equal to the byte in a process without the plugin, in a
    region, and in one with boundaries.
    """
    if not is_native:
        pytest.skip("the ledger counts tensors, not what operators allocate")
    loop, expected = LOOPS[name], figures_alone()[name]
    values = [torch.ones(SIZE)] * BATCHES
    with no_automatic_collections():
        loop(values)
        with cpu.measure() as plain:
            loop(values)
        with cpu.measure() as region:
            loop(region.batches(values))
    assert plain.peak_increase_bytes == expected["peak"]
    assert region.peak_increase_bytes == expected["peak"]
    levels = [sample.allocated_bytes - region.start_bytes for sample in region.timeline]
    assert levels == expected["levels"]
    assert len(levels) == BATCHES
