"""Thousands of measured regions in one process: does the plugin itself leak, grow or slow down?

    python tests/benchmarks/soak.py [--regions 10000] [--living] [--around] [--json soak.json]

Each region computes a loss and its gradients and keeps nothing. After every tenth of them: the
process's resident memory, the objects that the garbage collector knows, and the processor time that
a region took.
With ``--living`` a model outlives the regions, so that none can skip its garbage collections.
With ``--around`` one more region is opened around all of them: what the plugin says of itself.
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
    """The process after so many regions."""

    regions: int
    rss_bytes: int
    objects: int
    ms_per_region: float


def main() -> None:
    """Run, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--regions", type=int, default=10_000)
    parser.add_argument("--living", action="store_true", help="let a model outlive the regions")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--around", action="store_true", help="measure the measuring, too")
    args = parser.parse_args()
    alive = torch.nn.Linear(64, 64) if args.living else None
    with MemoryProbe("cpu").measure("around") if args.around else nullcontext() as around:
        rows = list(soaked(args.regions))
    cells = [list(asdict(row).values()) for row in rows]
    print(tabulate(cells, list(asdict(rows[0])), floatfmt=".2f"))
    kept = {} if around is None else {name: getattr(around, name) for name in FIGURES}
    print(f"around all of them: {kept}" if kept else "")
    if args.json:
        data = {"torch": torch.__version__, "python": platform.python_version()}
        data |= {"living": alive is not None, "rows": [asdict(row) for row in rows], **kept}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def soaked(regions: int) -> Iterator[Row]:
    """Measure `regions` times; a row for each tenth, the first taken after a warm-up."""
    measured(regions // 10)
    yield row(0, 0.0)
    for tenth in range(10):
        begun = time.process_time()
        measured(regions // 10)
        seconds = time.process_time() - begun
        yield row((tenth + 1) * (regions // 10), 1000 * seconds / (regions // 10))


def row(regions: int, ms_per_region: float) -> Row:
    """Look at the process, when all garbage is gone."""
    gc.collect()
    rss_bytes = psutil.Process().memory_info().rss
    return Row(regions, rss_bytes, len(gc.get_objects()), round(ms_per_region, 3))


def measured(times: int) -> None:
    """Open as many regions, each of a probe of its own, as the tests of a session have."""
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
