"""What it takes to explain a region that retains many tensors, by how they are held.

    python benchmarks/explanation_cost.py [--most 1000000] [--json results.json]

Each case runs in a process of its own: a region keeps so many tensors of two numbers, then
``region.retained`` is read, which finds what holds them. Times are CPU time; the memory is the
resident memory of the process, before and at its highest during the explanation. The exponent of a
row is that by which its time has grown since the row before; below 10,000 tensors the time is
mostly that of everything else that the program has.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import Row
from tabulate import tabulate

SIZES = (1_000, 10_000, 32_000, 100_000, 1_000_000)
KEPT: list[Any] = []


class Holder:
    """An object with attributes."""


def made() -> Any:
    """Return a new tensor."""
    import torch

    return torch.empty(2)


def attributes(count: int) -> Holder:
    """Return an object with an attribute for each tensor."""
    found = Holder()
    for number in range(count):
        setattr(found, f"batch_{number}", made())
    return found


def linked(count: int) -> Any:
    """Return a list that has a tensor and a list, and so on."""
    found: Any = None
    for _ in range(count):
        found = [made(), found]
    return found


def closures(count: int) -> list[Callable[[], Any]]:
    """Return functions that each keep a tensor."""

    def one() -> Callable[[], Any]:
        tensor = made()
        return lambda: tensor

    return [one() for _ in range(count)]


def chain(count: int) -> Any:
    """Return a sum, whose graph has a tensor for each addition."""
    import torch

    weight, total = torch.ones(2, requires_grad=True), torch.zeros(2)
    for _ in range(count):
        total = total + weight * made()
    return total


WAYS: dict[str, Callable[[int], Any]] = {
    "list": lambda count: [made() for _ in range(count)],
    "tuple": lambda count: tuple([made() for _ in range(count)]),
    "dict": lambda count: {number: made() for number in range(count)},
    "set": lambda count: {made() for _ in range(count)},
    "deque": lambda count: deque(made() for _ in range(count)),
    "attributes": attributes,
    "lists in a list": lambda count: [[made()] for _ in range(count)],
    "linked lists": linked,
    "closures": closures,
    "autograd chain": chain,
}


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def once(way: str, count: int) -> Row:
    """Return the row of one case, measured in this process."""
    from pytest_cka_memory import MemoryProbe

    with MemoryProbe("cpu").measure() as region:
        KEPT.append(WAYS[way](count))
    before_mb, start = resident_mb(), time.process_time()
    groups = region.retained
    seconds = time.process_time() - start
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    explained = sum(group.bytes for group in groups if group.held_by is not None)
    return {
        "held by": way,
        "tensors": count,
        "seconds": round(seconds, 3),
        "resident_mb": round(before_mb),
        "most_mb": round(most_mb),
        "groups": len(groups),
        "explained": round(explained / region.retained_bytes, 4),
    }


def row_of(way: str, count: int, rounds: int) -> Row:
    """Return the medians of new processes."""
    command = [sys.executable, __file__, "--once", way, str(count)]
    rows = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    names = ("seconds", "resident_mb", "most_mb")
    return {**rows[0], **{name: statistics.median(row[name] for row in rows) for name in names}}


def main() -> None:
    """Measure all cases, print a table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=SIZES[-1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", nargs=2)
    arguments = parser.parse_args()
    if arguments.once:
        way, count = arguments.once
        print(json.dumps(once(way, int(count))), flush=True)
        os._exit(0)  # to free a chain of a million nodes would overflow the stack
    rows: list[Row] = []
    for way in WAYS:
        before: Row | None = None
        for count in (size for size in SIZES if size <= arguments.most):
            row = row_of(way, count, 1 if count > 100_000 else arguments.rounds)
            if before is not None:
                rise = math.log(row["seconds"] / before["seconds"])
                row["exponent"] = round(rise / math.log(count / before["tensors"]), 2)
            rows.append(row)
            before = row
    print(tabulate(rows, headers="keys"))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
