"""Each measurement in a process of its own, each published library in a folder of its own."""

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
# glibc hands large memory back as soon as it is free, and fetching it again takes the bare forward
# up to as long as computing. Ratios to it would then flatter whichever library keeps least.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
Row = dict[str, Any]
"""One measurement: which, and its figures, or under ``skipped`` why there are none."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that every comparison of libraries has."""
    parser.add_argument("--install", type=Path, metavar="DIR", help="install the peers, and end")
    parser.add_argument("--peers", metavar="DIR", help="where --install put them")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--limit", type=int, default=600, help="seconds for one measurement")
    parser.add_argument("--device", default="auto")


def install(folder: Path) -> None:
    """Install each peer into a folder of its own, without a second torch."""
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
    """Measure memory once and time `repeat` times, or say why not."""
    row: Row = {
        "library": library.name,
        "network": network,
        "batch_size": batch_size,
        "samples": samples,
    }
    environment = {**os.environ, **KEEPING}
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
        said = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return {**row, "skipped": f"failed: {said[-1]}"}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}
