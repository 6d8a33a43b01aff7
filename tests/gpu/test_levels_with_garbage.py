"""Levels of loops that leave garbage are those of the program, as torch's own counters show."""

import pytest
import torch
from garbage_programs import BATCHES, SIZE, STEPS, no_automatic_collections, run


@pytest.mark.parametrize("step", STEPS)
def test_batch_boundaries_change_no_peak_and_no_reserve(probe, cuda, step):
    """Peaks of memory and reserve are equal to the byte without a region, in one, and with
    boundaries in it.
    """
    values = [torch.ones(SIZE, device=cuda)] * BATCHES
    run(step, values)  # what torch makes once
    found = {}
    for way in ("plain", "region", "boundaries"):
        with no_automatic_collections():
            if way == "plain":
                torch.cuda.synchronize()
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                run(step, values)
                after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                found[way] = tuple(high - low for high, low in zip(after, before, strict=True))
                continue
            with probe.measure() as region:
                run(step, region.batches(values) if way == "boundaries" else values)
            found[way] = region.peak_increase_bytes, region.reserved_increase_bytes
    assert found["plain"][0] > SIZE
    assert found["region"] == found["boundaries"] == found["plain"]
