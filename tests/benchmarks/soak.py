"""Measure thousands of regions in one process, to see whether the plugin leaks or slows down.

    python tests/benchmarks/soak.py [--regions 10000] [--living] [--around] [--json soak.json]

Each region computes a loss and its gradients and keeps nothing. After each tenth of the regions, a
row has the resident memory of the process, the number of objects that the garbage collector tracks,
and the processor time per region.
With ``--living`` a model outlives the regions, so that their garbage collections cannot be skipped.
With ``--around`` one more region encloses all of them, to measure the plugin itself.
"""

import argparse
import gc
import json
import platform
import sys
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
    args = parser.parse_args()
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
