"""The meter for the CPU: torch's allocator counted natively, or tensors counted in a ledger."""

import os
from functools import cache

from pytest_cka_memory.meters.base import Meter

SWITCH = "CKA_MEMORY_NATIVE"
"""Environment variable that turns native counting off if it is 0."""


@cache
def cpu_meter() -> Meter:
    """Return the meter, the same one at every call."""
    reason = _why_not_native()
    if reason is None:
        from pytest_cka_memory.meters.cpu.by_blocks import BlockMeter

        return BlockMeter()
    from pytest_cka_memory.meters.cpu.by_storages import StorageMeter

    return StorageMeter(reason)


def _why_not_native() -> str | None:
    """Return why torch's allocator cannot be counted here; None if it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    from pytest_cka_memory.meters.blocks import counter, library

    if library.functions() is None:
        return "the native counter was not compiled for this system"
    if not counter.counts_cpu():
        return "this build of torch allocates memory in a way that is not known"
    return None
