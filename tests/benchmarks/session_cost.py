"""Print what measuring costs sessions of empty tests, serially and in one pytest-xdist worker.

    python tests/benchmarks/session_cost.py [--rounds 7]

Sessions with ``--cka-memory-report`` and with ``-p no:cka_memory`` alternate; both import torch in
the test file. Times are medians of user CPU time, worker included: of one test, and of each further
test.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = """
import pytest, torch
@pytest.mark.parametrize("number", range({tests}))
def test_empty(number): pass
"""
OTHERS = ("cov", "randomly", "repeat", "asyncio", "hypothesispytest", "timeout", "rerunfailures")
MEASURED = ("--cka-memory-report", "--cka-memory-device=cpu")
UNMEASURED = ("-p", "no:cka_memory")
PARALLEL = {"serial": ("-p", "no:xdist"), "-n 1": ("-n", "1")}


def user_seconds(folder: Path, *options: str) -> float:
    """Return the user CPU time of a session in `folder` and of its worker."""
    before = os.times().children_user
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [part for name in OTHERS for part in ("-p", f"no:{name}")]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return os.times().children_user - before


def main() -> None:
    """Run the sessions and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", type=int, default=201)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        for how, parallel in PARALLEL.items():
            more: dict[int, float] = {}
            for tests in (1, options.tests):
                (folder / "test_it.py").write_text(SOURCE.format(tests=tests), "utf-8")
                found: dict[tuple[str, ...], list[float]] = {MEASURED: [], UNMEASURED: []}
                for _ in range(options.rounds):
                    for choice, times in found.items():
                        times.append(user_seconds(folder, *parallel, *choice))
                with_it, without = (statistics.median(times) for times in found.values())
                more[tests] = with_it - without
                print(f"{how}, {tests} tests: {with_it:.2f} s with, {without:.2f} s without")
            each = (more[options.tests] - more[1]) / (options.tests - 1)
            print(f"{how}: first test {more[1] * 1e3:+.0f} ms, each further {each * 1e3:+.2f} ms")


if __name__ == "__main__":
    main()
