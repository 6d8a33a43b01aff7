"""Run the test suites of other projects on the emulated device and on the CPU, and compare.

``python tests/benchmarks/emulated_suites.py FOLDER [NAME ...]`` expects a clone of each project in
FOLDER, under the name of its repository, and what its tests import. It prints one row for every
suite: tests run on the device, how many have the same outcome as on the CPU, and the others.

A suite has a switch for the device, or parametrizes its tests over the devices that there are; then
the two forms of a test are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = "--cka-memory-device=emulate:cuda"


@dataclass(frozen=True)
class Suite:
    """Tests of a project, and how they are told the device."""

    folder: str
    targets: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    on_cuda: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """``{device}`` in a value is replaced."""
    source: str = "."
    """The folder that has the package."""
    both_at_once: bool = False
    """Whether tests are parametrized over devices."""


SUITES = (
    Suite(
        "kornia",
        ("tests/color", "tests/losses", "tests/morphology", "tests/metrics"),
        ("--device=cpu", "--dtype=float32"),
        ("--device=cuda", "--dtype=float32"),
    ),
    Suite(
        "pytorch-metric-learning",
        ("tests/distances", "tests/reducers", "tests/regularizers", "tests/miners"),
        environment={"TEST_DEVICE": "{device}", "TEST_DTYPES": "float32"},
        source="src",
    ),
    Suite("piq", ("tests",), both_at_once=True),
    Suite(
        "pytorch-image-models",
        ("tests/test_layers.py",),
        environment={"TORCH_DEVICE": "{device}"},
    ),
    Suite(
        "pytorch_geometric",
        ("test/utils", "test/nn/aggr", "test/nn/norm", "test/nn/dense", "test/nn/pool"),
        both_at_once=True,
    ),
    Suite("linear_operator", ("test/operators", "test/utils", "test/functions")),
    Suite("gpytorch", ("test/likelihoods", "test/means", "test/distributions")),
    Suite(
        "accelerate", ("tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_utils.py")
    ),
)


def outcomes(suite: Suite, folder: Path, device: str, limit: int) -> dict[str, str]:
    """Return test -> passed, failed, skipped or error."""
    options = [*suite.targets, "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-W", "ignore", "-p", "no:randomly"]
    if device == "cuda":
        options += [DEVICE, *suite.on_cuda]
    else:
        options += suite.on_cpu
    environment = {name: value.format(device=device) for name, value in suite.environment.items()}
    own = str(Path(__file__).parents[2])
    paths = (str(folder / suite.source), os.environ.get("PYTHONPATH", own))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"],
            cwd=folder,
            env={**os.environ, **environment},
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit,
        )
        return outcomes_in(report)


def outcomes_in(report: Path) -> dict[str, str]:
    """Return the outcomes in a JUnit report; a failure with the last line of its message."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        message = "" if bad is None else (bad.get("message") or "").splitlines()[:1]
        found[name] = "passed" if bad is None else f"{bad.tag}: {' '.join(message)[:200]}"
    return found


def compared(suite: Suite, folder: Path, limit: int) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return how many tests ran on the device, and those whose outcome differs."""
    on_cuda = outcomes(suite, folder, "cuda", limit)
    if suite.both_at_once:
        on_cpu = {name.replace("cpu", "DEVICE"): found for name, found in on_cuda.items()}
        on_cuda = {
            re.sub(r"cuda(:0)?", "DEVICE", name): found
            for name, found in on_cuda.items()
            if "cuda" in name
        }
    else:
        on_cpu = outcomes(suite, folder, "cpu", limit)
        on_cpu = {name.replace("cpu", "DEVICE"): found for name, found in on_cpu.items()}
        on_cuda = {re.sub(r"cuda(:0)?", "DEVICE", name): found for name, found in on_cuda.items()}
    ran = {name: found for name, found in on_cuda.items() if not found.startswith("skipped")}
    known = {name: found for name, found in ran.items() if name in on_cpu}
    different = {
        name: (on_cpu[name], found)
        for name, found in known.items()
        if found.partition(":")[0] != on_cpu[name].partition(":")[0]
    }
    return len(known), different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=900, help="seconds for each run")
    options = parser.parse_args()
    print(
        "| suite | tests on the device | same outcome | other outcome |\n| --- | --- | --- | --- |"
    )
    for suite in SUITES:
        if options.names and suite.folder not in options.names:
            continue
        try:
            count, different = compared(suite, options.folder / suite.folder, options.limit)
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            print(f"| {suite.folder} | {type(error).__name__} | | |", flush=True)
            continue
        print(
            f"| {suite.folder} | {count} | {count - len(different)} | {len(different)} |",
            flush=True,
        )
        for name, (cpu, cuda) in different.items():
            print(f"  {name}: {cpu!r} -> {cuda!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
