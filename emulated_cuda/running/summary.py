"""What the processes of a program took of their devices' memory, as lines and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from emulated_cuda.loading.records import DeviceUse, ProcessUse


def lines(processes: Sequence[ProcessUse]) -> Iterator[str]:
    """Yield one line for each device of each process."""
    if not processes:
        yield "no process allocated memory on a CUDA device"
    for process in processes:
        for device in process.devices:
            yield _line(process, device)


def write_json(path: Path, processes: Sequence[ProcessUse]) -> None:
    """Write the same as a list of objects."""
    path.write_text(json.dumps(rows(processes), indent=2) + "\n", encoding="utf-8")


def rows(processes: Sequence[ProcessUse]) -> list[dict[str, Any]]:
    """Return one object for each device of each process, with sizes in bytes."""
    return [_row(process, device) for process in processes for device in process.devices]


def _line(process: ProcessUse, device: DeviceUse) -> str:
    rank = "" if process.rank is None else f"rank {process.rank}, "
    allocated = (
        "allocated unknown"
        if device.allocated_bytes is None
        else f"{_mb(device.allocated_bytes)} allocated"
    )
    return (
        f"{rank}{process.program}, cuda:{device.index}, emulated {process.card.title}: at most "
        f"{allocated}, {_mb(device.reserved_bytes)} reserved, of {_mb(process.usable_bytes)}: "
        f"{_result(process, device)}"
    )


def _result(process: ProcessUse, device: DeviceUse) -> str:
    missing = f"{_mb(device.missing_bytes)} more would have been needed"
    if device.ran_out:
        return f"out of memory: {missing}"
    if process.ended:
        return "fits"
    if device.missing_bytes:
        return f"ended by a signal or os._exit after an allocation was refused: {missing}"
    return "ended by a signal or os._exit; it fitted until then"


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


def _row(process: ProcessUse, device: DeviceUse) -> dict[str, Any]:
    return {
        "emulated": True,
        "process": process.process,
        "program": process.program,
        "rank": process.rank,
        "device": f"cuda:{device.index}",
        "card": process.card.name,
        "total_bytes": process.total_bytes,
        "usable_bytes": process.usable_bytes,
        "max_allocated_bytes": device.allocated_bytes,
        "max_reserved_bytes": device.reserved_bytes,
        "missing_bytes": device.missing_bytes,
        "out_of_memory": device.ran_out,
        "ended": process.ended,
    }
