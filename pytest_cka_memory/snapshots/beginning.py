"""The state in which a recording begins, computed backwards from the segments at its end.

A recording of a program from its start begins with nothing. One that was started later, or that
kept only the last events, begins with memory that earlier events had allocated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from pytest_cka_memory.snapshots.reading import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    IN_USE,
    INACTIVE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Block,
    Device,
    Segment,
)

ROUNDING = 512
"""The allocator's blocks are multiples of this."""
MOST_SMALL_BYTES = 2**20
"""Larger requests are from other segments than smaller ones."""
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_PAGE_BYTES = 20 * 2**20
"""An expandable segment of large blocks consists of such pages, one of small blocks of 2 MB."""


class OldBlock(NamedTuple):
    """A block that was in use when the recording began."""

    address: int
    bytes: int
    requested_bytes: int
    stream: int
    pool: int


@dataclass
class OldSegment:
    """Memory that the allocator had when the recording began."""

    address: int
    bytes: int
    stream: int
    pool: int
    is_small: bool
    is_expandable: bool
    blocks: list[OldBlock] = field(default_factory=list)


@dataclass
class Beginning:
    """What a device had when its recording began."""

    segments: list[OldSegment]
    """In the order of their addresses."""
    reserved_bytes: int
    used_bytes: int
    freed_by: int
    """The action by which a block is free again: usually :data:`FREE_COMPLETED`."""
    lost_blocks: int = 0
    """Blocks outside of every segment, and events that contradict each other."""


