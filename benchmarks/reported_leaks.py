"""What the plugin says of twelve leaks that users have reported, and what its advice repairs.

    python benchmarks/reported_leaks.py --json reported-leaks.json

Two sessions of pytest run the tests of ``reported_programs.py``: one on the CPU, one on the
emulated card. Each program runs as it was reported, and once for each thing that the message
advises, which is followed literally.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "reported_programs.py"
DEVICES = ("cpu", "emulate:cuda")
sys.path.insert(0, str(HERE))


def main() -> None:
    """Run every program on every device, print the table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [row for device in DEVICES for row in rows_of(device)]
    columns = ("report", "device", "limit", "found", "held_by", "advice", "followed")
    cells = [[_text(row[name]) for name in columns] for row in rows]
    widths = [38, 8, 10, None, 36, 44, 40]
    print(tabulate(cells, columns, tablefmt="grid", maxcolwidths=widths))
    arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")


def _text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return "\n".join(f"{edit}: {outcome}" for edit, outcome in value.items())


def rows_of(device: str) -> list[dict[str, Any]]:
    """Return a row for each report: what is said of its leak, and whether its repair passes."""
    from reported_programs import REPORTS

    regions = session(device)
    rows = []
    for name, report in REPORTS.items():
        leaking = regions[f"{name}[reported]"]
        holdings = leaking["grown"] or leaking["retained"] or leaking["cycles"]
        # Of several groups with one advice, only the largest has it.
        advice = next((found["hint"] for found in holdings if found.get("hint")), None)
        rows.append(
            {
                "report": report.url,
                "device": device,
                "mechanism": report.mechanism,
                "limit": ", ".join(leaking["limits"]),
                "found": leaking["verdict"] == "BREACH",
                "made_at": holdings[0]["created_at"][0] if holdings else None,
                "code": holdings[0]["code"] if holdings else None,
                "held_by": holdings[0]["held_by"] if holdings else None,
                "advice": advice,
                "followed": {
                    edit: "passes" if passes(regions[f"{name}[{way}]"]) else "still fails"
                    for way, edit in report.ways.items()
                },
            }
        )
    return rows


def passes(region: dict[str, Any]) -> bool:
    """Return whether the test of a region passed, and the region kept its limit."""
    return bool(region["outcome"] == "passed" and region["verdict"] == "ok")


def session(device: str) -> dict[str, dict[str, Any]]:
    """Return the regions of a session with all programs, by the name of their test."""
    with TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-c", os.devnull]
        options += [f"--rootdir={HERE}", f"--cka-memory-device={device}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--cka-memory-json={figures}", PROGRAMS],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
        )
        if not figures.exists():
            raise RuntimeError(f"the session on {device} wrote no figures\n{done.stdout}")
        regions = json.loads(figures.read_text("utf-8"))["regions"]
    return {region["nodeid"].partition("::")[2]: region for region in regions}


if __name__ == "__main__":
    main()
