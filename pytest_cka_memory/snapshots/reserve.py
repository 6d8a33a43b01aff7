"""The reserve at the end of a recording: what it consists of, and which lines keep free parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pytest_cka_memory.core.reserve import ReserveState, explain_reserve
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.lines import Lines
from pytest_cka_memory.snapshots.reading import Device, Snapshot


class Kept(NamedTuple):
    """What the blocks of one line keep from being released."""

    line: str
    bytes: int
    """Free parts of segments, or pages of expandable ones, that have a block of the line."""
    segments: int
    """How many of these."""


def explained(snapshot: Snapshot, device: Device) -> ReserveState:
    """Return what the reserve of a device consists of at the end of a recording.

    Args:
        snapshot: the file.
        device: one of its devices.
    """
    names = {name: number for number, name in enumerate(device.pool_names)}
    return explain_reserve(
        _segments(device),
        snapshot.settings,
        pool_name=lambda pool: f"private pool {names[pool[0], pool[1]]}",
    )


def _segments(device: Device) -> Iterator[Mapping[str, Any]]:
    """Yield the segments with the names that torch gives their parts."""
    for segment in device.segments:
        yield {
            "address": segment.address,
            "total_size": segment.bytes,
            "stream": device.stream_names[segment.stream],
            "segment_pool_id": device.pool_names[segment.pool],
            "segment_type": "small" if segment.is_small else "large",
            "is_expandable": segment.is_expandable,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.bytes,
                    "requested_size": block.requested_bytes,
                    "state": unpickling.STATES[block.state],
                }
                for block in segment.blocks
            ],
        }


def kept_by_line(device: Device, state: ReserveState, lines: Lines) -> list[Kept]:
    """Return which lines' blocks keep free memory from being released, the most first.

    A free part beside blocks of several lines counts for each of them.

    Args:
        device: the recording.
        state: its reserve.
        lines: writes the sites of the file.
    """
    sites = {block.address: block.site for segment in device.segments for block in segment.blocks}
    found: dict[str, list[int]] = {}
    for part in state.partly_used:
        for line in {lines.text(sites.get(address, 0))[0] for address in part.blocks}:
            entry = found.setdefault(line, [0, 0])
            entry[0] += part.free_bytes
            entry[1] += 1
    rows = (Kept(line, *entry) for line, entry in found.items())
    return sorted(rows, key=lambda row: (-row.bytes, row.line))