def rounded(size: int) -> int:
    """Return the bytes of a block for a request under the default settings."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def freeing_action(device: Device) -> int:
    """Return the action by which blocks are free again, in a recording that may omit some."""
    return FREE_COMPLETED if FREE_COMPLETED in device.actions else FREE_REQUESTED


def beginning_of(device: Device) -> Beginning:
    """Return the state in which a device's recording begins, and complete :attr:`Device.pools`.

    Both are found by following the events backwards, from the segments at the end. Recordings
    before torch 2.12 do not say in which pool an event was, but those segments do. What they do not
    show is the pool of a graph that was deleted before: its events stay in the allocator's own.
    """
    return _Backwards(device).result()


def state_after(device: Device, event: int) -> Device | None:
    """Return the segments that a device had after an event, as of a recording without events.

    None if the events contradict the segments at the end, so that they are not known.

    Args:
        device: the recording.
        event: a number of an event.
    """
    if event == len(device) - 1:
        return device
    names = ("actions", "addresses", "sizes", "times", "streams", "pools", "places")
    later = replace(device, **{name: getattr(device, name)[event + 1 :] for name in names})
    then = beginning_of(later)
    if then.lost_blocks:
        return None
    sites = {block.address: block.site for segment in device.segments for block in segment.blocks}
    rows = zip(device.actions, device.addresses, device.places, strict=True)
    for action, address, site in islice(rows, event + 1):
        if action == ALLOC:
            sites[address] = site
    nothing = {name: getattr(device, name)[:0] for name in names}
    segments = [_with_gaps(segment, device.index, sites) for segment in then.segments]
    return replace(device, segments=segments, **nothing)


def _with_gaps(segment: OldSegment, device: int, sites: Mapping[int, int]) -> Segment:
    """Return a segment with its free blocks, as torch writes it."""
    blocks: list[Block] = []
    at = segment.address
    end = segment.address + segment.bytes
    for block in segment.blocks:
        if at < block.address:
            blocks.append(Block(at, block.address - at, 0, INACTIVE, 0))
        blocks.append(Block(*block[:3], IN_USE, sites.get(block.address, 0)))
        at = block.address + block.bytes
    if at < end:
        blocks.append(Block(at, end - at, 0, INACTIVE, 0))
    place = (segment.address, segment.bytes, segment.stream, segment.pool)
    return Segment(device, *place, segment.is_small, segment.is_expandable, tuple(blocks))


class _Backwards:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._freed_by = freeing_action(device)
        self._live: dict[int, OldBlock] = {}
        self._segments: dict[int, OldSegment] = {}
        self._mapped = _Ranges()
        self._contradictions = 0
        self._private = _PrivateRanges()
        for each in device.segments:
            if each.is_expandable:
                self._mapped.add(each.address, each.bytes, each.stream, each.pool, each.is_small)
            else:
                self._segments[each.address] = OldSegment(*each[1:7])
            if each.pool and not device.names_pools:
                self._private.add(each.address, each.bytes, each.pool)
            for block in each.blocks:
                if block.state != INACTIVE:
                    self._live[block.address] = OldBlock(*block[:3], each.stream, each.pool)
        self._go_back()

    def _go_back(self) -> None:
        device, live, freed_by = self._device, self._live, self._freed_by
        private = self._private
        for number in range(len(device) - 1, -1, -1):
            action, address = device.actions[number], device.addresses[number]
            if private:
                device.pools[number] = private.pool_of(address)
            if action == ALLOC:
                # Backwards, an allocation is the end of a block, which must be in use after it.
                if live.pop(address, None) is None:
                    self._contradictions += 1
            elif action == freed_by:
                # The event has the size that was requested; _complete() computes that of the block.
                size = device.sizes[number]
                stream, pool = device.streams[number], device.pools[number]
                live[address] = OldBlock(address, 0, size, stream, pool)
            elif SEGMENT_ALLOC <= action <= SEGMENT_UNMAP:
                self._segment(number, action, address, device.sizes[number])

    def _segment(self, number: int, action: int, address: int, size: int) -> None:
        stream, pool = self._device.streams[number], self._device.pools[number]
        if action == SEGMENT_ALLOC:
            if self._segments.pop(address, None) is None:
                self._contradictions += 1
            self._private.remove(address)
        elif action == SEGMENT_FREE:
            is_small = size <= _SMALL_SEGMENT_BYTES
            self._segments[address] = OldSegment(address, size, stream, pool, is_small, False)
        elif action == SEGMENT_MAP:
            # Backwards: what is mapped here was not mapped before.
            self._mapped.remove(address, size)
        else:
            self._mapped.add(address, size, stream, pool, None)

    def result(self) -> Beginning:
        segments = [*self._segments.values(), *self._mapped.segments(self._live)]
        segments.sort(key=lambda segment: segment.address)
        starts = [segment.address for segment in segments]
        lost = self._contradictions
        for block in sorted(self._live.values()):
            at = bisect_right(starts, block.address) - 1
            if at < 0 or block.address >= segments[at].address + segments[at].bytes:
                lost += 1
            else:
                segments[at].blocks.append(block)
        for segment in segments:
            _complete(segment)
        return Beginning(
            segments,
            sum(segment.bytes for segment in segments),
            sum(block.bytes for segment in segments for block in segment.blocks),
            self._freed_by,
            lost,
        )


def _complete(segment: OldSegment) -> None:
    """Compute the bytes of blocks of which only the request is known.

    The allocator does not split off 1 MB or less of a large block, except in an expandable
    segment: a gap of that size belongs to the block before it.
    """
    ends = [block.address for block in segment.blocks[1:]]
    ends += [segment.address + segment.bytes] if segment.blocks else []
    splits_all = segment.is_small or segment.is_expandable
    for number, (block, end) in enumerate(zip(segment.blocks, ends, strict=True)):
        if block.bytes == 0:
            size = min(rounded(block.requested_bytes), end - block.address)
            gap = end - block.address - size
            if not splits_all and gap <= MOST_SMALL_BYTES:
                size += gap
            segment.blocks[number] = block._replace(bytes=size)


class _Ranges:
    """Addresses to which memory is mapped, of expandable segments, as disjoint ranges."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int, int, bool | None]] = {}
        """Start -> end, stream, pool and whether small."""

    def add(self, start: int, size: int, stream: int, pool: int, is_small: bool | None) -> None:
        self._ranges[start] = (start + size, stream, pool, is_small)

    def remove(self, start: int, size: int) -> None:
        end = start + size
        exact = self._ranges.get(start)
        if exact is not None and exact[0] == end:
            del self._ranges[start]
            return
        for first, (last, *rest) in list(self._ranges.items()):
            if first < end and start < last:
                del self._ranges[first]
                for low, high in ((first, start), (end, last)):
                    if low < high:
                        self._ranges[low] = (high, rest[0], rest[1], rest[2])  # type: ignore[assignment]

    def segments(self, live: dict[int, OldBlock]) -> Iterable[OldSegment]:
        """Return ranges that touch each other as one segment."""
        merged: list[OldSegment] = []
        kinds: list[set[bool]] = []
        for start in sorted(self._ranges):
            end, stream, pool, is_small = self._ranges[start]
            last = merged[-1] if merged else None
            touches = last is not None and last.address + last.bytes == start
            if last is not None and touches and (last.stream, last.pool) == (stream, pool):
                last.bytes += end - start
            else:
                merged.append(OldSegment(start, end - start, stream, pool, False, True))
                kinds.append(set())
            if is_small is not None:
                kinds[-1].add(is_small)
        # Events do not say whether small or large blocks are in a range; the blocks themselves do,
        # and in an empty one its size.
        addresses = sorted(live)
        for segment, known in zip(merged, kinds, strict=True):
            first = bisect_right(addresses, segment.address - 1)
            last_one = bisect_right(addresses, segment.address + segment.bytes - 1)
            sizes = [live[at].requested_bytes for at in addresses[first:last_one]]
            if known:
                segment.is_small = True in known
            elif sizes:
                segment.is_small = max(sizes) <= MOST_SMALL_BYTES
            else:
                segment.is_small = segment.bytes % _LARGE_PAGE_BYTES != 0
        return merged


class _PrivateRanges:
    """Segments of private pools, to find the pool of an address while going back in time."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._of: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add(self, start: int, size: int, pool: int) -> None:
        self._of[start] = (start + size, pool)
        self._starts = sorted(self._of)

    def remove(self, start: int) -> None:
        if self._of.pop(start, None) is not None:
            self._starts.remove(start)

    def pool_of(self, address: int) -> int:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return 0
        end, pool = self._of[self._starts[at]]
        return pool if address < end else 0
