"""The range of a reserve: a process beside the same one in a run with late events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emulated_cuda.loading.records import DeviceUse, ProcessUse

_SMALL_SHARE = 0.01
"""A reserve that differs by less, whenever events come, is shown as one number."""


def differs(device: DeviceUse) -> bool:
    """Return whether a run with late events had another reserve, by more than 1 %."""
    late = device.late_reserved_bytes
    return late is not None and (
        abs(late - device.reserved_bytes) > _SMALL_SHARE * device.reserved_bytes
    )


def line(device: DeviceUse) -> str:
    """Return what the reserve is at least, is expected to be, and is at most."""
    late = device.late_reserved_bytes or 0
    lower, upper = sorted((late, device.reserved_bytes))
    return (
        f"on cuda:{device.index} the reserve depends on when the card is done with what other "
        f"streams use: at least {_mb(lower)}, expected {_mb(device.reserved_bytes)}, at most "
        f"{_mb(upper)}"
    )


def with_late(processes: Sequence[ProcessUse], late: Sequence[ProcessUse]) -> list[ProcessUse]:
    """Return the processes with the reserves that they had in another run, with late events.

    They are matched by rank, program and order of start.
    """
    left = list(late)
    found = []
    for process in processes:
        same = next(
            (p for p in left if (p.rank, p.program) == (process.rank, process.program)), None
        )
        if same is not None:
            left.remove(same)
            reserved = {device.index: device.reserved_bytes for device in same.devices}
            process = replace(
                process,
                devices=tuple(
                    replace(device, late_reserved_bytes=reserved.get(device.index))
                    for device in process.devices
                ),
            )
        found.append(process)
    return found


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
