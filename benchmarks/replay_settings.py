"""Beside programs under other settings: what a replay of their recordings says they would take.

Twelve programs of four kinds are recorded under torch's default settings. Each is run under seven
settings on an emulated card, and its recording is replayed under the same seven. A row has the
allocator's figures of both, to the byte.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAM_FILE = ROOT / "tests" / "snapshots" / "recorded_programs.py"
sys.path.insert(0, str(PROGRAM_FILE.parent))

import torch  # noqa: E402 - for its version
from recorded_programs import PROGRAMS, SETTINGS  # noqa: E402

from pytest_cka_memory.snapshots import replays  # noqa: E402
from pytest_cka_memory.snapshots.reading import read  # noqa: E402
from pytest_cka_memory.snapshots.replays import Run  # noqa: E402
from pytest_cka_memory.snapshots.request_list import requests_of  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "replay-settings-torch-{torch}.json"


def figures_under(folder: Path, setting: str) -> dict[str, dict[str, int]]:
    """Run the programs under a setting; return name -> the allocator's figures."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
    subprocess.run([sys.executable, str(PROGRAM_FILE), str(folder)], env=environment, check=True)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in PROGRAMS}


def rows() -> list[dict[str, Any]]:
    """Return a row for each program and setting."""
    with tempfile.TemporaryDirectory() as folder:
        own = {}
        for number, setting in enumerate(SETTINGS):
            place = Path(folder, str(number))
            place.mkdir()
            own[setting] = figures_under(place, setting)
        found = []
        for name in PROGRAMS:
            snapshot = read(Path(folder, "0", f"{name}.pickle"))
            (device,) = snapshot.devices
            request_list = requests_of(snapshot, device)
            runs = [Run(setting) for setting in SETTINGS]
            for setting, replayed in zip(SETTINGS, replays.run(request_list, runs), strict=True):
                figures = own[setting][name]
                row = {
                    "program": name,
                    "setting": setting,
                    "allocated_bytes": figures["allocated_bytes"],
                    "reserved_bytes": figures["reserved_bytes"],
                    "replayed_allocated_bytes": replayed.allocated_bytes,
                    "replayed_reserved_bytes": replayed.reserved_bytes,
                    "error": replayed.error,
                }
                found.append(row)
                same = row["reserved_bytes"] == row["replayed_reserved_bytes"]
                print("same " if same else "OTHER", json.dumps(row), flush=True)
        return found


def main() -> None:
    """Measure all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    version = torch.__version__.partition("+")[0]
    parser.add_argument("--json", type=Path, default=Path(str(RESULT).format(torch=version)))
    options = parser.parse_args()
    found = rows()
    same = sum(row["reserved_bytes"] == row["replayed_reserved_bytes"] for row in found)
    print(f"{same} of {len(found)} are the same to the byte")
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
