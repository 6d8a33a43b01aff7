"""What one more empty test costs a session, and one more live tensor the end of a region.

    python benchmarks/unit_cost.py [--rounds 5] [--json results.json] [--instructions]

Sessions of 1 and 1,000 empty tests run with and without ``--cka-memory-report``, in turn; both
import torch. Their difference in user CPU time is that of the session and of each further test. It
is small beside what a busy machine adds, so it is computed twice: from the medians of all rounds,
and from the shortest time of each kind of session. With ``--instructions``, valgrind counts instead
the instructions of each of 300 further tests, which hardly vary; the collector does not run by
itself then, and nothing else is measured.

Regions end while many tensors of one number are live: all of them older than the region, which
keeps one tensor more; or made in it and kept. Each case is measured with and without the tensors.
``freed``: the region also frees an older tensor, so that what its tensors requested is not the
difference of two levels. ``held``: a limit on retained memory is broken, and who holds the tensors
is searched for. A plain ``gc.collect()`` after the region is the least that an end takes which
retains something: it has two collections. Times are medians of CPU time.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from processes import Row
from tabulate import tabulate

DEVICES = ("cpu", "emulate:cuda,values=off")
CASES = ("older", "kept", "older, freed", "kept, freed", "older, held", "kept, held")
COUNTS = (1_000, 10_000, 100_000)
TESTS = 1_000
COUNTED_TESTS = 301
_OTHERS = ("cov", "randomly", "repeat", "asyncio", "hypothesispytest", "timeout", "rerunfailures")


class Explains:
    """Asks for what holds the retained tensors, as a broken limit does."""

    draws_paths = False

    def figures_to_explain(self, record: Any) -> Collection[str]:
        """Return the figure."""
        return ("retained_bytes",)

    def named_values(self) -> Mapping[str, Any]:
        """Return no names."""
        return {}


class End(NamedTuple):
    """What was measured at one end of a region."""

    end_s: float
    collection_s: float
    retained_bytes: int


def region_end(device: str, case: str, count: int) -> End:
    """Return the times of a region's end and of a collection while `count` tensors are live."""
    import torch

    from pytest_cka_memory import MemoryProbe

    probe = MemoryProbe(device, explainer=Explains() if "held" in case else None)

    def made(number: int) -> list[Any]:
        return [torch.empty(1, device=probe.device) for _ in range(number)]

    is_older = case.startswith("older")
    live, other = made(count if is_older else 0), made(1)
    gc.collect()
    with probe.measure():
        pass
    opened = probe.measure()
    region = opened.__enter__()
    live += made(1 if is_older else count + 1)
    if "freed" in case:
        other.clear()
    start = time.process_time()
    opened.__exit__(None, None, None)
    ended = time.process_time()
    gc.collect()
    return End(ended - start, time.process_time() - ended, region.retained_bytes)


def region_rows(device: str, rounds: int) -> list[Row]:
    """Return a row for each case and number of tensors, measured in this process."""
    rows: list[Row] = []
    for case in CASES:
        for count in COUNTS:
            pairs = [
                (region_end(device, case, count), region_end(device, case, 0))
                for _ in range(rounds + 1)
            ][1:]
            more = statistics.median(many.end_s - none.end_s for many, none in pairs)
            collected = statistics.median(
                many.collection_s - none.collection_s for many, none in pairs
            )
            rows.append(
                {
                    "part": "region end",
                    "device": device,
                    "case": case,
                    "tensors": count,
                    "end_us_per_tensor": round(more / count * 1e6, 2),
                    "collection_us_per_tensor": round(collected / count * 1e6, 2),
                    "retained_bytes": pairs[0][0].retained_bytes,
                }
            )
    return rows


MEASURED = ("--cka-memory-report", "--cka-memory-device=cpu")
_VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


