"""Print what measuring costs on an accelerator, by default on an emulated one.

python tests/benchmarks/accelerator_cost.py [--device emulate:cuda]

Medians: an empty region, an operator outside and inside a region, and a region that keeps a tensor,
whose garbage is collected. With ``--objects`` there are more Python objects to collect.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from pytest_cka_memory import MemoryProbe


def median_us(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Return the median of the microseconds that a call takes, over rounds of so many calls."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(taken)


def main() -> None:
    """Measure and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="emulate:cuda")
    parser.add_argument("--objects", type=int, default=0)
    options = parser.parse_args()
    probe = MemoryProbe(options.device)
    import torch

    objects = [[] for _ in range(options.objects)]
    model = torch.nn.Linear(10, 10).to(probe.device)
    numbers = torch.zeros(10, device=probe.device)

    def empty() -> None:
        with probe.measure():
            pass

    def leak() -> None:
        kept = []
        with probe.measure():
            kept.append(numbers + numbers)

    print(f"{probe.meter.name}; {len(gc.get_objects())} objects in {len(objects)} + torch's own")
    print(f"empty region:              {median_us(empty, 20) / 1e3:10.3f} ms")
    print(f"region that keeps a tensor:{median_us(leak, 5) / 1e3:10.3f} ms")
    outside = median_us(lambda: numbers + numbers, 5000)
    with probe.measure():
        inside = median_us(lambda: numbers + numbers, 5000)
    print(f"operator outside a region: {outside:10.3f} us")
    print(f"operator inside a region:  {inside:10.3f} us")
    del model


if __name__ == "__main__":
    main()
