"""A recording as requests to an allocator: first those that rebuild the state it begins with.

Also where its segments lay, as positions at which an emulated card can put them. Of free blocks of
one size, torch's allocator takes that at the lowest address. So which block an allocation gets, and
with that the reserve later on, depends on the order of the addresses that the driver gave. Only the
order matters, not the addresses themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emulated_cuda import replaying
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.beginning import (
    MOST_SMALL_BYTES,
    ROUNDING,
    Beginning,
    OldBlock,
    OldSegment,
    beginning_of,
)
from pytest_cka_memory.snapshots.reading import (
    ALLOC,
    OUT_OF_MEMORY,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Device,
    Site,
    Snapshot,
)

_UNIT = 2 * 2**20
"""A driver gives memory in multiples of this."""
_FARTHEST = 2**63
"""No card has this position, so that it is refused."""


def positions_of(ranges: Sequence[tuple[int, int]]) -> tuple[array[int], int]:
    """Return the position of each range of addresses, and where the last of them ends.

    Ranges keep their order, and those that overlap or touch do so afterwards. Addresses that are in
    no range are left out, so that a recording of any card needs no more of them than it uses.

    Args:
        ranges: address and bytes of each range.

    Example:
        >>> from pytest_cka_memory.snapshots.request_list import positions_of
        >>> unit = 2 * 2**20
        >>> places, end = positions_of([(0x7F00_0000_0000, 3 * unit), (0x1000_0000_0000, unit)])
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


_PLAIN = "expandable_segments:False,max_split_size_mb:1048576,roundup_power2_divisions:[>:1]"
_EXPANDABLE = "expandable_segments:True,max_split_size_mb:1048576,roundup_power2_divisions:[>:1]"
"""Settings under which any state can be rebuilt; those of the run are set after that."""
_FIRST_HOLDER = 2**63
"""Keys from here on are of memory that was free when the recording began."""
_MOST_HOLDERS = 2_000_000
"""More are only needed for a file that was made to take long."""
_REGION_BYTES = 2**38
"""Expandable segments that are farther apart have address ranges of their own."""


@dataclass
class Requests:
    """What a device's allocator was asked for."""

    actions: bytearray
    keys: array[int]
    sizes: array[int]
    streams: array[int]
    pools: array[int]
    texts: list[str]
    """Settings; an empty one stands for those of the run."""
    of_event: array[int]
    """Request -> number of the event that made it; of those that rebuild a state, 0."""
    beginning: Beginning
    grown: array[int]
    """Numbers of the requests for which the recording's card gave memory by ``cudaMalloc``."""
    positions: array[int]
    """Where that memory was among all that the card gave, in bytes from the lowest."""
    positions_bytes: int = 0
    """The end of the last of them."""
    first: int = 0
    """The number of the first request of the recording itself."""
    releases: int = 0
    """How many times the allocator released its cache because the card was full."""
    unclear_releases: int = 0
    """How many releases may have been the program's, or the allocator's own."""
    attempts: int = 0
    """Allocations that were refused."""

    def as_data(self) -> dict[str, Any]:
        """Return them as :mod:`emulated_cuda.replaying` reads them."""
        arrays = ("keys", "sizes", "streams", "pools", "grown", "positions")
        return {
            "actions": bytes(self.actions),
            **{name: getattr(self, name).tobytes() for name in arrays},
            "texts": self.texts,
            "positions_bytes": self.positions_bytes,
        }


def requests_of(snapshot: Snapshot, device: Device) -> Requests:
    """Return the requests that a recording of a device consists of."""
    beginning = beginning_of(device)
    made = Requests(
        actions=bytearray(),
        keys=array("Q"),
        sizes=array("Q"),
        streams=array("I"),
        pools=array("I"),
        texts=[],
        of_event=array("I"),
        beginning=beginning,
        grown=array("I"),
        positions=array("Q"),
    )
    maker = _Maker(made)
    if beginning.segments:
        maker.rebuild(beginning.segments)
    maker.add(replaying.BEGIN)
    made.first = len(made.actions)
    _Follower(maker, snapshot.sites, device).follow()
    made.positions, made.positions_bytes = positions_of(maker.given)
    return made


