"""Print the time that a region costs in a process that has imported torch.

python tests/benchmarks/region_cost.py

It is measured with no tensor alive and with a model alive, which makes two full garbage
collections necessary; each with and without skipping collections that cannot find anything.
"""

import argparse
import gc
import statistics
import time

import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.ledger import generations


def cost_ms(regions: int) -> float:
    """Return the median milliseconds of an empty region."""
    probe = MemoryProbe("cpu")
    taken = []
    for _ in range(regions):
        start = time.perf_counter()
        with probe.measure():
            pass
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    """Measure and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regions", type=int, default=21)
    regions = parser.parse_args().regions
    gc.collect()
    start = time.perf_counter()
    gc.collect()
    collection_ms = (time.perf_counter() - start) * 1e3
    print(f"{len(gc.get_objects())} objects, a full collection takes {collection_ms:.1f} ms")
    for around in ("nothing", "a model"):
        model = torch.nn.Linear(8, 8) if around == "a model" else None
        for leave_at_once in (False, generations.LEAVE_AT_ONCE):
            generations.LEAVE_AT_ONCE = leave_at_once
            how = "skipping enabled " if leave_at_once else "skipping disabled"
            print(f"{around:8} alive, {how}: {cost_ms(regions):8.2f} ms per region")
        del model


if __name__ == "__main__":
    main()
