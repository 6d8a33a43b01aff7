"""Run everything with given versions of torch, each in a new environment; write a row for each.

python tests/benchmarks/versions.py 2.9.1 2.12.1 newest
python tests/benchmarks/versions.py 2.9.0 --python 3.10 --pytest 8.4.0 --xdist 3.6.0
python tests/benchmarks/versions.py --venv PATH --only opinfo published

A row has what `versions_steps.STEPS` found, and goes to ``results/versions``; `draw_tables.py`
draws the table of all rows. A step that fails is recorded, the others run, and the exit
status is 1. Needs nothing but Python with pip; uv is used if it is installed, because it is faster.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from versions_steps import STEPS, Environment

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "versions"
NEWEST, PRE_RELEASE = "newest", "pre-release"
FOR_OPINFO = ("expecttest", "scipy")
_FOUND = """
import json, platform
from importlib import metadata
import torch

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

print(json.dumps({
    "torch": version("torch"), "cuda": torch.version.cuda, "python": platform.python_version(),
    "torchvision": version("torchvision"), "triton": version("triton"),
    "pytest": version("pytest"), "xdist": version("pytest-xdist"),
}))
"""
_IS_IT = "import sys; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"


def interpreter(version: str | None) -> str:
    """Return the Python interpreter of a version such as ``3.12``; by default, this one.

    Raises:
        SystemExit: if none is found.
    """
    if version is None:
        return sys.executable
    found = [shutil.which(f"python{version}")]
    if shutil.which("uv"):
        asked = subprocess.run(
            ["uv", "python", "find", "--no-python-downloads", version],
            capture_output=True,
            text=True,
            check=False,
        )
        found.append(asked.stdout.strip())
    for path in found:
        if (
            path
            and not subprocess.run(
                [path, "-c", _IS_IT, version.removesuffix("t")], check=False, capture_output=True
            ).returncode
        ):
            return path
    sys.exit(f"--python: there is no python{version} on the PATH; install it, or name another")


@contextmanager
def fresh(torch: str, options: argparse.Namespace) -> Iterator[Environment]:
    """Install a version of torch and this project into a new environment, removed at the end.

    Raises:
        subprocess.CalledProcessError: if something cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="cka-memory-") as folder:
        venv = Path(folder) / "venv"
        subprocess.run([interpreter(options.python), "-m", "venv", venv], check=True)
        environment = Environment(venv, ROOT)
        wanted = {"torch": torch, "pytest": options.pytest, "pytest-xdist": options.xdist}
        unnamed = (None, NEWEST, PRE_RELEASE)
        pins = [f"{name}=={pin}" for name, pin in wanted.items() if pin not in unnamed]
        names = ["torch", "torchvision", *FOR_OPINFO, *pins, "-e", f"{ROOT}[test]"]
        given = dict(os.environ)
        if torch in unnamed or not shutil.which("uv"):
            install = [environment.python, "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, "--upgrade", "pip"], check=True, env=given)
        else:
            install = ["uv", "pip", "install", "--quiet", "--python", environment.python]
        if torch != NEWEST:  # a version that is named may be newer than a cap of this machine
            given["PIP_CONSTRAINT"] = os.devnull
        if torch == PRE_RELEASE:
            index = ["--index-url", options.index] if options.index else []
            # Before the rest, which is not in an index of nightly builds and keeps this torch.
            first = [*install, "--pre", *index, "torch", "torchvision"]
            subprocess.run(first, check=True, env=given)
        subprocess.run([*install, *names], check=True, env=given)
        yield environment


@contextmanager
def reused(venv: Path) -> Iterator[Environment]:
    """Use an environment that exists, and leave it."""
    yield Environment(venv.absolute(), ROOT)


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
    return not options.tests and PRE_RELEASE not in options.versions


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
    changed = git("status", "--porcelain", "--", ".", ":!tests/benchmarks/results/versions")
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
        "versions", nargs="*", metavar="VERSION", help=f"of torch, or {NEWEST}, or {PRE_RELEASE}"
    )
    parser.add_argument(
        "--index",
        default=os.environ.get("TORCH_INDEX"),
        metavar="URL",
        help=f"where {PRE_RELEASE} is found, if not where pip looks; by default $TORCH_INDEX",
    )
    parser.add_argument("--python", help="such as 3.12; by default the one that runs this")
    parser.add_argument("--pytest", help="by default the newest")
    parser.add_argument("--xdist", help="of pytest-xdist; by default the newest")
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
    if PRE_RELEASE in options.versions and len(options.versions) > 1:
        parser.error(f"{PRE_RELEASE} writes no row, so give no other version with it")
    if options.venv and (options.python or options.pytest or options.xdist):
        parser.error("--python, --pytest and --xdist choose what to install, --venv installs none")
    return options


def main() -> None:
    """Run all versions; exit with 1 if a step failed in any of them."""
    options = parse()
    failed: list[str] = []
    try:
        for version in options.versions or [str(options.venv)]:
            used = reused(options.venv) if options.venv else fresh(version, options)
            try:
                with used as environment:
                    row = run(environment, options)
            except subprocess.CalledProcessError as error:
                failed.append(f"torch {version}: no environment: {error}")
                continue
            if not is_recorded(options):
                print(json.dumps(row, indent=1))
            failed += [
                f"torch {row['torch']}, Python {row['python']}: {name}"
                for name, step in row["steps"].items()
                if not step["ok"]
            ]
    finally:
        finish()
    print("\n".join(f"FAILED {line}" for line in failed) or "all passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
