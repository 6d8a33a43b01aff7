"""Run everything with given versions of torch, each in a new environment; write a row for each.

python benchmarks/versions.py 2.9.1 2.12.1 newest
python benchmarks/versions.py 2.9.0,python=3.10,pytest=8.4.0,xdist=3.6.1 2.14.1,python=3.13
python benchmarks/versions.py --venv PATH --only opinfo published

A row has what `versions_steps.STEPS` found. All rows go to ``results/versions`` after the last
version; `draw_tables.py` draws their table. A step that fails is recorded, the others run, and the
exit status is 1. Needs nothing but Python with pip; uv is used if it is installed, because it is
faster.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from versions_environments import NEWEST, PRE_RELEASE, NotFoundError, Versions, fresh, reused
from versions_steps import STEPS, Environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "versions"
# It reads a file of torch without importing torch, which would take most of the time.
_FOUND = """
import json, platform, runpy
from importlib import metadata, util
from pathlib import Path

torch = runpy.run_path(str(Path(util.find_spec("torch").origin).with_name("version.py")))

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

print(json.dumps({
    "torch": version("torch"), "cuda": torch["cuda"], "python": platform.python_version(),
    "torchvision": version("torchvision"), "triton": version("triton"),
    "pytest": version("pytest"), "xdist": version("pytest-xdist"),
}))
"""


def run(environment: Environment, options: argparse.Namespace) -> dict[str, Any]:
    """Run the steps that are asked for; return the row."""
    found = subprocess.run(
        [environment.python, "-c", _FOUND], capture_output=True, text=True, check=True, cwd=ROOT
    )
    row = {**json.loads(found.stdout), "processor": processor(), "steps": {}}
    file = file_of(row)
    if options.only and is_recorded(options) and file.exists():  # the other steps are kept
        row["steps"] = json.loads(file.read_text(encoding="utf-8"))["steps"]
    about = {"commit": commit(), "fresh": options.venv is None}
    for name in options.only or STEPS:
        print(f"== torch {row['torch']}, Python {row['python']}: {name}", flush=True)
        begun = datetime.datetime.now(datetime.timezone.utc)
        step = STEPS[name](environment, options.tests)
        seconds = (datetime.datetime.now(datetime.timezone.utc) - begun).total_seconds()
        print(f"== {name}: {'passed' if step['ok'] else 'FAILED'}, {seconds:.0f} s", flush=True)
        row["steps"][name] = {
            "date": begun.date().isoformat(),
            **about,
            "seconds": round(seconds),
            **step,
        }
        if is_recorded(options):
            write(partial(file), row)  # what was found is kept if a later step is interrupted
    return row


def partial(file: Path) -> Path:
    """Return where a row lies until all versions were run.

    The tests of the next step compare the documentation's tables with the rows in the folder.
    """
    return file.with_suffix(".json.partial")


def finish() -> None:
    """Put the rows that were written in their places."""
    for file in RESULTS.glob("*.json.partial"):
        file.replace(file.with_suffix(""))


def is_recorded(options: argparse.Namespace) -> bool:
    """Whether the row is written: not that of a trial or a pre-release."""
    return not options.tests and all(asked.torch != PRE_RELEASE for asked in options.versions)


def write(file: Path, row: dict[str, Any]) -> None:
    """Write a row with its steps in their usual order, and what holds for all of them."""
    row["steps"] = {name: row["steps"][name] for name in STEPS if name in row["steps"]}
    steps = row["steps"].values()
    row["date"] = min(step["date"] for step in steps)
    row["commits"] = sorted({step["commit"] for step in steps})
    row["fresh"] = all(step["fresh"] for step in steps)
    row["complete"] = list(row["steps"]) == list(STEPS)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def file_of(row: dict[str, Any]) -> Path:
    """Return the file of a row: one for each version of torch, Python and pytest."""
    python = row["python"].rpartition(".")[0]
    return RESULTS / f"torch-{row['torch']}-python-{python}-pytest-{row['pytest']}.json"


def processor() -> str:
    """Return the name of the processor and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the checkout's commit, with ``+`` if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    # Rows of other versions, which this script has written, are no difference.
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results/versions")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: if neither a version nor an environment is given, or both.
    """
    parser = argparse.ArgumentParser(
        prog=".ci/against",
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "versions",
        nargs="*",
        type=Versions.read,
        metavar="VERSION",
        help=f"of torch, or {NEWEST}, or {PRE_RELEASE}; ,python=3.12 ,pytest=8.4.0 and "
        f",xdist=3.6.1 may follow; by default this Python, the newest pytest and pytest-xdist",
    )
    parser.add_argument(
        "--index",
        default=os.environ.get("TORCH_INDEX"),
        metavar="URL",
        help=f"where {PRE_RELEASE} is found, if not where pip looks; by default $TORCH_INDEX",
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, help="run these steps of a row again")
    parser.add_argument(
        "--venv", type=Path, metavar="PATH", help="use this environment; the row says so"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", help="a trial with these tests: prints, writes no row"
    )
    options = parser.parse_args(arguments)
    if bool(options.versions) == bool(options.venv):
        parser.error("give versions of torch, such as 2.9.1, or an environment with --venv")
    if len(options.versions) > 1 and any(one.torch == PRE_RELEASE for one in options.versions):
        parser.error(f"{PRE_RELEASE} writes no row, so give no other version with it")
    return options


def main() -> None:
    """Run all versions; exit with 1 if a step failed in any of them."""
    options = parse()
    # The environment is removed, and rows that were written are kept, also if this is terminated.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    failed: list[str] = []
    try:
        for asked in options.versions or [None]:
            used = fresh(asked, options.index) if asked else reused(options.venv)
            try:
                with used as environment:
                    row = run(environment, options)
            except (subprocess.CalledProcessError, NotFoundError) as error:
                failed.append(
                    f"torch {asked.torch if asked else options.venv}: no environment: {error}"
                )
                continue
            if not is_recorded(options):
                print(json.dumps(row, indent=1))
            failed += _failed_in(row)
    finally:
        finish()
    if is_recorded(options):
        print("to show the rows: python benchmarks/draw_tables.py")
    print("\n".join(f"FAILED {line}" for line in failed) or "all passed")
    sys.exit(1 if failed else 0)


def _failed_in(row: dict[str, Any]) -> Iterator[str]:
    for name, step in row["steps"].items():
        if not step["ok"]:
            yield f"torch {row['torch']}, Python {row['python']}: {name}"
            yield from (f"    {test}" for test in step.get("failed", ()))


if __name__ == "__main__":
    main()
