"""Compare predictions with published figures and, if there is a GPU, with measured ones.

python tests/benchmarks/predict.py --peers peers --json results.json   # see compare.py --install
python tests/benchmarks/predict.py --against cuda --card h100          # predict and measure gates
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from libraries import LIBRARIES
from processes import Row, measure
from tabulate import tabulate
from tqdm import tqdm

from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.units import MB

ROOT = Path(__file__).parents[2]
PREDICTED = "predict:cuda"

PUBLISHED_MB = {64: 367.57, 128: 673.32, 256: 1306.60, 512: 2664.05}
"""Batch size -> peak of pytorch-cka 0.1.3 on an A100 with 1000 images, from the notebook."""
SAMPLES = 1000
WORKSPACES_OF_THE_NOTEBOOK = {
    "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
}
"""The notebook's torch version kept these workspaces: the 9.12 MB that its first run retains."""


def against_published(peers: str | None) -> Iterator[Row]:
    """Predict each row of the notebook's table in a separate process."""
    os.environ.update(WORKSPACES_OF_THE_NOTEBOOK)
    args = argparse.Namespace(peers=peers, device=f"{PREDICTED}:a100", limit=600)
    for size, published in tqdm(PUBLISHED_MB.items(), desc="published"):
        row = measure(LIBRARIES["pytorch-cka 0.1.3"], "resnet18", size, SAMPLES, 0, args)
        if "skipped" in row:
            sys.exit(f"batch {size}: {row['skipped']}")
        kept = ("library", "batch_size", "samples", "device", "torch", "peak_bytes")
        yield {
            **{name: row[name] for name in kept},
            "published_mb": published,
            "error": row["peak_bytes"] / MB / published - 1,
        }
    for name in WORKSPACES_OF_THE_NOTEBOOK:
        del os.environ[name]


def gates() -> list[str]:
    """Return every test in ``tests/gates``."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gates", "--collect-only", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if line.startswith("tests/gates/")]


def run_gate(gate: str, device: str) -> Row:
    """Run a gate in a separate process; return its regions' peaks, its time and host memory."""
    with tempfile.TemporaryDirectory() as folder:
        report, timing = Path(folder) / "report.json", Path(folder) / "timing.xml"
        command = [sys.executable, "-m", "pytest", gate, f"--cka-memory-device={device}"]
        command += [f"--cka-memory-json={report}", f"--junitxml={timing}", "-pno:cacheprovider"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        (case,) = ElementTree.parse(timing).iter("testcase")
        regions: list[dict[str, Any]] = json.loads(report.read_text("utf-8"))["regions"]
    return {
        "gate": gate.rpartition("/")[2],
        "device": device,
        "passed": process.returncode == 0,
        "seconds": float(case.attrib["time"]),
        "host_bytes": usage.ru_maxrss * 2**10,  # Linux counts in KiB
        "peaks": {one["label"]: one["peak_increase_bytes"] for one in regions},
    }


def published_table(rows: Sequence[Row]) -> str:
    """Return a table of predicted and published peaks."""
    shown = [
        {
            "batch": row["batch_size"],
            "predicted MB": f"{row['peak_bytes'] / MB:.2f}",
            "published MB": f"{row['published_mb']:.2f}",
            "error": f"{row['error']:+.2%}",
        }
        for row in rows
    ]
    return tabulate(shown, headers="keys", disable_numparse=True)


def gates_table(rows: Sequence[Row], measured: Sequence[Row]) -> str:
    """Return a table of every gate's regions, with measured peaks if there are any."""
    measured_peaks = {row["gate"]: row["peaks"] for row in measured}
    shown = []
    for row in rows:
        for label, predicted in row["peaks"].items():
            one = {
                "gate": row["gate"].partition("::")[2],
                "region": label,
                "passed": "yes" if row["passed"] else "NO",
                "seconds": f"{row['seconds']:.1f}",
                "host MB": f"{row['host_bytes'] / MB:.0f}",
                "predicted MB": f"{predicted / MB:.2f}",
            }
            if label in measured_peaks.get(row["gate"], {}):
                actual = measured_peaks[row["gate"]][label]
                one["measured MB"] = f"{actual / MB:.2f}"
                one["error"] = f"{predicted / actual - 1:+.2%}" if actual else "-"
            shown.append(one)
    return tabulate(shown, headers="keys", disable_numparse=True)


def main() -> None:
    """Predict what the arguments ask for, and print it beside the known figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", metavar="DIR", help="the folder of compare.py --install")
    parser.add_argument("--card", default="a100", help="the card that the gates are predicted for")
    parser.add_argument(
        "--against", metavar="DEVICE", help="measure each gate on this device too, e.g. cuda"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    published = list(against_published(args.peers)) if args.peers else []
    device = f"{PREDICTED}:{args.card}"
    names = gates()
    predicted = [run_gate(gate, device) for gate in tqdm(names, desc=device)]
    measured = []
    if args.against:
        measured = [run_gate(gate, args.against) for gate in tqdm(names, desc=args.against)]
    if published:
        print(published_table(published))
    print(gates_table(predicted, measured))
    if args.json is not None:
        found = {"published": published, "predicted": predicted, "measured": measured}
        write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
