"""Replays recordings of real cards and compares the reserve after each allocation.

``python benchmarks/replay_recordings.py FOLDER`` takes each snapshot below a folder: ``*.pickle``
as ``torch.cuda.memory._dump_snapshot`` writes them, and ``*.json.gz`` with the numbers of one alone
(``trace``: lists of action, address, bytes and stream; ``segments``; ``settings``). Recordings of
other people are not in this repository. The result has one row for each device of each recording.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_cka_memory.errors import CkaMemoryError
from pytest_cka_memory.snapshots import replays
from pytest_cka_memory.snapshots.reading import Device, Snapshot, read, recorded_settings
from pytest_cka_memory.snapshots.request_list import requests_of

BLOCK = ("address", "size", "requested_size", "state")


def as_snapshot(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a recording in the form that torch writes."""
    trace = [
        dict(zip(("action", "addr", "size", "stream"), row, strict=True))
        for row in numbers["trace"]
    ]
    for event in trace:
        if event["action"] == "oom":
            event["device_free"] = event.pop("addr") or 0
    segments = [
        {
            **segment,
            "device": 0,
            "blocks": [
                {name: value for name, value in zip(BLOCK, block, strict=True) if value is not None}
                for block in segment["blocks"]
            ],
        }
        for segment in numbers["segments"]
    ]
    text = numbers["settings"] or ""
    found = {"expandable_segments": "expandable_segments:True" in text}
    return {"device_traces": [trace], "segments": segments, "allocator_settings": found}


def snapshots(folder: Path) -> Iterator[tuple[Path, Snapshot | CkaMemoryError]]:
    """Yield each recording below a folder, or why it cannot be read."""
    for path in sorted(folder.rglob("*")):
        try:
            if path.suffixes[-2:] == [".json", ".gz"]:
                with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
                    numbers = json.loads(gzip.decompress(path.read_bytes()))
                    pickle.dump(as_snapshot(numbers), file)
                    file.flush()
                    yield path, read(file.name)
            elif path.suffix in (".pickle", ".pkl"):
                yield path, read(path)
        except CkaMemoryError as error:
            yield path, error


def row_of(snapshot: Snapshot, device: Device) -> dict[str, Any]:
    """Return how one device's recording is replayed."""
    begun = time.perf_counter()
    request_list = requests_of(snapshot, device)
    text = recorded_settings(snapshot.settings)
    (replayed,) = replays.run(request_list, [replays.Run(text, False, True, True)])
    row: dict[str, Any] = {
        "device": device.index,
        "settings": text,
        "events": len(device),
        "streams": len(set(device.streams)),
        "pools": len(set(device.pools)),
        "out_of_memory": request_list.attempts,
        "releases_of_a_full_card": request_list.releases,
        "start_reserved_bytes": request_list.beginning.reserved_bytes,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    if replayed.error or replayed.refused:
        return {**row, "error": replayed.error or "the card had no memory left"}
    found = replays.exactness(request_list, device, replayed)
    if aged := replays.in_order_of_ages(request_list, device, text, found):
        found = replays.exactness(request_list, device, aged[0])
    return {**row, **vars(found)}


def main() -> None:
    """Print a row for each recording, and write them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    for path, snapshot in snapshots(options.folder):
        name = str(path.relative_to(options.folder))
        if isinstance(snapshot, CkaMemoryError):
            # The same wherever the folder is.
            rows.append({"recording": name, "error": str(snapshot).replace(str(path), name)})
            print(name, snapshot)
            continue
        for device in snapshot.devices:
            if len(device):
                rows.append({"recording": name, **row_of(snapshot, device)})
                print(json.dumps(rows[-1]), flush=True)
    exact = [row for row in rows if row.get("differing") == 0]
    count = sum(row["allocations"] for row in exact)
    print(f"{len(exact)} of {len(rows)} are exact after each of {count:,} allocations")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
