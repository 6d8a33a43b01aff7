"""Run other projects' test suites with every optimizer step a batch: what is said of the reserve?

    python benchmarks/reserve_suites.py --json FILE \
        "einops=einops-0.8.2/einops/tests" "timm=timm-1.0.31/tests/test_layers.py -k pool"

A suite is the name of a distribution and the arguments for pytest, relative to the current folder.
It runs on the CPU and on an emulated card, where ``torch.set_default_device`` moves what its tests
make to the card. A region of each test has a sample at each step of any optimizer. The regions are
judged as the report does it, without the reserve and with it: a region that is only accused with it
is listed, with its levels of the reserve and of what is in use, because each is to be looked at. So
are those that ``flat_per_batch(of="reserved")`` would break.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from other_suites import ENVIRONMENT, outcomes_in
from tabulate import tabulate

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.retention import growth_bytes_per_batch, judged_growth
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.stored import json_report

CPU, CARD = "cpu", "emulate:cuda:a100"
STEPS = """
import pytest, torch

@pytest.fixture(autouse=True)
def every_optimizer_step_is_a_batch(cka_memory):
    with cka_memory.measure("steps") as region, region.each_step():
        yield

def pytest_sessionstart(session):
    if torch.accelerator.is_available():
        torch.set_default_device("cuda")
"""


def session(arguments: Sequence[str], device: str, folder: Path) -> dict[str, Any]:
    """Return the outcomes and the accusations of one session over a suite."""
    results, report = folder / "results.xml", folder / "report.json"
    (folder / "steps_as_batches.py").write_text(STEPS, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=no",
        f"--junitxml={results}",
    ]
    # A project's own options may be those of plugins, none of which is loaded.
    command += [
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "cka_memory",
        "-p",
        "steps_as_batches",
    ]
    command += [f"--cka-memory-device={device}", f"--cka-memory-json={report}", *arguments]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        raise RuntimeError(
            f"{' '.join(arguments)} on {device}: {run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    outcomes = list(outcomes_in(results).values())
    regions = json_report.read(report).results
    return {
        "passed": outcomes.count("passed"),
        "tests": len(outcomes),
        **accusations([result for result in regions if result.record.completed]),
    }


def accusations(results: Sequence[Result]) -> dict[str, Any]:
    """Return how many regions are accused without the reserve, and each that only it accuses."""
    with_reserve = [it for it in results if (it.record.reserved_peak_bytes or 0) > 0]
    judged = [it for it in with_reserve if judged_growth(it.record.timeline) is not None]
    in_use = [it for it in judged if (growth_bytes_per_batch(it.record.timeline) or 0) > 0]
    reserved = [it for it in judged if _reserve_grows(it)]
    return {
        "regions": len(results),
        "on_the_card": len(with_reserve),
        "with_enough_batches": len(judged),
        "in_use_grows": len(in_use),
        "notes": [_described(it) for it in judged if sentences.note_on_reserve(it.record)],
        "limit_breaks": [_described(it) for it in reserved],
    }


def _reserve_grows(result: Result) -> bool:
    growth = growth_bytes_per_batch(result.record.timeline, 1, "reserved_bytes")
    return growth is not None and growth > 0


def _described(result: Result) -> dict[str, Any]:
    timeline = result.record.timeline
    return {
        "region": result.name,
        "note": sentences.note_on_reserve(result.record),
        "reserved_bytes": [sample.reserved_bytes for sample in timeline][:200],
        "in_use_bytes": [sample.in_use_bytes for sample in timeline][:200],
    }


def rows(suites: Sequence[str], devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each suite on each device."""
    for suite in suites:
        name, _, arguments = suite.partition("=")
        for device in devices:
            with tempfile.TemporaryDirectory() as folder:
                found = session(shlex.split(arguments), device, Path(folder))
            row = {"suite": name, "version": _version(name), "arguments": arguments}
            yield {**row, "device": device, **found}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from a checkout"


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one row for each suite and device."""
    counts = ("tests", "passed", "regions", "on_the_card", "with_enough_batches", "in_use_grows")
    cells = [
        [
            f"{row['suite']} {row['version']}",
            *(row[name] for name in ("device", *counts)),
            *(len(row[name]) for name in ("notes", "limit_breaks")),
        ]
        for row in found
    ]
    headers = ["suite", "device", *(name.replace("_", " ") for name in counts), "notes", "limit"]
    return tabulate(cells, headers)


def main() -> int:
    """Print a row for each suite on each device; return 1 if any row has a note, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="+", metavar="NAME=ARGUMENTS")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--device", action="append", help=f"by default {CPU} and {CARD}")
    options = parser.parse_args()
    found = []
    for row in rows(options.suites, options.device or (CPU, CARD)):
        found.append(row)
        print(table([row]), flush=True)
        for each in row["notes"]:
            print(f"  {each['region']}: {each['note']}")
        if options.json:
            data = {"torch": version("torch"), "suites": found}
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return int(any(row["notes"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
