"""Where the segments of a recording lay, as positions at which an emulated card can put them.

Of free blocks of one size, torch's allocator takes that at the lowest address. So which block an
allocation gets, and with that the reserve later on, depends on the order of the addresses that the
driver gave. Only the order matters, not the addresses themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

_UNIT = 2 * 2**20
"""A driver gives memory in multiples of this."""
_FARTHEST = 2**63
"""No card has this position, so that it is refused."""


def of(ranges: Sequence[tuple[int, int]]) -> tuple[array[int], int]:
    """Return the position of each range of addresses, and where the last of them ends.

    Ranges keep their order, and those that overlap or touch do so afterwards. Addresses that are in
    no range are left out, so that a recording of any card needs no more of them than it uses.

    Args:
        ranges: address and bytes of each range.

    Example:
        >>> from pytest_cka_memory.snapshots.positions import of
        >>> unit = 2 * 2**20
        >>> places, end = of([(0x7F00_0000_0000, 3 * unit), (0x1000_0000_0000, unit)])
        >>> [place // unit for place in places], end // unit
        ([1, 0], 4)
    """
    starts: list[int] = []
    ends: list[int] = []
    for address, size in sorted(ranges):
        start = address // _UNIT * _UNIT
        end = start + -(-size // _UNIT) * _UNIT
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    moved: list[int] = []
    total = 0
    for start, end in zip(starts, ends, strict=True):
        moved.append(total - start)
        total += end - start
    positions = array("Q")
    for address, _ in ranges:
        start = address // _UNIT * _UNIT
        positions.append(min(start + moved[bisect_right(starts, start) - 1], _FARTHEST))
    return positions, min(total, _FARTHEST)
