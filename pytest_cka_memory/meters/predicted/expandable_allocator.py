"""The simulated caching allocator with ``expandable_segments:True``: one growing segment, not many.

A stream has one long range of addresses in each pool, which is mapped to memory page by page.
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
    round_up,
)

_RANGE_BYTES = 2**50
"""Length of a range. CUDA's is 9/8 of the card; the card is full before either is used up."""


class ExpandableAllocator(CachingAllocator):
    """Like :class:`CachingAllocator`, with segments that grow and shrink by pages."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._starts: dict[tuple[Pool, int], Block] = {}

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the fitting block that can grow the least, so that others can still grow."""
        best: Block | None = None
        for block in pool.at_least(size, stream):
            if best is not None and _size_with_growth(block) >= _size_with_growth(best):
                break
            best = block
        if best is not None:
            pool.remove(best)
        return best

    def _splits(self, pool: Pool, rest: int) -> bool:
        return rest >= MIN_BLOCK_BYTES

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        block = self._place(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None  # _place ensures it
            if not self._map(following, min(following.size, size - block.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int, stream: int) -> Block:
        """Return the first block of a large enough free run (``find_expandable_block``)."""
        block = self._start(pool, stream).after
        while block is not None:
            if not block.in_use and _free_run_bytes(block) >= size and _reaches_unmapped(block):
                return block
            block = block.after
        raise AssertionError("the range is larger than any card")

    def _start(self, pool: Pool, stream: int) -> Block:
        """Return the start of a range: a block of 0 bytes, in use so that it is never merged."""
        key = pool, stream
        if key not in self._starts:
            start = Block(pool, stream, self._next_address, _RANGE_BYTES, mapped=False)
            start.split(0)
            start.mapped = start.in_use = True
            self._starts[key] = start
            self._next_address += _RANGE_BYTES
        return self._starts[key]

    def _map(self, block: Block, size: int) -> bool:
        """Map the start of an unmapped block to memory; return False if the card is full."""
        size = round_up(size, _page(block.pool))
        if not self._fits(size):
            return False
        if size < block.size:
            block.split(size)
        block.mapped = True
        self.reserved.add(size)
        self._add_free(block)
        return True

    def _release(self, block: Block) -> None:
        """Unmap every whole page of a free block."""
        page = _page(block.pool)
        base = self._start(block.pool, block.stream).address
        start = base + round_up(block.address - base, page)
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


def _size_with_growth(block: Block) -> int:
    """Return the size to which a block can grow (``expandable_size``)."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _free_run_bytes(block: Block | None) -> int:
    """Return the bytes of a block and the free blocks after it."""
    total = 0
    while block is not None and not block.in_use:
        total += block.size
        block = block.after
    return total


def _reaches_unmapped(block: Block) -> bool:
    return not block.mapped or (block.after is not None and not block.after.mapped)
