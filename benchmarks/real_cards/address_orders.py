"""Replay a recording with its segments at other addresses: the reserve at its end, for each.

    python benchmarks/real_cards/address_orders.py RECORDING COUNT

Of free blocks of one size, torch's allocator before 2.13 takes that at the lowest address. So the
reserve depends on which addresses the driver returned, in what order. An emulated card returns
ascending ones; on a real card later segments may fill gaps below. The recording has to begin with
its program. Prints a list: the reserve in ascending order, in descending order, then in random
ones, of which the first has the seed 1.
"""

import json
import random
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_cka_memory.snapshots import replays
from pytest_cka_memory.snapshots.reading import SEGMENT_ALLOC, Device, read
from pytest_cka_memory.snapshots.request_list import requests_of


def orders(segments: int, count: int) -> Iterator[Sequence[int]]:
    """Yield orders of segments, by number: ascending, descending, then random ones."""
    ascending = list(range(segments))
    yield ascending
    yield ascending[::-1]
    for seed in range(1, count - 1):
        yield random.Random(seed).sample(ascending, segments)


def move(device: Device, order: Sequence[int]) -> None:
    """Move the segments of a recording, so that they lie in this order without gaps."""
    segments = sorted(
        (event.address, event.bytes) for event in device.events() if event.action == SEGMENT_ALLOC
    )
    starts = [address for address, _ in segments]
    at = starts[0]
    moved = {}
    for number in order:
        moved[starts[number]] = at
        at += segments[number][1]

    def place(address: int) -> int:
        start = starts[bisect_right(starts, address) - 1]
        return moved[start] + address - start

    device.addresses = array("Q", map(place, device.addresses))
    device.segments = [
        segment._replace(
            address=place(segment.address),
            blocks=tuple(block._replace(address=place(block.address)) for block in segment.blocks),
        )
        for segment in device.segments
    ]


def reserves(path: Path, count: int) -> list[int]:
    """Return the reserve at the end of a recording, in as many orders of addresses.

    Raises:
        SystemExit: if a segment was freed, because its addresses may be used again.
    """
    found = []
    (device,) = read(path).devices
    segments = device.actions.count(SEGMENT_ALLOC)
    if segments != len(device.segments):
        raise SystemExit(f"{path}: {segments} segments were allocated, {len(device.segments)} live")
    for order in orders(segments, count):
        snapshot = read(path)
        (device,) = snapshot.devices
        move(device, order)
        run = replays.Run("", attempts=False, positioned=True)
        (replayed,) = replays.run(requests_of(snapshot, device), [run])
        if replayed.error:
            raise SystemExit(replayed.error)
        found.append(replayed.end_reserved_bytes)
    return found


if __name__ == "__main__":
    print(json.dumps(reserves(Path(sys.argv[1]), int(sys.argv[2]))))
