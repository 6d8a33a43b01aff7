"""Compare the CPU meter with an independent counter, on all networks of torchvision that fit.

python tests/benchmarks/crosscheck.py --json results.json
python tests/benchmarks/crosscheck.py --json results.json --again  # only those without counts
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from crosscheck_one import HostCounter, check, kind_of
from tabulate import tabulate
from torchvision import models
from tqdm import tqdm

from pytest_cka_memory.reports.files import write_whole

Row = dict[str, Any]
FORK = multiprocessing.get_context("fork")
TOO_LARGE = ("regnet_y_128gf", "vit_h_14")
"""Networks whose parameters, gradients and momentum need several GB."""
NAMES = {
    "image": "image classification",
    "segmentation": "segmentation",
    "detection": "detection",
    "video": "video",
    "optical_flow": "optical flow",
}
PEAKS = ("evaluate", "forward", "backward")


def check_apart(network: str, limit: int) -> Row:
    """Check one network in a separate process; return both counts, or why there are none.

    The process is forked, because importing torch in each would take longer than all checks.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send_check, args=(network, sender))
    process.start()
    sender.close()
    row: Row = {"network": network, "kind": kind_of(network)}
    try:
        row |= receiver.recv() if receiver.poll(limit) else {"skipped": f"took over {limit} s"}
    except EOFError:
        row["skipped"] = "its process ended without a result"
    process.kill()
    process.join()
    return row


def _send_check(network: str, sender: Connection) -> None:
    try:
        sender.send({"stages": check(network, HostCounter())})
    except Exception as error:  # e.g. the images are too small for the network
        sender.send({"skipped": f"{type(error).__name__}: {error}".splitlines()[0]})


def bytes_off(row: Row) -> int:
    """Return the largest difference between the two counts of live bytes, over all stages."""
    stages = row["stages"]
    return max(abs(stage["live_bytes"] - stage["counted_live_bytes"]) for stage in stages)


def gap(row: Row, stage: str) -> float:
    """Return the share of the counted peak that the meter does not see, in one stage."""
    (found,) = (entry for entry in row["stages"] if entry["stage"] == stage)
    return 1 - found["peak_bytes"] / found["counted_peak_bytes"]


def summary(rows: Iterable[Row]) -> list[list[str]]:
    """Return a line per kind of network: how many, bytes off, median and worst gap of each peak."""
    measured = [row for row in rows if "skipped" not in row]
    lines = []
    for kind, name in NAMES.items():
        own = [row for row in measured if row["kind"] == kind]
        if own:
            gaps = [[100 * gap(row, stage) for row in own] for stage in PEAKS]
            shown = [f"{statistics.median(found):.1f}, {max(found):.1f}" for found in gaps]
            lines.append([name, str(len(own)), str(max(map(bytes_off, own))), *shown])
    return lines


def table(rows: Sequence[Row]) -> str:
    """Return the summary, followed by the networks that were left out or differ."""
    heads = ["networks of torchvision", "tried", "bytes off live", *(f"{s}, %" for s in PEAKS)]
    lines = [tabulate(summary(rows), headers=heads, tablefmt="github", disable_numparse=True)]
    for row in rows:
        if "skipped" in row:
            lines.append(f"left out: {row['network']}: {row['skipped']}")
        elif bytes_off(row):
            lines.append(f"off: {row['network']}: {bytes_off(row)} bytes")
    return "\n".join(lines)


def as_text(rows: Iterable[Row]) -> str:
    """Return JSON with one line per network."""
    lines = ",\n".join(map(json.dumps, rows))
    session = json.dumps({"torch": str(torch.__version__), "threads": torch.get_num_threads()})
    return f'{session[:-1]}, "rows": [\n{lines}\n]}}\n'


def main() -> None:
    """Read the arguments, check every network, and print the table."""
    everything = [n for n in models.list_models() if "quantized" not in n and n not in TOO_LARGE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=everything)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one network")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--again", action="store_true", help="check only networks without counts in --json"
    )
    args = parser.parse_args()
    HostCounter.build()
    known = json.loads(args.json.read_text("utf-8"))["rows"] if args.again else []
    done = {row["network"]: row for row in known if "skipped" not in row}
    rows = [done.get(name) or check_apart(name, args.limit) for name in tqdm(args.networks)]
    print(table(rows))
    if args.json is not None:
        write_whole(args.json, as_text(rows))


if __name__ == "__main__":
    main()
