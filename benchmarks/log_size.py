"""Print how long the log of a session with failures is, as a CI system keeps it.

    python benchmarks/log_size.py [--json FILE]

40 tests, of which 8 fail in different ways, with ``CI`` and ``GITHUB_ACTIONS`` set and the options
of a gate, in terminals of 80 and 120 columns. ``PYTHONPATH`` names another checkout to measure.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from conditions import conditions
from session_cost import OTHERS

TESTS = """
import pytest, torch

kept = []

class Node: pass

@pytest.mark.parametrize("number", range(30))
def test_kept(number): torch.ones(1024)

@pytest.mark.zero_retention
def test_retained(): kept.append(torch.ones(2**20))

@pytest.mark.max_peak_mb(1)
def test_peak(): torch.ones(2**20).exp()

@pytest.mark.flat_per_batch
def test_growth(cka_memory):
    with cka_memory.measure("train") as region:
        for _ in region.batches(range(8)):
            kept.append(torch.ones(2**12))

@pytest.mark.no_cycles
def test_cycle():
    node = Node()
    node.itself, node.values = node, torch.ones(2**16)

@pytest.mark.max_peak_mb(1)
@pytest.mark.zero_retention
def test_regions(cka_memory):
    for name in ("forward", "backward", "step"):
        with cka_memory.measure(name):
            kept.append(torch.ones(2**20))

@pytest.mark.memory_baseline
def test_baseline(): torch.ones(2**21)

@pytest.mark.flat_per_batch
def test_no_batches(): torch.ones(8)

@pytest.fixture
def around(cka_memory):
    with cka_memory.measure("around"):
        yield
        kept.append(torch.ones(2**18))

@pytest.mark.zero_retention
def test_teardown(around): pass

@pytest.mark.max_peak_mb(1, warn=True)
def test_warned(): torch.ones(2**20)

@pytest.mark.xfail
@pytest.mark.zero_retention
def test_expected(): kept.append(torch.ones(2**10))
"""
GATE = ("--cka-memory-report", "--cka-memory-device=cpu", "--junitxml=junit.xml")
FAILING = 8
_TEST = re.compile(r"^::error [^\n]*?::test_it\.py::(\w+)", re.MULTILINE)


def session(*options: str, columns: int = 80, ci: bool = True) -> str:
    """Run the tests in the current folder and return the log."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    command += [part for name in (*OTHERS, "xdist") for part in ("-p", f"no:{name}")]
    on_ci = {"CI": "true", "GITHUB_ACTIONS": "true"} if ci else {}
    environment = {**os.environ, "COLUMNS": str(columns), **on_ci}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def measured() -> dict[str, Any]:
    """Return lines and bytes of the log at each width, and the annotations of each failing test."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("pytest.ini").write_text("[pytest]\n", "utf-8")
        Path("test_it.py").write_text(TESTS.replace("2**21", "2**19"), "utf-8")
        session("-k", "baseline", *GATE, "--cka-memory-update-baseline", ci=False)
        Path("test_it.py").write_text(TESTS, "utf-8")
        for columns in (80, 120):
            log = session(*GATE, columns=columns)
            summary = log.partition("short test summary")[2]
            failed = re.findall(r"^(?:FAILED|ERROR) test_it", summary, re.MULTILINE)
            assert len(failed) == FAILING, log
            annotated = Counter(_TEST.findall(log))
            found[f"{columns} columns"] = {
                "lines": len(log.splitlines()),
                "bytes": len(log.encode()),
                "lines of the short summary": len(summary.splitlines()),
                "tests with an annotation": len(annotated),
                "annotations": annotated.total(),
            }
        found["bytes of the JUnit file"] = Path("junit.xml").stat().st_size
        os.chdir("/")
    return found


def main() -> None:
    """Measure, print, and write the result if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out = None if options.json is None else options.json.resolve()
    text = json.dumps(measured(), indent=1)
    print(text, json.dumps(conditions(("torch", "pytest")), indent=1), sep="\n")
    if out is not None:
        out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