def session(tests: int, *options: str) -> list[str]:
    """Return the command that runs a session of empty tests in a folder of :func:`sessions`."""
    others = [part for name in (*_OTHERS, "xdist") for part in ("-p", f"no:{name}")]
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others]
    return [*plain, *options, f"test_{tests}.py"]


def write_sessions(folder: Path, conftest: str, counts: Collection[int]) -> None:
    """Write files of so many empty tests each."""
    (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
    (folder / "conftest.py").write_text(conftest, "utf-8")
    for tests in counts:
        code = "".join(f"def test_{number}(): pass\n" for number in range(tests))
        (folder / f"test_{tests}.py").write_text(code, "utf-8")


def user_s(command: list[str], folder: Path) -> float:
    """Return the user CPU time of one session in a new process."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {process.returncode}")
    return used.ru_utime


def session_rows(rounds: int) -> list[Row]:
    """Return a row with the time of sessions, of one test and of many."""
    found: dict[int, list[tuple[float, float]]] = {1: [], TESTS: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sessions(folder, "import torch\n", found)
        for _ in range(rounds + 1):  # the first compiles what is imported
            for tests, pairs in found.items():
                measured = user_s(session(tests, *MEASURED), folder)
                pairs.append((measured, user_s(session(tests), folder)))
    medians, least = (
        {
            tests: [of_rounds(column) for column in zip(*pairs[1:], strict=True)]
            for tests, pairs in found.items()
        }
        for of_rounds in (statistics.median, min)
    )
    once, many = (medians[tests][0] - medians[tests][1] for tests in (1, TESTS))
    least_once, least_many = (least[tests][0] - least[tests][1] for tests in (1, TESTS))
    return [
        {
            "part": "session",
            "tests": TESTS,
            "with_s": round(medians[TESTS][0], 2),
            "without_s": round(medians[TESTS][1], 2),
            "first_ms": round(once * 1e3, 1),
            "each_further_ms": round((many - once) / (TESTS - 1) * 1e3, 3),
            "least_further_ms": round((least_many - least_once) / (TESTS - 1) * 1e3, 3),
        }
    ]


def instructions(command: list[str], folder: Path) -> int:
    """Return how many instructions a session executes."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    run = partial(subprocess.run, cwd=folder, env=environment, capture_output=True, text=True)
    done = run([*_VALGRIND, *command], check=True)
    (count,) = re.findall(r"I +refs: +([\d,]+)", done.stderr)
    return int(count.replace(",", ""))


def instruction_rows() -> list[Row]:
    """Return a row with the instructions of one further test, with the plugin and without."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sessions(folder, "import torch, gc\ngc.disable()\n", (1, COUNTED_TESTS))
        per_test = []
        for options in (MEASURED, ()):
            commands = [session(tests, *options) for tests in (1, COUNTED_TESTS)]
            for command in commands:  # compiles the tests, and what they import
                user_s(command, folder)
            one, many = (instructions(command, folder) for command in commands)
            per_test.append((many - one) / (COUNTED_TESTS - 1))
    return [
        {
            "part": "instructions",
            "with": round(per_test[0]),
            "without": round(per_test[1]),
            "more": round(per_test[0] - per_test[1]),
        }
    ]


def main() -> None:
    """Measure, print, and write the rows if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", choices=DEVICES, help="regions on this device, as JSON")
    parser.add_argument("--instructions", action="store_true", help="count them; needs valgrind")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the first session compiles for the others
    if options.once:
        print(json.dumps(region_rows(options.once, options.rounds)))
        return
    rows = instruction_rows() if options.instructions else session_rows(options.rounds)
    for device in () if options.instructions else DEVICES:
        # An emulated device is loaded before torch, so in a new process.
        command = [sys.executable, __file__, "--once", device, "--rounds", str(options.rounds)]
        rows += json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    for part in dict.fromkeys(row["part"] for row in rows):
        shown = [
            {k: v for k, v in row.items() if k != "part"} for row in rows if row["part"] == part
        ]
        print(tabulate(shown, headers="keys"), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
