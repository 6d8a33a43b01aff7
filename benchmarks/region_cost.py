"""Print what measuring on the CPU costs: regions, batch boundaries, operators.

    python benchmarks/region_cost.py [--objects 500000] [--rounds 5] [--no-ledger] [--also]

A model of 2,000 parameters and half a million other Python objects are alive. Each figure is a
median of the native counter, beside the same of the ledger, in user CPU time. A boundary is
measured in loops of rising length, in which the level is flat, or rises because each batch keeps a
tensor; `garbage` leaves a tensor in a reference cycle in each batch, `graph` a small graph. What
the batches themselves take, and the begin and the end of the region, are not in it; the end is
measured above a full collection, for each tensor that the region keeps. With `--also` it prints
instead what each addition costs (cycles, process, driver), as ratios to a region without it.
"""

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from tabulate import tabulate

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.figure_rows import ADDITIONS
from pytest_cka_memory.meters.cpu import BlockMeter
from pytest_cka_memory.meters.storage_meter import StorageMeter

_BATCHES = (100, 1_000, 10_000, 100_000)
_LIVE_TENSORS = (10_000, 100_000)
_OPERATORS = 20_000


class Node:
    """An object that can be part of a cycle."""


def empty_region_us(probe: MemoryProbe) -> float:
    """Return the time of a region around nothing."""
    start = time.process_time()
    with probe.measure():
        pass
    return (time.process_time() - start) * 1e6


def empty_region_beside_a_thread_us(probe: MemoryProbe) -> float:
    """Return the same while another thread waits."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        return empty_region_us(probe)
    finally:
        done.set()
        thread.join()


def boundary_us(probe: MemoryProbe, batches: int, kind: str) -> float:
    """Return the time of one boundary after batches of this kind, without that of the batches."""
    return _batch_us(probe, batches, kind) - _batch_us(probe, batches, kind, has_boundaries=False)


def _batch_us(probe: MemoryProbe, batches: int, kind: str, *, has_boundaries: bool = True) -> float:
    """Return the time of one batch in a region, with the boundary after it if it has one."""
    kept: list[object] = []
    weight = torch.empty(1, requires_grad=True)
    with probe.measure() as region:
        start = time.process_time()
        for _ in range(batches):
            if kind == "rising":
                kept.append(torch.empty(1))
            elif kind in ("garbage", "graph"):
                node = Node()
                value = (weight * 2).exp() if kind == "graph" else torch.empty(1)
                node.me, node.value = node, value  # type: ignore[attr-defined]
            if has_boundaries:
                region.batch_done(1)
        taken_s = time.process_time() - start
    return taken_s / batches * 1e6


def end_us(probe: MemoryProbe, tensors: int) -> float:
    """Return the time of the end of a region that keeps so many tensors, above a full collection.

    The collection proves that they are no garbage; its time depends on all objects of the process.
    """
    kept: list[torch.Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(probe.measure())
        kept += (torch.empty(1) for _ in range(tensors))
        start = time.process_time()
        gc.collect()
        collected = time.process_time()
    ended = time.process_time()
    return ((ended - collected) - (collected - start)) * 1e6 / tensors


def print_additions(device: str, rounds: int) -> None:
    """Print the time of regions and boundaries with each addition, and its ratio to that without.

    The driver is that of the emulated card if `device` names one.
    """
    without = MemoryProbe(device)
    rows = []
    for name in ADDITIONS:
        with_it = MemoryProbe(meter=without.meter, also=[name])
        for kind in ("region", "region that keeps a tensor", "boundary"):
            times = [
                [_addition_us(probe, kind) for probe in (without, with_it)] for _ in range(rounds)
            ]
            before, after = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append((name, kind, round(before, 1), round(after, 1), round(after / before, 2)))
    print(tabulate(rows, headers=("addition", "", "without, µs", "with, µs", "ratio")))


def _addition_us(probe: MemoryProbe, kind: str) -> float:
    if kind == "region":
        return statistics.median(empty_region_us(probe) for _ in range(20))
    if kind == "boundary":
        return boundary_us(probe, 100, "flat")
    kept = []
    start = time.process_time()
    with probe.measure():
        kept.append(torch.empty(1, device=probe.device))
    return (time.process_time() - start) * 1e6


def operator_us(probe: MemoryProbe | None) -> float:
    """Return the time of adding two tensors of ten numbers, in a region if a probe is given."""
    x = torch.ones(10)

    def loop() -> float:
        start = time.process_time()
        for _ in range(_OPERATORS):
            x + x
        return (time.process_time() - start) / _OPERATORS * 1e6

    if probe is None:
        return loop()
    with probe.measure():
        return loop()


@contextmanager
def full_house(objects: int) -> Iterator[None]:
    """Keep a model of 2,000 parameters and many other objects alive."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(1_000))
    others = [[number] for number in range(objects)]
    gc.collect()
    yield
    del model, others


def main() -> None:
    """Measure and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-ledger", action="store_true", help="measure the native counter only")
    parser.add_argument("--also", action="store_true", help="measure what additions cost")
    parser.add_argument("--device", default="cpu", help="the device for --also")
    options = parser.parse_args()
    if options.also:
        with full_house(options.objects):
            print_additions(options.device, options.rounds)
        return
    probes = {"native": MemoryProbe(meter=BlockMeter())}
    if not options.no_ledger:
        probes["ledger"] = MemoryProbe(meter=StorageMeter())
    torch.set_num_threads(1)
    rows: list[tuple[object, ...]] = []

    def add(name: str, measure: Callable[[MemoryProbe], float]) -> None:
        values: dict[str, list[float]] = {kind: [] for kind in probes}
        for _ in range(options.rounds):
            for kind, probe in probes.items():
                values[kind].append(measure(probe))
        rows.append((name, *(round(statistics.median(found), 2) for found in values.values())))
        print(rows[-1], flush=True)

    with full_house(options.objects):
        add("empty region, µs", empty_region_us)
        add("the same beside a thread, µs", empty_region_beside_a_thread_us)
        for kind in ("flat", "rising", "garbage", "graph"):
            for count in _BATCHES:
                add(
                    f"boundary, {kind}, {count:,} batches, µs",
                    lambda probe, count=count, kind=kind: boundary_us(probe, count, kind),
                )
        for count in _LIVE_TENSORS:
            add(
                f"end, {count:,} tensors kept, µs each",
                lambda probe, count=count: end_us(probe, count),
            )
        bare = statistics.median(operator_us(None) for _ in range(options.rounds))
        add(f"x + x above the bare {bare:.2f}, µs", lambda probe: operator_us(probe) - bare)
    print(tabulate(rows, headers=("", *probes)))


if __name__ == "__main__":
    main()
