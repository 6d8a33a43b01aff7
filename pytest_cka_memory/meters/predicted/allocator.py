"""A simulation of PyTorch's CUDA caching allocator: what it reserves, splits, merges and releases.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``DeviceCachingAllocator``) with its
default settings; names in parentheses are from that file. Nothing is allocated, only counted.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cka_memory.errors import CapacityError

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (``kMinBlockSize``)."""
SMALL_BYTES = 2**20
"""Blocks up to this size come from the small pool (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""Segment size of the small pool (``kSmallBuffer``)."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""Segment size of the large pool for blocks below `OWN_SEGMENT_BYTES` (``kLargeBuffer``)."""
OWN_SEGMENT_BYTES = 10 * 2**20
"""Blocks from this size on get a segment of their own (``kMinLargeAlloc``)."""
OWN_SEGMENT_STEP_BYTES = 2 * 2**20
"""The size of such a segment is rounded up to a multiple of this (``kRoundLarge``)."""


def round_up(size: int, step: int) -> int:
    """Return `size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


def block_bytes(size: int) -> int:
    """Return the bytes of the block for a request (``round_size``)."""
    return max(MIN_BLOCK_BYTES, round_up(size, MIN_BLOCK_BYTES))


def segment_bytes(size: int) -> int:
    """Return the bytes of a new segment for a block of `size` (``get_allocation_size``)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, OWN_SEGMENT_STEP_BYTES)


@dataclass(eq=False)
class Level:
    """A number of bytes and its highest value so far."""

    current: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        self.peak = self.current


@dataclass(eq=False)
class Block:
    """A part of a segment, linked to its neighbours in the segment."""

    pool: "Pool"
    stream: int
    address: int
    size: int
    requested: int = 0
    in_use: bool = False
    mapped: bool = True
    """Whether it is backed by memory; in expandable segments it may not be."""
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def end(self) -> int:
        return self.address + self.size

    def split(self, size: int) -> "Block":
        """Keep the first `size` bytes; return the rest as a new block."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size)
        rest.mapped, rest.before, rest.after = self.mapped, self, self.after
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def absorb(self, other: "Block | None") -> bool:
        """Merge a free neighbour if both are mapped or both are not; return if done (``merge``)."""
        if other is None or other.in_use or other.mapped != self.mapped:
            return False
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size
        return True


class Pool:
    """Free blocks of the small or the large pool, in the order in which they are tried."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, int, Block]] = []
        """Sorted by stream, size and address."""

    def __iter__(self) -> Iterator[Block]:
        return iter([entry[-1] for entry in self._free])

    def add(self, block: Block) -> None:
        insort(self._free, self._entry(block))

    def remove(self, block: Block) -> None:
        del self._free[bisect_left(self._free, self._entry(block))]

    def at_least(self, size: int, stream: int) -> Iterator[Block]:
        """Yield the free blocks of a stream with at least `size` bytes, smallest first."""
        for index in range(bisect_left(self._free, (stream, size, 0)), len(self._free)):
            block = self._free[index][-1]
            if block.stream != stream:
                return
            yield block

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, int, Block]:
        # Addresses differ, so blocks are never compared.
        return block.stream, block.size, block.address, block


class CachingAllocator:
    """Blocks and segments of one card; streams are numbers and do not share blocks.

    Args:
        capacity_bytes: the most it can reserve; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = Level()
        """Bytes of blocks in use."""
        self.requested = Level()
        """Bytes requested in these blocks."""
        self.reserved = Level()
        """Bytes of segments."""
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Return a block for `size` bytes, 1 or more (``malloc``).

        Raises:
            CapacityError: if the card is full even after every cached segment was released.
        """
        block_size = block_bytes(size)
        pool = self._small if block_size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, block_size, stream) or self._new_block(
            pool, block_size, stream
        )
        if block is None:
            self.empty_cache()
            block = self._new_block(pool, block_size, stream)
        if block is None:
            raise CapacityError(size)
        if self._splits(pool, block.size - block_size):
            pool.add(block.split(block_size))
        block.in_use, block.requested = True, size
        self.allocated.add(block.size)
        self.requested.add(size)
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with free neighbours in its segment (``free_block``)."""
        self.allocated.add(-block.size)
        self.requested.add(-block.requested)
        block.in_use = False
        self._add_free(block)

    def empty_cache(self) -> None:
        """Release segments that are completely free (``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            for block in pool:
                self._release(block)

    def reset_peak(self) -> None:
        """Set all peaks to the current levels."""
        for level in (self.allocated, self.requested, self.reserved):
            level.reset_peak()

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        best = next(pool.at_least(size, stream), None)
        if best is not None:
            pool.remove(best)
        return best

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return a new segment as one block; None if the card is full (``alloc_block``)."""
        segment_size = segment_bytes(size)
        if not self._fits(segment_size):
            return None
        self.reserved.add(segment_size)
        block = Block(pool, stream, self._next_address, segment_size)
        self._next_address += segment_size
        return block

    def _fits(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved.current + size <= self.capacity_bytes

    def _splits(self, pool: Pool, rest: int) -> bool:
        """Whether the unused rest of a block becomes a new block (``should_split``)."""
        return rest >= MIN_BLOCK_BYTES if pool.small else rest > SMALL_BYTES

    def _add_free(self, block: Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and block.absorb(neighbour) and neighbour.mapped:
                block.pool.remove(neighbour)
        block.pool.add(block)

    def _release(self, block: Block) -> None:
        if block.before is None and block.after is None:
            block.pool.remove(block)
            self.reserved.add(-block.size)
