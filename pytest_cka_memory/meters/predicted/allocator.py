"""PyTorch's CUDA caching allocator, simulated: what it would reserve, split, merge and give back.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``DeviceCachingAllocator``) with its
default settings; names in parentheses are the names there. Nothing is allocated, only counted.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cka_memory.errors import CapacityError

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (``kMinBlockSize``)."""
SMALL_BYTES = 2**20
"""Blocks up to here come from the small pool (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""What the small pool asks the driver for (``kSmallBuffer``)."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""What the large pool asks for, for blocks below the next (``kLargeBuffer``)."""
OWN_SEGMENT_BYTES = 10 * 2**20
"""Blocks from here on get a segment of their own size (``kMinLargeAlloc``) ..."""
OWN_SEGMENT_STEP_BYTES = 2 * 2**20
"""... in steps of this (``kRoundLarge``)."""


def rounded(size: int, step: int) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


def block_bytes(size: int) -> int:
    """Bytes of the block for a request (``round_size``)."""
    return max(MIN_BLOCK_BYTES, rounded(size, MIN_BLOCK_BYTES))


def segment_bytes(size: int) -> int:
    """Bytes asked of the driver where no free block holds `size` (``get_allocation_size``)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded(size, OWN_SEGMENT_STEP_BYTES)


@dataclass(eq=False)
class Level:
    """A sum of bytes and the highest it has been."""

    current: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        self.peak = self.current


@dataclass(eq=False)
class Block:
    """A piece of a segment, between its neighbours there."""

    pool: "Pool"
    stream: int
    address: int
    size: int
    requested: int = 0
    in_use: bool = False
    mapped: bool = True
    """Whether memory lies behind it; it always does but in expandable segments."""
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def end(self) -> int:
        return self.address + self.size

    def split(self, size: int) -> "Block":
        """Keep the first `size` bytes; returns the rest, a block of its own."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size)
        rest.mapped, rest.before, rest.after = self.mapped, self, self.after
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def absorb(self, other: "Block | None") -> bool:
        """Take in a neighbour of the same kind, free and outside its pool's list (``merge``)."""
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
    """Free blocks of one kind, in the order they are tried: by stream, size, then address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, int, Block]] = []

    def __iter__(self) -> Iterator[Block]:
        return iter([entry[-1] for entry in self._free])

    def add(self, block: Block) -> None:
        insort(self._free, self._entry(block))

    def remove(self, block: Block) -> None:
        del self._free[bisect_left(self._free, self._entry(block))]

    def at_least(self, size: int, stream: int) -> Iterator[Block]:
        """Free blocks of a stream that hold `size`, best fit first."""
        for index in range(bisect_left(self._free, (stream, size, 0)), len(self._free)):
            block = self._free[index][-1]
            if block.stream != stream:
                return
            yield block

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, int, Block]:
        return block.stream, block.size, block.address, block  # addresses differ: no tie


class CachingAllocator:
    """Blocks and segments of one card; streams are numbers, and share no blocks.

    Args:
        capacity_bytes: the most it can reserve; None for a card without end.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = Level()
        """Bytes of blocks in use."""
        self.requested = Level()
        """Bytes asked for in these blocks."""
        self.reserved = Level()
        """Bytes of segments."""
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Return a block that holds `size` bytes, 1 or more (``malloc``).

        Raises:
            CapacityError: where the card is full, after every cached segment was given back.
        """
        wanted = block_bytes(size)
        pool = self._small if wanted <= SMALL_BYTES else self._large
        block = self._best_fit(pool, wanted, stream) or self._grown(pool, wanted, stream)
        if block is None:
            self.empty_cache()
            block = self._grown(pool, wanted, stream)
        if block is None:
            raise CapacityError(size)
        if self._splits(pool, block.size - wanted):
            pool.add(block.split(wanted))
        block.in_use, block.requested = True, size
        self.allocated.add(block.size)
        self.requested.add(size)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours of its segment (``free_block``)."""
        self.allocated.add(-block.size)
        self.requested.add(-block.requested)
        block.in_use = False
        self._return(block)

    def empty_cache(self) -> None:
        """Give wholly free segments back to the driver (``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            for block in pool:
                self._release(block)

    def reset_peak(self) -> None:
        """Start all peaks anew from the present levels."""
        for level in (self.allocated, self.requested, self.reserved):
            level.reset_peak()

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        best = next(pool.at_least(size, stream), None)
        if best is not None:
            pool.remove(best)
        return best

    def _grown(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A new segment as one block; None if it does not fit the card (``alloc_block``)."""
        asked = segment_bytes(size)
        if not self._fits(asked):
            return None
        self.reserved.add(asked)
        block = Block(pool, stream, self._next_address, asked)
        self._next_address += asked
        return block

    def _fits(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved.current + size <= self.capacity_bytes

    def _splits(self, pool: Pool, rest: int) -> bool:
        """Whether a block's unused rest becomes a block of its own (``should_split``)."""
        return rest >= MIN_BLOCK_BYTES if pool.small else rest > SMALL_BYTES

    def _return(self, block: Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and block.absorb(neighbour) and neighbour.mapped:
                block.pool.remove(neighbour)
        block.pool.add(block)

    def _release(self, block: Block) -> None:
        if block.before is None and block.after is None:
            block.pool.remove(block)
            self.reserved.add(-block.size)
