"""Whether figures of one machine are judged rightly on another: threads and instruction sets.

    python benchmarks/machines.py programs [--threads 4] --json results.json
    python benchmarks/machines.py networks [--every 4] --json results.json

``programs`` records a baseline, a report and a history of thirty programs with one thread, and
judges them with every other number of threads and instruction set, unchanged and with 10 % more:
by the baseline, ``compare``, ``trend`` and a relation of two tests. ``networks`` counts how many
peaks of networks of torchvision differ, with scratch memory and without it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
THREADS = (1, 2, 4, 8)
SETS = {
    "as it is": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX"},
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--cka-memory-device=cpu", "--tb=no")


def environment(threads: int, instructions: str, **more: str) -> dict[str, str]:
    """Return the variables of a process on such a machine."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **SETS[instructions], **more}


def run(folder: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def regions(path: Path) -> list[dict[str, Any]]:
    """Return the regions of a report."""
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["regions"]
    return found


def broken(path: Path, test: str) -> int:
    """Return how many regions of a test have broken their limit."""
    return sum(it["verdict"] == "BREACH" and test in it["nodeid"] for it in regions(path))


def programs(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Judge the programs on machines with these numbers of threads; return what each has found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(FOLDER / "machines_programs.py", folder / "test_programs.py")
        first = environment(1, "as it is")
        run(folder, first, *PYTEST, "--cka-memory-update-baseline", "--cka-memory-json=old.json")
        # Three sessions, because a single high session would be an outlier.
        for _ in range(3):
            run(
                folder,
                first,
                *PYTEST,
                "--cka-memory-history=start.jsonl",
                "-k",
                "against_the_baseline",
            )
        rows = []
        for threads in numbers:
            for instructions in SETS:
                for planted in (False, True):
                    rows.append(judged(folder, threads, instructions, planted=planted))
                    print(rows[-1], flush=True)
        return rows


def judged(folder: Path, threads: int, instructions: str, *, planted: bool) -> dict[str, Any]:
    """Return how many programs each comparison finds worse on a machine."""
    env = environment(threads, instructions, **({"PLANTED": "1"} if planted else {}))
    shutil.copy(folder / "start.jsonl", folder / "history.jsonl")
    session = run(folder, env, *PYTEST, "--cka-memory-json=new.json")
    for _ in range(2):
        run(
            folder, env, *PYTEST, "--cka-memory-history=history.jsonl", "-k", "against_the_baseline"
        )
    tool = ("-m", "pytest_cka_memory")
    compared = run(folder, env, *tool, "compare", "old.json", "new.json", "--format", "json")
    trend = run(folder, env, *tool, "trend", "history.jsonl").stdout
    worse = {it["nodeid"] for it in json.loads(compared.stdout)["changes"] if it["regression"]}
    rose = {
        line.partition(" program:")[0].strip() for line in trend.splitlines() if "stayed" in line
    }
    new = folder / "new.json"
    return {
        "threads": threads,
        "instructions": instructions,
        "planted": planted,
        "programs": sum("against_the_baseline" in it["nodeid"] for it in regions(new)),
        "baseline": broken(new, "against_the_baseline"),
        "compare": sum("against_the_baseline" in nodeid for nodeid in worse),
        "trend": len(rose),
        "relation": broken(new, "against_another_test"),
        "status": session.returncode,
    }


def networks(every: int) -> list[dict[str, Any]]:
    """Return the peaks of networks on each machine."""
    cases = [(threads, "as it is") for threads in THREADS] + [(1, name) for name in list(SETS)[1:]]
    rows = []
    for threads, instructions in cases:
        arguments = (str(FOLDER / "machines_networks.py"), str(every))
        found = run(FOLDER, environment(threads, instructions), *arguments)
        if found.returncode:
            raise SystemExit(found.stderr)
        rows.append(
            {"threads": threads, "instructions": instructions, "peaks": json.loads(found.stdout)}
        )
        print(threads, instructions, differing(rows[0]["peaks"], rows[-1]["peaks"]), flush=True)
    return rows


def differing(old: dict[str, list[int]], new: dict[str, list[int]]) -> tuple[int, int, int]:
    """Return how many peaks differ with scratch memory, how many without, and of how many."""
    with_scratch = sum(old[name][0] != new[name][0] for name in old)
    without = sum(old[name][1] != new[name][1] for name in old)
    return with_scratch, without, len(old)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["programs", "networks"])
    parser.add_argument("--every", type=int, default=1, help="take each so many-th network")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="to judge with")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = programs(args.threads) if args.part == "programs" else networks(args.every)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
