"""Wait until a card has enough free memory."""

import time

from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.units import format_with_unit, megabytes

_INTERVAL_S = 0.2


def wait_until_free(meter: Meter, mb: object, timeout: float) -> float | None:
    """Do what :meth:`MemoryProbe.wait_until_free` says, for the device of `meter`."""
    wanted_bytes = megabytes(mb)
    now = meter.driver()
    if now is None:
        return None
    if wanted_bytes > now.total_bytes:
        raise ValueError(
            f"{meter.device} has {format_with_unit(now.total_bytes)} in total, so that "
            f"{format_with_unit(wanted_bytes)} can never be free; write a smaller size"
        )
    if now.free_bytes < wanted_bytes:
        meter.clean()  # what this process only keeps in reserve
        now = meter.driver() or now
    deadline = time.monotonic() + timeout
    while now.free_bytes < wanted_bytes:
        if time.monotonic() >= deadline:
            own_bytes = meter.read().reserved_bytes or 0
            raise TimeoutError(
                f"{meter.device} has {format_with_unit(now.free_bytes)} free after {timeout:g} s, "
                f"not {format_with_unit(wanted_bytes)}: of {format_with_unit(now.used_bytes)} in "
                f"use, torch's allocator in this process has {format_with_unit(own_bytes)}; the "
                "rest is outside it, or belongs to other processes"
            )
        time.sleep(_INTERVAL_S)
        now = meter.driver() or now
    return now.free_bytes / 2**20
