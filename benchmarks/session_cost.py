"""Print what measuring costs sessions of empty tests, serially and in one pytest-xdist worker.

    python benchmarks/session_cost.py [--rounds 7] [--tests 201]

Sessions with ``--cka-memory-report`` and with ``-p no:cka_memory`` alternate; both import torch in
the test file, and read compiled modules from a cache, as an installed package does. Times are
medians of CPU time, in milliseconds: what the session with the plugin takes longer until the first
test starts, in the first test, in each further test, and after the last. The import of torch takes
seconds that vary by more than all of these, and is left out; so is the end of the interpreter. With
a worker, the times are the worker's, and the end is the controller's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

TESTS = """
import time
before = time.process_time()
import pytest, torch
importing_torch = time.process_time() - before
@pytest.mark.parametrize("number", range({tests}))
def test_empty(number): pass
"""
CLOCK = """
import json, pathlib, sys, time, pytest
times = []
def now():
    module = sys.modules.get("test_it")
    return time.process_time() - (module.importing_torch if module else 0)
@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    times.append(now())
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    result = yield
    times.append(now())
    return result
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    ending.append(now())
    return (yield)
ending = []
@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    ending.append(now())
    if len(times) > 1:  # not in a controller, which runs no test
        pathlib.Path("times.json").write_text(json.dumps(times))
    if not hasattr(config, "workerinput"):
        pathlib.Path("ending.json").write_text(json.dumps(ending))
"""
OTHERS = ("cov", "randomly", "repeat", "asyncio", "hypothesispytest", "timeout", "rerunfailures")
MEASURED = ("--cka-memory-report", "--cka-memory-device=cpu")
UNMEASURED = ("-p", "no:cka_memory")
PARALLEL = {"serial": ("-p", "no:xdist"), "-n 1": ("-n", "1")}


def phases_ms(folder: Path, *options: str) -> tuple[float, float, float, float]:
    """Return the CPU time before the first test, in it, per further test, and after the last."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [part for name in OTHERS for part in ("-p", f"no:{name}")]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    start, first, *_, last = times = json.loads((folder / "times.json").read_text())
    finishing, finished = json.loads((folder / "ending.json").read_text())
    seconds = start, first - start, (last - first) / (len(times) - 2), finished - finishing
    start_ms, first_ms, each_ms, rest_ms = (second * 1e3 for second in seconds)
    return start_ms, first_ms, each_ms, rest_ms


def main() -> None:
    """Run the sessions and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", type=int, default=201)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        (folder / "conftest.py").write_text(CLOCK, "utf-8")
        (folder / "test_it.py").write_text(TESTS.format(tests=options.tests), "utf-8")
        for how, parallel in PARALLEL.items():
            for choice in (MEASURED, UNMEASURED):
                phases_ms(folder, *parallel, *choice)  # compiles what is imported
            differences = []
            for _ in range(options.rounds):
                with_it = phases_ms(folder, *parallel, *MEASURED)
                without = phases_ms(folder, *parallel, *UNMEASURED)
                differences.append([a - b for a, b in zip(with_it, without, strict=True)])
            medians = map(statistics.median, zip(*differences, strict=True))
            rows.append((how, *(round(median, 2) for median in medians)))
    print(tabulate(rows, headers=("", "start", "first test", "each further", "end")))


if __name__ == "__main__":
    main()
