"""Compare ``predict:cuda`` with ``emulate:cuda`` on small programs; prints a Markdown table.

python tests/benchmarks/predicted_vs_emulated.py --json results.json

Every program runs on both devices, all of them in one process per device.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from small_programs import PROGRAMS

from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.units import MB

PREDICTED, EMULATED = "predict:cuda:a100", "emulate:cuda:a100,values=off"
FIGURES = ("start", "peak increase", "retained", "net", "reserve")
"""The reserve is its peak in the region less what was reserved at the start."""
Figures = dict[str, int]

_SETTINGS = ("PYTORCH_", "TORCH_", "CUDA_", "CUBLAS", "NUMBA_", "PYTEST_")


def measure(device: str) -> dict[str, Figures]:
    """Return the figures of every program on a device, measured in this process."""
    from pytest_cka_memory import MemoryProbe

    probe = MemoryProbe(device)
    gc.collect()
    gc.freeze()  # so that regions do not collect the modules of torch again and again
    found = {}
    for name, build in PROGRAMS.items():
        program = build(probe.device)
        with probe.measure() as region:
            kept = program()
        record = region.record
        del kept, program
        numbers = (
            record.start_bytes,
            record.peak_bytes - record.start_bytes,
            record.retained_bytes,
            record.end_bytes - record.start_bytes,
            record.reserved_peak_bytes - record.reserved_start_bytes,
        )
        found[name] = dict(zip(FIGURES, numbers, strict=True))
    return found


def measure_both(**variables: str) -> dict[str, dict[str, Figures]]:
    """Return the figures by device and program; each device has its own process.

    Raises:
        RuntimeError: with what the process wrote, if it failed.
    """
    environment = {name: v for name, v in os.environ.items() if not name.startswith(_SETTINGS)}
    environment.update(OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0", **variables)
    found = {}
    for device in (EMULATED, PREDICTED):
        run = subprocess.run(
            [sys.executable, __file__, "--on", device],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"{device}: status {run.returncode}\n{run.stdout}{run.stderr}")
        found[device.partition(":")[0]] = json.loads(run.stdout.splitlines()[-1])
    return found


def differences(found: dict[str, dict[str, Figures]]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return program -> figure -> emulated and predicted bytes, where these two differ."""
    return {
        name: {
            figure: (emulated[figure], found["predict"][name][figure])
            for figure in FIGURES
            if emulated[figure] != found["predict"][name][figure]
        }
        for name, emulated in found["emulate"].items()
    }


def table(found: dict[str, dict[str, Figures]]) -> str:
    """Return a Markdown table of the peaks, and of all figures that differ."""
    lines = [
        "| program | peak increase emulated, MB | predicted, MB | off, bytes | what else differs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, different in differences(found).items():
        peaks = [found[device][name]["peak increase"] for device in ("emulate", "predict")]
        shown = [*(f"{peak / MB:.2f}" for peak in peaks), f"{peaks[1] - peaks[0]:+,}"]
        others = [
            f"{figure} {emulated / MB:.2f} MB, predicted {predicted / MB:.2f}"
            for figure, (emulated, predicted) in different.items()
            if figure != "peak increase"
        ]
        lines.append(f"| {name} | {' | '.join(shown)} | {'; '.join(others) or '-'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare both devices, or print the figures of one as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on", metavar="DEVICE", help="only measure on this device")
    args = parser.parse_args()
    if args.on:
        print(json.dumps(measure(args.on)))
        return
    found = measure_both()
    print(table(found))
    if args.json:
        write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
