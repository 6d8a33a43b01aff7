"""Hundreds of regions in one process leave no objects and no memory behind."""

import gc
import tracemalloc
from pathlib import Path

import forked_processes
import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.testing import ScriptedMeter

REGIONS = 200
ALLOWANCE_BYTES = 4_000
"""Allowance for caches of the interpreter.

If each region kept the smallest possible object, they would add up to 6,400 bytes.
"""


def measure(times: int, meter: Meter | None = None) -> None:
    """Measure `times` regions, each with a new probe, because each test has its own probe."""
    for _ in range(times):
        with MemoryProbe("cpu" if meter is None else None, meter=meter).measure() as region:
            torch.ones(8, requires_grad=True).sum().backward()
            region.batch_done(8)
        assert region.retained_bytes == 0


def objects() -> int:
    """Return the number of objects that the garbage collector tracks after a collection."""
    gc.collect()
    return len(gc.get_objects())


def objects_kept(regions: int, meter: Meter | None = None) -> int:
    """Return how many more objects there are after measuring `regions` regions."""
    measure(10, meter)
    before = objects()
    measure(regions, meter)
    return objects() - before


@pytest.mark.slow
def test_regions_keep_no_objects() -> None:
    """Neither the probe nor the state that all probes share keeps an object of a region."""
    assert objects_kept(REGIONS, ScriptedMeter()) < REGIONS // 10


def test_cpu_meter_keeps_no_objects() -> None:
    """A live tensor makes each region search all objects.

    A new process is used because this one has many objects.
    """
    regions = REGIONS // 8
    code = f"""
import gc
from test_soak import objects_kept, torch
gc.collect()
gc.freeze()  # the modules of torch, which each search would go through
alive = torch.ones(1)
print(objects_kept({regions}))
"""
    done = forked_processes.run(["python", "-c", code], folder=Path(__file__).parent)
    assert int(done.stdout or regions) < regions // 10, done.stderr


@pytest.mark.slow
def test_regions_keep_no_memory() -> None:
    """Regions keep no numbers, strings or bytes either, which the
    garbage collector does not track.
    """
    meter = ScriptedMeter()  # torch would take minutes under tracemalloc
    measure(10, meter)
    tracemalloc.start()
    try:
        measure(10, meter)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        measure(REGIONS, meter)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < ALLOWANCE_BYTES
    finally:
        tracemalloc.stop()


def test_regions_inside_a_region_add_nothing_to_it() -> None:
    """Regions inside another one retain no tensor and raise its peak by one step."""
    with MemoryProbe("cpu").measure() as around:
        measure(5)
    with MemoryProbe("cpu").measure() as one:
        measure(1)
    assert around.retained_bytes == 0
    assert around.peak_increase_bytes == one.peak_increase_bytes


def test_region_removes_its_collector_callback() -> None:
    """At its end a region removes its callback from the garbage
    collector and restores functions.
    """
    before = len(gc.callbacks), torch.UntypedStorage.resize_, torch.jit.trace
    measure(5)
    assert (len(gc.callbacks), torch.UntypedStorage.resize_, torch.jit.trace) == before
