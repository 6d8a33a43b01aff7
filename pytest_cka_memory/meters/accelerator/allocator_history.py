"""The allocator's own notes of its blocks, read from PyTorch's memory snapshot: plain dictionaries.

They tell of blocks that no tensor owns, such as a library's workspace, where these were allocated.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pytest_cka_memory.core.allocations import UnownedBlock, is_foreign, short

_MOST_FRAMES = 6


def blocks(snapshot: Mapping[str, Any], device_index: int) -> dict[int, UnownedBlock]:
    """Every block in use on one device, by address."""
    return {
        block["address"]: UnownedBlock(
            bytes=block.get("requested_size", block["size"]),
            frames=_written(block.get("frames", ())),
        )
        for segment in snapshot["segments"]
        if segment["device"] == device_index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def without(
    found: Mapping[int, UnownedBlock], addresses: Collection[int]
) -> dict[int, UnownedBlock]:
    """Those blocks whose address is not among `addresses`, such as those of tensors."""
    return {address: block for address, block in found.items() if address not in addresses}


def _written(frames: Collection[Mapping[str, Any]]) -> tuple[str, ...]:
    """Write the user's own frames; those of C++ have files of their own, none ends in .py."""
    own = [f for f in frames if f["filename"].endswith(".py") and not is_foreign(f["filename"])]
    return tuple(f"{short(f['filename'])}:{f['line']} in {f['name']}" for f in own[:_MOST_FRAMES])
