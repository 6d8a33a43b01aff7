"""The allocator's history of its blocks, read from PyTorch's memory snapshot.

It shows where blocks that no tensor owns, such as workspaces of libraries, were allocated.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pytest_cka_memory.core.allocations import UnownedBlock, format_frame, is_foreign

_MAX_FRAMES = 6


def blocks(snapshot: Mapping[str, Any], device_index: int) -> dict[int, UnownedBlock]:
    """Return every block in use on one device, by address."""
    return {
        block["address"]: UnownedBlock(
            bytes=block.get("requested_size", block["size"]),
            frames=_formatted(block.get("frames", ())),
        )
        for segment in snapshot["segments"]
        if segment["device"] == device_index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def exclude(
    found: Mapping[int, UnownedBlock], addresses: Collection[int]
) -> dict[int, UnownedBlock]:
    """Return the blocks whose address is not in `addresses`."""
    return {address: block for address, block in found.items() if address not in addresses}


def _formatted(frames: Collection[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the innermost frames of the user's Python code as text; C++ frames are left out."""
    own = [f for f in frames if f["filename"].endswith(".py") and not is_foreign(f["filename"])]
    return tuple(format_frame(f["filename"], f["line"], f["name"]) for f in own[:_MAX_FRAMES])