class _Maker:
    """Adds requests, and those that rebuild a state."""

    def __init__(self, made: Requests) -> None:
        self.made = made
        self._holders = _FIRST_HOLDER
        self._held: list[int] = []
        """Keys of what was allocated in the place of free memory."""
        self.given: list[tuple[int, int]] = []
        """Address and bytes of the memory that the card gave for each request that has grown."""
        self._again: list[tuple[int, OldBlock]] = []
        """Keys of blocks that are one with the gap behind them, until that is free."""

    def add(
        self,
        action: int,
        key: int = 0,
        size: int = 0,
        stream: int = 0,
        pool: int = 0,
        event: int = 0,
    ) -> None:
        made = self.made
        made.actions.append(action)
        made.keys.append(key)
        made.sizes.append(size)
        made.streams.append(stream)
        made.pools.append(pool)
        made.of_event.append(event)

    def grow(self, address: int, size: int) -> None:
        """Note the memory that the card gives for the request that is added next."""
        self.made.grown.append(len(self.made.actions))
        self.given.append((address, size))

    def rebuild(self, segments: Sequence[OldSegment]) -> None:
        """Rebuild segments: each is filled from its start, and then what was free is freed."""
        expandable = [segment for segment in segments if segment.is_expandable]
        if expandable:
            self._set(_EXPANDABLE)
            self._rebuild_expandable(expandable)
        self._set(_PLAIN)
        for segment in segments:
            if not segment.is_expandable:
                self._fill_plain(segment)
        self._release_held()
        self._set("")

    def _set(self, text: str) -> None:
        if text not in self.made.texts:
            self.made.texts.append(text)
        self.add(replaying.SET, self.made.texts.index(text))

    def _fill_plain(self, segment: OldSegment) -> None:
        stream, pool = segment.stream, segment.pool
        self.grow(segment.address, segment.bytes)
        if not segment.is_small:
            # A segment of this size, of which all is free: nothing else of its stream is.
            key = self._hold(segment.bytes, stream, pool)
            self._held.remove(key)
            self.add(replaying.FREE, key)
        at = segment.address
        for block in segment.blocks:
            self._hold_gap(block.address - at, segment)
            self.add(replaying.ALLOCATE, block.address, _request(block), stream, pool)
            at = block.address + block.bytes
        self._hold_gap(segment.address + segment.bytes - at, segment)

    def _hold_gap(self, size: int, segment: OldSegment) -> None:
        while size >= ROUNDING:
            part = min(size, MOST_SMALL_BYTES) if segment.is_small else size
            self._hold(part, segment.stream, segment.pool)
            size -= part

    def _hold(self, size: int, stream: int, pool: int) -> int:
        key = self._holders
        self._holders += 1
        if key - _FIRST_HOLDER > _MOST_HOLDERS:
            raise ReportError(
                "cannot replay the recording, because at its start more memory was reserved but "
                "unused than any card has; record the program again from its start"
            )
        self.add(replaying.ALLOCATE, key, size, stream, pool)
        self._held.append(key)
        return key

    def _release_held(self) -> None:
        # These first: while everything else is held, each gets its own place again.
        for key, block in self._again:
            self.add(replaying.FREE, key)
            self.add(replaying.ALLOCATE, block.address, _request(block), block.stream, block.pool)
        self._again.clear()
        for key in self._held:
            self.add(replaying.FREE, key)
        self._held.clear()

    def _rebuild_expandable(self, segments: Sequence[OldSegment]) -> None:
        """Fill address ranges, unmap what has no memory, and free what was free."""
        unmapped: list[int] = []
        ends: dict[tuple[int, int, bool], int] = {}
        for segment in segments:
            kind = (segment.stream, segment.pool, segment.is_small)
            end = ends.get(kind)
            if end is not None and segment.address - end < _REGION_BYTES:
                before = len(self._held)
                self._hold_gap(segment.address - end, segment)
                unmapped += self._held[before:]
                del self._held[before:]
            self._fill_expandable(segment)
            ends[kind] = segment.address + segment.bytes
        for key in unmapped:
            self.add(replaying.FREE, key)
        if unmapped:
            self.add(replaying.EMPTY_CACHE)
        self._release_held()

    def _fill_expandable(self, segment: OldSegment) -> None:
        stream, pool = segment.stream, segment.pool
        ends = [block.address for block in segment.blocks[1:]]
        ends.append(segment.address + segment.bytes)
        if not segment.blocks:
            self._hold_gap(segment.bytes, segment)
            return
        self._hold_gap(segment.blocks[0].address - segment.address, segment)
        for block, end in zip(segment.blocks, ends, strict=True):
            gap = end - block.address - block.bytes
            if 0 < gap <= MOST_SMALL_BYTES and not segment.is_small:
                # It is too small for a request of its own among large blocks.
                self._again.append((self._holders, block))
                self.add(replaying.ALLOCATE, self._holders, block.bytes + gap, stream, pool)
                self._holders += 1
            else:
                self.add(replaying.ALLOCATE, block.address, _request(block), stream, pool)
                self._hold_gap(gap, segment)


