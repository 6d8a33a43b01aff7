"""Print what a session of 20,000 tests costs with a report, a JSON file and a page.

    python benchmarks/many_tests.py [--rounds 3] [--tests 20000] [--json FILE]

Each test makes a tensor and drops it. Sessions without the plugin alternate with ones that print a
table and write both files. Times are medians of user CPU time of whole processes, memory is their
highest resident size. Run it from another checkout with ``PYTHONPATH`` to measure that one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import conditions
from session_cost import OTHERS

TESTS = """
import pytest, torch
@pytest.mark.parametrize("number", range({tests}))
def test_it(number): torch.ones(64)
"""
FILES = ("r.json", "r.html")
MEASURED = ("--cka-memory-report", "--cka-memory-device=cpu")
WRITTEN = ("--cka-memory-json=r.json", "--cka-memory-html=r.html")
UNMEASURED = ("-p", "no:cka_memory")


def cost(*options: str) -> dict[str, float]:
    """Run a session here; return its user CPU time in seconds, and its peak in bytes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [part for name in (*OTHERS, "xdist") for part in ("-p", f"no:{name}")]
    log = (os.POSIX_SPAWN_OPEN, 1, "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=[log])
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"the session failed: {Path.cwd() / 'log.txt'}")
    return {"user_seconds": usage.ru_utime, "peak_bytes": usage.ru_maxrss * 1024}


def measured(tests: int, rounds: int) -> dict[str, Any]:
    """Return the medians with and without the plugin, and the size of all that was written."""
    found: dict[str, Any] = {"tests": tests, "rounds": rounds}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("pytest.ini").write_text("[pytest]\n", "utf-8")
        Path("test_it.py").write_text(TESTS.format(tests=tests), "utf-8")
        runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
        for _ in range(rounds):
            runs["without"].append(cost(*UNMEASURED))
            runs["with"].append(cost(*MEASURED, *WRITTEN))
        for kind, costs in runs.items():
            for key in costs[0]:
                found[f"{key}_{kind}"] = round(statistics.median(one[key] for one in costs), 1)
        found["file_bytes"] = {file: Path(file).stat().st_size for file in FILES}
        found["log_lines"] = len(Path("log.txt").read_text("utf-8").splitlines())
        os.chdir("/")
    return found


def main() -> None:
    """Measure, print, and write the result if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out = None if options.json is None else options.json.resolve()
    text = json.dumps(measured(options.tests, options.rounds), indent=1)
    print(text, json.dumps(conditions(("torch", "pytest")), indent=1), sep="\n")
    if out is not None:
        out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
