"""Print what measuring costs on an accelerator, by default on an emulated one.

python benchmarks/accelerator_cost.py [--device emulate:cuda]

Medians of the processor's time: an empty region, and what of it the meter for the host costs, which
is switched on and off in turn; how often that region reads the allocator's statistics; an operator
outside and inside a region; and a region that keeps a tensor, whose garbage is collected. With
``--objects`` there are more Python objects to collect.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.accelerator import by_blocks


def median_us(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Return the median of the microseconds that a call takes, over rounds of so many calls."""
    return statistics.median(round_us(call, calls) for _ in range(rounds))


def round_us(call: Callable[[], object], calls: int) -> float:
    """Return the mean of the microseconds that a call takes."""
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls * 1e6


def empty_region(probe: MemoryProbe) -> None:
    with probe.measure():
        pass


def with_and_without_host(meter: Any, calls: int = 200, rounds: int = 31) -> tuple[float, float]:
    """Return the medians of an empty region's microseconds with the host's meter and without it."""
    find_host, by_blocks.host_memory = by_blocks.host_memory, lambda: None
    without = type(meter)(meter._device, meter._stats, meter._counter)
    by_blocks.host_memory = find_host
    times_us: dict[MemoryProbe, list[float]] = {
        MemoryProbe(meter=each): [] for each in (meter, without)
    }
    for _ in range(rounds):
        for probe, times in times_us.items():
            times.append(round_us(partial(empty_region, probe), calls))
    with_host, without_host = map(statistics.median, times_us.values())
    return with_host, without_host


def readings_of(meter: Any, call: Callable[[], object]) -> int:
    """Return how often a call reads the allocator's statistics."""
    stats, count = meter._levels._stats, 0
    read = stats.levels

    def counted() -> object:
        nonlocal count
        count += 1
        return read()

    stats.levels = counted
    call()
    del stats.levels
    return count


def main() -> None:
    """Measure and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="emulate:cuda")
    parser.add_argument("--objects", type=int, default=0)
    parser.add_argument("--regions-only", action="store_true", help="measure empty regions only")
    options = parser.parse_args()
    probe = MemoryProbe(options.device)
    import torch

    objects = [[] for _ in range(options.objects)]
    model = torch.nn.Linear(10, 10).to(probe.device)
    numbers = torch.zeros(10, device=probe.device)

    empty = partial(empty_region, probe)

    def leak() -> None:
        kept = []
        with probe.measure():
            kept.append(numbers + numbers)

    print(f"{probe.meter.name}; {len(gc.get_objects())} objects in {len(objects)} + torch's own")
    if getattr(probe.meter, "_host", None) is None:
        print(f"empty region:              {median_us(empty, 200) / 1e3:10.3f} ms")
    else:
        empty()
        taken, without = with_and_without_host(probe.meter)
        host = taken - without
        print(f"empty region:              {taken / 1e3:10.3f} ms")
        print(f"  meter for the host:      {host / 1e3:10.3f} ms, {host / without:.1%} of the rest")
        print(f"  readings of statistics:  {readings_of(probe.meter, empty):10}")
    if options.regions_only:
        return
    print(f"region that keeps a tensor:{median_us(leak, 5) / 1e3:10.3f} ms")
    outside = median_us(lambda: numbers + numbers, 5000)
    with probe.measure():
        inside = median_us(lambda: numbers + numbers, 5000)
    print(f"operator outside a region: {outside:10.3f} us")
    print(f"operator inside a region:  {inside:10.3f} us")
    del model


if __name__ == "__main__":
    main()
