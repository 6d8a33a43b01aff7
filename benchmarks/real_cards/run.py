"""Predict what real cards needed, then compare with what was published.

    python benchmarks/real_cards/run.py [CASE ...] [--interpreter PYTHON ...]

Each case is a file in ``cases``: what somebody measured on a card and published, and a program
that does the same on an emulated one. The predictions are written to the results before they are
compared. The first prediction of a figure is kept: a figure is blind if the current one is still
the first, and the case does not say that it was changed. Each case takes up to ten minutes and
6 GB of the computer's memory, and no GPU. With several interpreters, a case runs with the one
whose torch is nearest to the source's and that has the packages that the case needs. Some cases run
the source's own program; ``--sources`` has copies of the repositories (see ``sources.py``).
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import case as cases
import sources
from case import Case

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "real-cards.json"
PROGRAM = "REAL_CARDS_PROGRAM"
"""The environment variable with the folder that has the source's own program."""
RECORDING = "REAL_CARDS_RECORDING"
"""The environment variable with the file to record into."""
LIMIT_S = int(os.environ.get("REAL_CARDS_LIMIT_S", "600"))
_ASK = (
    "import sys, torch, importlib.util as u;"
    "print(torch.__version__, *(n for n in sys.argv[1:] if u.find_spec(n)))"
)


def chosen(case: Case, interpreters: Sequence[str]) -> str:
    """Return the interpreter whose torch is nearest to the case's.

    Raises:
        SystemExit: if none has the packages that the case needs.
    """
    fitting = []
    for interpreter in interpreters:
        command = [interpreter, "-c", _ASK, *case.needs]
        version, *found = subprocess.check_output(command, text=True).split()
        if set(found) == set(case.needs):
            fitting.append((abs(_number(version) - _number(case.torch)), interpreter))
    if not fitting:
        raise SystemExit(f"{case.title}: no interpreter has {', '.join(case.needs)}")
    return min(fitting)[1]


def _number(version: str) -> int:
    major, minor = version.split(".")[:2]
    return 1000 * int(major) + int(minor)


def predict(
    name: str,
    case: Case,
    run: str,
    interpreter: str,
    folder: str,
    *,
    late: bool = False,
    recording: Path | None = None,
) -> dict[str, Any]:
    """Run one process of a case on the emulated card; return its figures and how long it took.

    Args:
        name: of the case.
        case: the case.
        run: the process.
        interpreter: of Python, which has torch.
        folder: has the source's own program, if the case runs that.
        late: whether events on the card are as late as possible: then the reserve is the highest
            that side streams can cause.
        recording: where to write what the allocator did, from the start, if that is wanted.
    """
    with tempfile.TemporaryDirectory() as written:
        into = Path(written) / "figures"
        options = ["--card", case.card, "--devices", str(case.devices), "--no-values"]
        options += ["--memory", case.memory] if case.memory else []
        options += ["--late-events"] if late else []
        command = [interpreter, "-W", "ignore", "-m", "emulated_cuda", *options, __file__]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        given |= {RECORDING: str(recording)} if recording else {}
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "--one", name, run, str(into)],
                env={**given, **case.environment, PROGRAM: folder},
                timeout=LIMIT_S,
                check=False,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took over {LIMIT_S} s"}
        if done.returncode or not into.exists():
            lines = (done.stderr + done.stdout).strip().splitlines()
            return {"failed": "\n".join(lines[-12:])}
        found: dict[str, Any] = json.loads(into.read_text("utf-8"))
    return {**found, "seconds": round(time.monotonic() - begin, 1)}


def one(name: str, run: str, into: Path) -> None:
    """Measure in this process, which has the emulated card."""
    import torch

    if RECORDING in os.environ:
        torch.cuda.memory._record_memory_history(stacks="python", context=None)
    figures = cases.module(name).measured(run)
    if RECORDING in os.environ:
        torch.cuda.memory._dump_snapshot(os.environ[RECORDING])
    found = {"torch": torch.__version__.partition("+")[0], "figures": figures}
    into.write_text(json.dumps(found), encoding="utf-8")


def stored() -> dict[str, dict[str, Any]]:
    """Return the predictions that were written before, by case."""
    found: dict[str, dict[str, Any]] = (
        json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    )
    return found


def write(results: Mapping[str, Any]) -> None:
    """Write all predictions."""
    text = json.dumps(dict(sorted(results.items())), indent=1) + "\n"
    RESULTS.write_text(text, encoding="utf-8")


