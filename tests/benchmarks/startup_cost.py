"""What the plugin costs a project that does not use it: processor time, with and without it.

    python tests/benchmarks/startup_cost.py [--rounds 15] [--tests 10000]

Two sessions, each run by turns with and without ``-p no:cka_memory``: one that collects nothing,
and one of many trivial tests. Reported are medians of user and system time, which other programs
on the machine disturb less than the time on the wall, shown beside it.
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
    """Of one session, in seconds."""

    processor: float
    wall: float


def cost_of(folder: Path, *options: str) -> Cost:
    """Run pytest in `folder`; other plugins are off, so that the smallest session is compared."""
    others = [part for name in _BARE for part in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others, *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 5):  # 5: no test was collected
        raise SystemExit(f"{' '.join(command)} left with status {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, wall)


def by_turns(folder: Path, rounds: int, *options: str) -> tuple[Cost, Cost]:
    """Medians of `rounds` sessions with the plugin and as many without, one after the other."""
    used, unused = [], []
    cost_of(folder, *options)  # compiles and fills the caches of the file system
    for turn in range(rounds):
        pair = ((used, ()), (unused, WITHOUT))
        for costs, more in pair if turn % 2 else reversed(pair):
            costs.append(cost_of(folder, *options, *more))
    return _median(used), _median(unused)


def _median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def _report(what: str, used: Cost, unused: Cost) -> None:
    print(what)
    for name, more, less in zip(Cost._fields, used, unused, strict=True):
        print(
            f"  {name:9} {more * 1000:9.1f} ms with, {less * 1000:9.1f} ms without: "
            f"{(more - less) * 1000:+7.1f} ms, x {more / less:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tests", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        costs = by_turns(folder, arguments.rounds, "--collect-only")
        _report(f"empty project, --collect-only, {arguments.rounds} rounds", *costs)
        tests = "".join(f"def test_{n}(): pass\n" for n in range(arguments.tests))
        (folder / "test_trivial.py").write_text(tests, "utf-8")
        rounds = max(3, arguments.rounds // 3)
        _report(f"{arguments.tests} trivial tests, {rounds} rounds", *by_turns(folder, rounds))


if __name__ == "__main__":
    main()
