"""Hundreds of regions in one process leave nothing of themselves behind."""

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.testing import ScriptedMeter

REGIONS = 200
LARGEST_REST_BYTES = 4_000
"""Caches of the interpreter; the smallest object kept of each region would be 6,400 bytes."""


def measure(times: int, meter: Meter | None = None) -> None:
    """Measure as often, each time by a probe of its own, as each test has one."""
    for _ in range(times):
        with MemoryProbe("cpu" if meter is None else None, meter=meter).measure() as region:
            torch.ones(8, requires_grad=True).sum().backward()
            region.batch_done(8)
        assert region.retained_bytes == 0


def objects() -> int:
    """How many the garbage collector knows, when all garbage is gone."""
    gc.collect()
    return len(gc.get_objects())


def objects_kept(regions: int, meter: Meter | None = None) -> int:
    """How many there are more after so many regions."""
    measure(10, meter)
    before = objects()
    measure(regions, meter)
    return objects() - before


def test_no_object_is_kept_of_a_region() -> None:
    """Neither by the probe nor by the gauge that all probes share."""
    assert objects_kept(REGIONS, ScriptedMeter()) < REGIONS // 10


def test_no_object_is_kept_by_the_meter_of_a_cpu() -> None:
    """With a tensor alive, for each region to look at all objects; elsewhere, for here are many."""
    regions = REGIONS // 8
    code = f"""
from test_soak import objects_kept, torch
alive = torch.ones(1)
print(objects_kept({regions}))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert int(done.stdout or regions) < regions // 10, done.stderr


def test_no_memory_is_kept_of_a_region() -> None:
    """Plain objects, which no collector knows, weigh too: numbers, texts, bytes."""
    meter = ScriptedMeter()  # under tracemalloc, torch's own work would take minutes
    measure(10, meter)
    tracemalloc.start()
    try:
        measure(10, meter)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        measure(REGIONS, meter)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < LARGEST_REST_BYTES
    finally:
        tracemalloc.stop()


def test_the_plugin_finds_nothing_in_itself() -> None:
    """A region around the others: they retain no tensor, and raise the peak by one step's."""
    with MemoryProbe("cpu").measure() as around:
        measure(5)
    with MemoryProbe("cpu").measure() as one:
        measure(1)
    assert around.retained_bytes == 0
    assert around.peak_increase_bytes == one.peak_increase_bytes


def test_a_collector_callback_comes_and_goes_with_its_region() -> None:
    """And so do the functions that are replaced meanwhile: nothing piles up."""
    before = len(gc.callbacks), torch.UntypedStorage.resize_, torch.jit.trace
    measure(5)
    assert (len(gc.callbacks), torch.UntypedStorage.resize_, torch.jit.trace) == before