def note(name: str, run: str, found: Mapping[str, Any]) -> None:
    """Add the predictions of a process to the results, or why it failed; the first ones stay."""
    with (Path(tempfile.gettempdir()) / "real-cards.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runners may write at a time
        _note(name, run, found)


def _note(name: str, run: str, found: Mapping[str, Any]) -> None:
    results = stored()
    kept = results.setdefault(name, {"figures": {}, "seconds": {}})
    failed = kept.setdefault("failed", {})
    failed.pop(run, None)
    if "failed" in found:
        failed[run] = reason(found["failed"])
        write(results)
        return
    kept["torch"] = found["torch"]
    kept["seconds"][run] = found["seconds"]
    today = datetime.now(timezone.utc).date().isoformat()
    for figure, size in found["figures"].items():
        before = kept["figures"].get(figure, {"first_bytes": size, "first_date": today})
        kept["figures"][figure] = {**before, "bytes": size}
    write(results)


def note_late(name: str, found: Mapping[str, Any]) -> None:
    """Add the reserves of a process whose events were late to its predictions."""
    results = stored()
    figures = results.get(name, {}).get("figures", {})
    for figure, size in found["figures"].items():
        if figure in figures and "reserved" in cases.load(name).figures[figure].counts:
            figures[figure]["late_bytes"] = size
    write(results)


def note_other_addresses(
    name: str, case: Case, run: str, interpreter: str, folder: str, count: int
) -> None:
    """Add what is reserved at the end of a process if the card's addresses have other orders.

    Raises:
        SystemExit: if the process fails, or does not have one figure of the reserve at its end.
    """
    with tempfile.TemporaryDirectory() as written:
        recording = Path(written) / "recording.pickle"
        found = predict(name, case, run, interpreter, folder, recording=recording)
        if "failed" in found:
            raise SystemExit(found["failed"])
        script = str(Path(__file__).with_name("address_orders.py"))
        given = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", script, str(recording), str(count)]
        sizes = json.loads(subprocess.check_output(command, env=given, text=True))
    reserves = [one for one in found["figures"] if case.figures[one].counts == "reserved"]
    if len(reserves) != 1:
        raise SystemExit(f"{name}, {run}: {len(reserves)} figures of the reserve at its end")
    print(f"  {reserves[0]}: {sizes}", flush=True)
    with (Path(tempfile.gettempdir()) / "real-cards.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = stored()
        results[name]["figures"][reserves[0]]["other_addresses_bytes"] = sizes
        write(results)


def reason(text: str) -> str:
    """Return the line of a process's output that says why it failed."""
    lines = [line for line in text.splitlines() if not line.startswith("emulated_cuda: ")]
    told = [line for line in lines if re.match(r"[\w.]*(Error|took over)", line)]
    return (told or lines or ["no output"])[-1][:200]


def compare(name: str, case: Case) -> None:
    """Print each prediction beside the published figure."""
    found = stored().get(name, {}).get("figures", {})
    for figure, published in case.figures.items():
        if figure not in found:
            print(f"  {figure}: no prediction")
            continue
        size = found[figure]["bytes"]
        equal = "as printed" if published.is_equal(size) else f"{published.error(size):+.3%}"
        shown = size / cases.UNITS[published.unit]
        print(f"  {figure}: {shown:.6g}, published {published.printed} {published.unit}: {equal}")
    unknown = [figure for figure in found if figure not in case.figures]
    if unknown:
        print(f"  not published: {unknown}")


def _predict_all(name: str, case: Case, options: argparse.Namespace) -> None:
    interpreter = chosen(case, options.interpreter)
    if case.programs and not options.sources:
        print(f"  left out: it needs --sources with {', '.join(case.programs)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        for program, parts in case.programs.items():
            repository, _, commit = program.partition("@")
            git = sources.git_directory(options.sources, repository)
            sources.extract(git, commit, parts, Path(folder))
        for run in options.runs or case.runs:
            if options.orders:
                note_other_addresses(name, case, run, interpreter, folder, options.orders)
                continue
            found = predict(name, case, run, interpreter, folder, late=options.late)
            if "failed" in found:
                print(f"  {run}: {found['failed']}", flush=True)
            if not options.late:
                note(name, run, found)
            elif "failed" not in found:
                note_late(name, found)


def main() -> None:
    """Predict and compare the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases.names()))
    parser.add_argument("--runs", nargs="+", help="only these processes of a case")
    parser.add_argument("--interpreter", nargs="+", default=[sys.executable])
    parser.add_argument(
        "--orders", type=int, help="add the reserve with addresses in as many orders"
    )
    parser.add_argument("--sources", type=Path, help="copies of the sources' repositories")
    parser.add_argument("--compare", action="store_true", help="run nothing")
    parser.add_argument(
        "--late", action="store_true", help="predict again, with the highest reserve by streams"
    )
    parser.add_argument("--json", type=Path, help="write here instead, as renew.py does")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], args.one[1], Path(args.one[2]))
        return
    if args.json:
        global RESULTS
        RESULTS = args.json
    for name in args.cases or cases.names():
        case = cases.load(name)
        print(f"{name}: {case.title}", flush=True)
        if not args.compare:
            _predict_all(name, case, args)
        compare(name, case)


if __name__ == "__main__":
    main()
