"""Print what the plugin costs a project that does not use it: time with and without it.

    python benchmarks/startup_cost.py [--rounds 15] [--tests 10000]

Two kinds of session alternate with and without ``-p no:cka_memory``: one that collects nothing, and
one of many trivial tests. The table has processor time and wall time. Other programs on the machine
disturb wall time more, and the minimum less than the median.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WITHOUT = ("-p", "no:cka_memory")
_BARE = ("cov", "randomly", "repeat", "asyncio", "hypothesispytest", "timeout", "xdist")


class Cost(NamedTuple):
    """The time of one session, in seconds."""

    processor: float
    wall: float


def cost_of(folder: Path, *options: str) -> Cost:
    """Run pytest in `folder`, without other plugins, to compare the smallest possible session."""
    others = [part for name in _BARE for part in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others, *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 5):  # 5: no test was collected
        raise SystemExit(f"{' '.join(command)} exited with status {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, wall)


def alternating_costs(folder: Path, rounds: int, *options: str) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of `rounds` sessions with the plugin and of as many without, alternating."""
    used, unused = [], []
    cost_of(folder, *options)  # compiles and fills the caches of the file system
    for turn in range(rounds):
        pair = ((used, ()), (unused, WITHOUT))
        for costs, more in pair if turn % 2 else reversed(pair):
            costs.append(cost_of(folder, *options, *more))
    return used, unused


def _report(what: str, used: list[Cost], unused: list[Cost]) -> None:
    print(what)
    for number, name in enumerate(Cost._fields):
        for statistic in (statistics.median, min):
            more, less = (statistic([cost[number] for cost in costs]) for costs in (used, unused))
            print(
                f"  {name:9} {statistic.__name__:6} {more * 1000:9.1f} ms with, "
                f"{less * 1000:9.1f} ms without: {(more - less) * 1000:+7.1f} ms, "
                f"x {more / less:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tests", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        costs = alternating_costs(folder, arguments.rounds, "--collect-only")
        _report(f"empty project, --collect-only, {arguments.rounds} rounds", *costs)
        tests = "".join(f"def test_{n}(): pass\n" for n in range(arguments.tests))
        (folder / "test_trivial.py").write_text(tests, "utf-8")
        rounds = max(3, arguments.rounds // 3)
        _report(
            f"{arguments.tests} trivial tests, {rounds} rounds", *alternating_costs(folder, rounds)
        )


if __name__ == "__main__":
    main()
