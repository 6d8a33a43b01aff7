"""Measure thousands of regions in one process, to see whether the plugin leaks or slows down.

    python benchmarks/soak.py [--regions 10000] [--living] [--around] [--json soak.json]
    python benchmarks/soak.py --threads 20

Each region computes a loss and its gradients and keeps nothing. After each tenth of the regions, a
row has the resident memory of the process, the number of objects that the garbage collector tracks,
and the processor time per region.
With ``--living`` a model outlives the regions, so that their garbage collections cannot be skipped.
With ``--around`` one more region encloses all of them, to measure the plugin itself.
With ``--threads`` two threads measure regions for so many seconds instead, while a third builds
tuples from generators, which breaks if anybody keeps a reference to one that is half built, and a
fourth allocates. It ends with status 1 at the first wrong figure or error in any of them.
"""

import argparse
import gc
import json
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from tabulate import tabulate

from pytest_cka_memory import MemoryProbe

FIGURES = ("retained_bytes", "peak_increase_bytes", "net_bytes")


@dataclass(frozen=True)
class Row:
    """The state of the process after a number of regions."""

    regions: int
    rss_bytes: int
    objects: int
    ms_per_region: float


def main() -> None:
    """Run, print the table, and write it to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--regions", type=int, default=10_000)
    parser.add_argument(
        "--living", action="store_true", help="keep a model alive during all regions"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--around", action="store_true", help="measure all regions in one more region"
    )
    parser.add_argument("--threads", type=float, help="seconds; measure in threads instead")
    args = parser.parse_args()
    if args.threads:
        sys.exit(measured_in_threads(args.threads))
    alive = torch.nn.Linear(64, 64) if args.living else None
    with MemoryProbe("cpu").measure("around") if args.around else nullcontext() as around:
        rows = list(measured_in_tenths(args.regions))
    cells = [list(asdict(row).values()) for row in rows]
    print(tabulate(cells, list(asdict(rows[0])), floatfmt=".2f"))
    kept = {} if around is None else {name: getattr(around, name) for name in FIGURES}
    print(f"region around all of them: {kept}" if kept else "")
    if args.json:
        data = {"torch": torch.__version__, "python": platform.python_version()}
        data |= {"living": alive is not None, "rows": [asdict(row) for row in rows], **kept}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def measured_in_threads(seconds: float) -> int:
    """Print how often each thread has done its work, and the errors; return the exit status."""
    probe = MemoryProbe("cpu")
    level = probe.snapshot().allocated_bytes
    end, errors = threading.Event(), []
    works = {
        "regions of 1 MB": lambda: measure_a_leak(10**6),
        "regions of 10 MB": lambda: measure_a_leak(10**7),
        "tuples": lambda: [tuple(number for number in range(50)) for _ in range(100)],
        "allocations": lambda: (torch.ones(100) + 1).sum(),
    }
    counts = dict.fromkeys(works, 0)

    def repeat(name: str) -> None:
        try:
            while not end.is_set():
                works[name]()
                counts[name] += 1
        except BaseException as error:  # also a SystemError
            errors.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=repeat, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    end.set()
    for thread in threads:
        thread.join()
    if probe.snapshot().allocated_bytes != level:
        errors.append(f"the level was {level} and is {probe.snapshot().allocated_bytes}")
    print(tabulate(counts.items(), ["thread", "times"]), *errors, sep="\n")
    return 1 if errors else 0


def measure_a_leak(size: int) -> None:
    """Check a region with a temporary; other threads can only add to its figures."""
    with MemoryProbe("cpu").measure() as region:
        torch.zeros(10 * size, dtype=torch.uint8)
        kept = torch.zeros(size, dtype=torch.uint8)
    lowest = min(region.start_bytes, region.end_bytes)
    assert region.peak_bytes - lowest >= 10 * size, f"the peak is only {region.peak_bytes}"
    assert size <= region.retained_bytes, f"retained is only {region.retained_bytes}"
    del kept


def measured_in_tenths(regions: int) -> Iterator[Row]:
    """Measure `regions` regions; yield a row after each tenth, the first after a warm-up."""
    measure_regions(regions // 10)
    yield row(0, 0.0)
    for tenth in range(10):
        start = time.process_time()
        measure_regions(regions // 10)
        seconds = time.process_time() - start
        yield row((tenth + 1) * (regions // 10), 1000 * seconds / (regions // 10))


def row(regions: int, ms_per_region: float) -> Row:
    """Return the state of the process after a garbage collection."""
    gc.collect()
    rss_bytes = psutil.Process().memory_info().rss
    return Row(regions, rss_bytes, len(gc.get_objects()), round(ms_per_region, 3))


def measure_regions(times: int) -> None:
    """Open this many regions, each with its own probe, as the tests of a session do."""
    for _ in range(times):
        with MemoryProbe("cpu").measure("step") as region:
            step()
            region.batch_done(8)
        if region.retained_bytes:
            sys.exit(f"a clean region retained {region.retained_bytes} bytes")


def step() -> None:
    """Compute a loss and its gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model(torch.ones(8, 16)).sum().backward()


if __name__ == "__main__":
    main()
