"""The caching allocator under ``expandable_segments:True``: one segment that grows, not many.

A stream has one long range of addresses in each pool, and memory is put behind it page by page.
The rules are ``try_allocate_expandable_block``, ``map_block`` and ``unmap_block`` of
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from pytest_cka_memory.meters.predicted.allocator import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    Pool,
    rounded,
)

_ENDLESS = 2**50
"""Addresses of a range. CUDA's is 9/8 of the card, which memory ends before as well."""


class ExpandableAllocator(CachingAllocator):
    """As :class:`CachingAllocator`, with segments that grow and shrink by pages."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._starts: dict[tuple[Pool, int], Block] = {}

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The fitting block with the least room to grow, so that the end stays free to."""
        best: Block | None = None
        for block in pool.at_least(size, stream):
            if best is not None and _room(block) >= _room(best):
                break
            best = block
        if best is not None:
            pool.remove(best)
        return best

    def _splits(self, pool: Pool, rest: int) -> bool:
        return rest >= MIN_BLOCK_BYTES

    def _grown(self, pool: Pool, size: int, stream: int) -> Block | None:
        block = self._place(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None  # _place saw to it
            if not self._map(following, min(following.size, size - block.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int, stream: int) -> Block:
        """The first run of free and unmapped blocks that has room (``find_expandable_block``)."""
        block = self._start(pool, stream).after
        while block is not None:
            if not block.in_use and _run(block) >= size and _meets_unmapped(block):
                return block
            block = block.after
        raise AssertionError("the range has no end")

    def _start(self, pool: Pool, stream: int) -> Block:
        """The start of a range: a block of no bytes that is always in use, so never merged."""
        key = pool, stream
        if key not in self._starts:
            start = Block(pool, stream, self._next_address, _ENDLESS, mapped=False)
            start.split(0)
            start.mapped = start.in_use = True
            self._starts[key] = start
            self._next_address += _ENDLESS
        return self._starts[key]

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the start of an unmapped block; False if the card is full."""
        size = rounded(size, _page(block.pool))
        if not self._fits(size):
            return False
        if size < block.size:
            block.split(size)
        block.mapped = True
        self.reserved.add(size)
        self._return(block)
        return True

    def _release(self, block: Block) -> None:
        """Take the memory from behind every whole page of a free block."""
        page = _page(block.pool)
        base = self._start(block.pool, block.stream).address
        start = base + rounded(block.address - base, page)
        end = base + (block.end - base) // page * page
        if start >= end:
            return
        block.pool.remove(block)
        if start > block.address:
            head, block = block, block.split(start - block.address)
            block.pool.add(head)
        if end < block.end:
            block.pool.add(block.split(end - start))
        block.mapped = False
        self.reserved.add(start - end)
        for neighbour in (block.before, block.after):
            block.absorb(neighbour)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _room(block: Block) -> int:
    """What a block can grow to (``expandable_size``)."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _run(block: Block | None) -> int:
    """Bytes of this block and of those behind it up to one in use."""
    total = 0
    while block is not None and not block.in_use:
        total += block.size
        block = block.after
    return total


def _meets_unmapped(block: Block) -> bool:
    return not block.mapped or (block.after is not None and not block.after.mapped)