def _request(block: OldBlock) -> int:
    """Return the request for which the allocator gives a block of exactly this size."""
    exact = -(-block.requested_bytes // ROUNDING) * ROUNDING == block.bytes
    return block.requested_bytes if exact and block.requested_bytes else block.bytes


class _Follower:
    """Adds the requests that a recording's events are."""

    def __init__(self, maker: _Maker, sites: Sequence[Site], device: Device) -> None:
        self._maker, self._sites, self._device = maker, sites, device
        self._last_of_pool = _last_allocations(device)

    def follow(self) -> None:
        device, add = self._device, self._maker.add
        freed_by = self._maker.made.beginning.freed_by
        columns = (device.actions, device.addresses, device.sizes, device.streams, device.pools)
        last = -1
        block: tuple[int, int] | None = None
        for number, (action, address, size, stream, pool) in enumerate(zip(*columns, strict=True)):
            if action == SEGMENT_ALLOC:
                block = (address, size)
            elif action == ALLOC:
                if block is not None and block[0] <= address < sum(block):
                    self._maker.grow(*block)
                block = None
                add(replaying.ALLOCATE, address, size, stream, pool, number)
            elif action == freed_by:
                add(replaying.FREE, address, event=number)
            elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
                if last not in (SEGMENT_FREE, SEGMENT_UNMAP):
                    self._released(number)
            elif action == OUT_OF_MEMORY:
                self._maker.made.attempts += 1
                add(replaying.ATTEMPT, 0, size, stream, pool, number)
            last = action

    def _released(self, number: int) -> None:
        """Add the request that a run of released segments was."""
        device, made = self._device, self._maker.made
        end = number
        pools = set()
        while end < len(device) and device.actions[end] in (SEGMENT_FREE, SEGMENT_UNMAP):
            pools.add(device.pools[end])
            end += 1
        for pool in pools - {0}:
            if self._last_of_pool.get(pool, -1) < number:
                self._maker.add(replaying.DROP_POOL, pool, event=number)
        flags = self._sites[device.places[number]].flags
        has_stack = device.places[number] != 0
        grows = end < len(device) and device.actions[end] in (
            *(SEGMENT_ALLOC, SEGMENT_MAP),
            OUT_OF_MEMORY,
        )
        is_own = flags & unpickling.IN_EMPTY_CACHE == 0 if has_stack else grows
        made.unclear_releases += not has_stack and grows
        made.releases += is_own
        self._maker.add(replaying.RELEASE if is_own else replaying.EMPTY_CACHE, event=number)


def _last_allocations(device: Device) -> dict[int, int]:
    """Return private pool -> number of the last event that allocated in it."""
    if len(device.pool_names) < 2:
        return {}
    rows = zip(device.actions, device.pools, strict=True)
    return {pool: number for number, (action, pool) in enumerate(rows) if action == ALLOC}


def recorded_reserve(device: Device, reserved_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield number of an event and the reserve after it, of all events that change it.

    Args:
        device: what was recorded.
        reserved_bytes: the reserve when the recording began.
    """
    for number, action in enumerate(device.actions):
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            reserved_bytes += device.sizes[number]
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved_bytes -= device.sizes[number]
        else:
            continue
        yield number, reserved_bytes


def layout_of(beginning: Beginning) -> list[Mapping[str, Any]]:
    """Return the segments in which a recording begins, as they can be compared."""
    return [
        {
            "bytes": segment.bytes,
            "stream": segment.stream,
            "is_small": segment.is_small,
            "blocks": list(_parts(segment)),
        }
        for segment in beginning.segments
    ]


def _parts(segment: OldSegment) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of each block of a segment, and whether it is in use."""
    at = segment.address
    for block in segment.blocks:
        if block.address > at:
            yield block.address - at, False
        yield block.bytes, True
        at = block.address + block.bytes
    if at < segment.address + segment.bytes:
        yield segment.address + segment.bytes - at, False
