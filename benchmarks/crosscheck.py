"""Compare the CPU meter with an independent counter, on all networks of torchvision that fit.

python benchmarks/crosscheck.py --json results.json
python benchmarks/crosscheck.py --json results.json --again  # only those without counts
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from crosscheck_one import HostCounter, check, kind_of
from tabulate import tabulate
from torchvision import models
from tqdm import tqdm

from pytest_cka_memory.meters.selection import meter_for
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


def bytes_off(row: Row, figure: str) -> int:
    """Return the largest difference between the two counts of a figure, over all stages.

    The figure is ``live`` or ``peak``.
    """
    return max(
        abs(stage[f"{figure}_bytes"] - stage[f"counted_{figure}_bytes"]) for stage in row["stages"]
    )


def summary(rows: Iterable[Row]) -> list[list[str]]:
    """Return a line per kind of network: how many, and by how many bytes the counts differ."""
    measured = [row for row in rows if "skipped" not in row]
    lines = []
    for kind, name in NAMES.items():
        own = [row for row in measured if row["kind"] == kind]
        if own:
            off = [max(bytes_off(row, figure) for row in own) for figure in ("live", "peak")]
            lines.append([name, str(len(own)), *map(str, off)])
    return lines


def table(rows: Sequence[Row]) -> str:
    """Return the summary, followed by the networks that were left out or differ."""
    heads = ["networks of torchvision", "tried", "bytes off live", "bytes off peak"]
    lines = [tabulate(summary(rows), headers=heads, tablefmt="github", disable_numparse=True)]
    for row in rows:
        if "skipped" in row:
            lines.append(f"left out: {row['network']}: {row['skipped']}")
        elif bytes_off(row, "live") or bytes_off(row, "peak"):
            live, peak = bytes_off(row, "live"), bytes_off(row, "peak")
            lines.append(f"off: {row['network']}: {live} bytes live, {peak} bytes at the peak")
    return "\n".join(lines)


def as_text(rows: Iterable[Row]) -> str:
    """Return JSON with one line per network."""
    lines = ",\n".join(map(json.dumps, rows))
    session = json.dumps(
        {
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "meter": meter_for("cpu").name,
        }
    )
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
    rows = []
    for name in tqdm(args.networks):
        rows.append(done.get(name) or check_apart(name, args.limit))
        if args.json is not None:
            write_whole(args.json, as_text(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
