"""Run each measurement in a separate process, with each published library in a separate folder."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from libraries import LIBRARIES, Library

__all__ = ["LIBRARIES", "Row", "add_options", "install", "measure"]

HERE = Path(__file__).parent
# By default glibc returns large blocks to the system as soon as they are freed. Allocating them
# again can double the time of the bare forward pass, and ratios to it would then be too small.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
Row = dict[str, Any]
"""What was measured and its figures, or the reason under ``skipped`` if there are none."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all comparisons of libraries have."""
    parser.add_argument(
        "--install", type=Path, metavar="DIR", help="install the other libraries and exit"
    )
    parser.add_argument("--peers", metavar="DIR", help="the folder of --install")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--limit", type=int, default=600, help="seconds for one measurement")
    parser.add_argument("--device", default="auto")


def install(folder: Path) -> None:
    """Install each library into its own folder, without another torch."""
    for library in LIBRARIES.values():
        if library.folder is not None:
            target = str(folder / library.folder)
            options = ["--no-deps", "--upgrade", "--target", target, *library.requirements]
            subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)


def measure(
    library: Library,
    network: str,
    batch_size: int,
    samples: int,
    repeat: int,
    args: argparse.Namespace,
) -> Row:
    """Measure memory once and time `repeat` times; return why if that fails."""
    row: Row = {
        "library": library.name,
        "network": network,
        "batch_size": batch_size,
        "samples": samples,
    }
    environment = {**os.environ, **KEEP_FREED_MEMORY}
    if library.folder is not None:
        folder = Path(args.peers) / library.folder if args.peers else None
        if folder is None or not folder.is_dir():
            return {**row, "skipped": "not installed: see --install"}
        environment["PYTHONPATH"] = str(folder.resolve())
    command = [sys.executable, str(HERE / "measure_one.py"), library.name, network]
    command += [str(batch_size), f"--samples={samples}", f"--repeat={repeat}"]
    try:
        done = subprocess.run(
            [*command, f"--device={args.device}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=args.limit,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {**row, "skipped": f"took over {args.limit} s"}
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return {**row, "skipped": f"failed: {lines[-1]}"}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}
