"""Planted loops have the peaks, the reserve and the levels that they have without the plugin."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from garbage_programs import no_automatic_collections
from planted_loops import LOOPS, on_card

import emulated_cuda
from pytest_cka_memory import MemoryProbe

TESTS = Path(__file__).parents[1]


@functools.cache
def figures_alone() -> dict[str, Any]:
    """Return the figures of all loops in a process without the plugin, from torch's counters."""
    emulates = MemoryProbe("auto").meter.device.startswith("emulate:")
    start = ["-m", emulated_cuda.__name__, "--no-values"] if emulates else []
    folders = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *start, str(TESTS / "planted_loops.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def alone(cuda: torch.device) -> dict[str, Any]:
    """Return the same; `cuda` comes first, because it skips the test without such a device."""
    return figures_alone()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_the_levels_that_it_has_without_the_plugin(probe, cuda, alone, name):
    """Peak, reserve and the level after each batch are equal to the byte in a process without the
    plugin, in a region, and in one with boundaries.
    """
    loop, regions = LOOPS[name], {}

    def in_region(batches):
        with probe.measure() as region:
            loop(batches)
        regions["region"] = region

    def with_boundaries(batches):
        with probe.measure() as region:
            loop(region.batches(batches))
        regions["boundaries"] = region

    with no_automatic_collections():
        found = [on_card(loop, cuda, run_loop) for run_loop in (in_region, with_boundaries)]
    expected = alone[name]
    for levels, region in zip(found, regions.values(), strict=True):
        assert levels["levels"] == expected["levels"]
        assert region.peak_increase_bytes == expected["peak"]
        assert region.reserved_increase_bytes == expected["reserve"]
    start = region.start_bytes
    assert [sample.allocated_bytes - start for sample in region.timeline] == expected["levels"]
    assert not region.record.garbage_freed
