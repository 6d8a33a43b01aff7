"""Print the time it takes to write ten thousand regions to every report, and to read them.

    python benchmarks/reporting_cost.py [--regions 10000] [--batches 16]

The regions are measured on a scripted meter, and every sixth keeps a block of each batch.
"""

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.report import Report, ReportBuilder
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import files, markdown
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.stored import json_report as json_writer
from pytest_cka_memory.testing import ScriptedMeter

WRITERS: dict[str, Callable[[Report], str]] = {
    "json": json_writer.render,
    "html": html_page.render,
    "markdown": markdown.render,
}


def main() -> None:
    """Measure, write and read once; print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--regions", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=16)
    args = parser.parse_args()
    collected = measured(args.regions, args.batches)
    print(f"{args.regions:,} regions of {args.batches} batches; Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        total = report_to(Path(folder), collected)
        print(f"{'all of these':28}{total:6.2f} s")
        for command in ("show", "compare", "html"):
            print(f"{f'python -m … {command}':28}{run(command, Path(folder))}")


def measured(regions: int, batches: int) -> ReportBuilder:
    """Return what a session with this many tests collects from their reports."""
    meter, collected = ScriptedMeter(has_reserve=True), ReportBuilder()
    limits = [
        limit_from_marker("zero_retention", (), {}),
        limit_from_marker("flat_per_batch", (), {}),
    ]
    for number in range(regions):
        nodeid = f"tests/test_{number % 50}.py::TestNet::test_training_step[{number}-resnet18]"
        probe, kept = MemoryProbe(meter=meter), []
        with probe.measure("epoch") as region:
            for _ in range(batches):
                meter.free(meter.allocate(2**20))
                kept += [meter.allocate(512)] if number % 6 == 1 else []
                region.batch_done(64)
        result = judge(nodeid, region.record, limits)
        payload = {
            "facts": meter.facts(),
            "regions": [result.to_dict()],
            "unmeasured": [],
            "narrowed": False,
        }
        collected.add(nodeid, "main", "failed" if result.breaches else "passed", payload)
        collected.finish(nodeid)
        for block in kept:
            meter.free(block)
        gc.freeze()  # so that the collections of later regions do not walk over earlier ones
    gc.unfreeze()
    return collected


def report_to(folder: Path, collected: ReportBuilder) -> float:
    """Write every file, as at the end of a session; return the seconds of all together."""
    start, used = time.perf_counter(), time.process_time()
    report = collected.report()
    print(f"{'collect':28}{time.perf_counter() - start:6.2f} s")
    for name, render in WRITERS.items():
        begun, path = time.perf_counter(), folder / f"r.{name}"
        files.write_whole(path, render(report))
        size = path.stat().st_size / 2**20
        print(f"{name:28}{time.perf_counter() - begun:6.2f} s, {size:.1f} MB")
    print(f"{'processor time':28}{time.process_time() - used:6.2f} s")
    return time.perf_counter() - start


def run(command: str, folder: Path) -> str:
    """Return the time that one command on the JSON report takes, including its start."""
    source = str(folder / "r.json")
    rest = {"compare": [source], "html": ["-o", str(folder / "again.html")]}.get(command, [])
    start, used = time.perf_counter(), os.times()
    subprocess.run(
        [sys.executable, "-m", "pytest_cka_memory", command, source, *rest],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall, now = time.perf_counter() - start, os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return f"{wall:6.2f} s, {cpu:.2f} s of processor time, in a new process"


if __name__ == "__main__":
    main()
