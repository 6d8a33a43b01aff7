"""Blocks that a function of the library has written to one buffer.

A region's end lists all blocks that are live, which may be 100,000, and mostly nobody reads them:
so a Python object is made only of those that are read, and a column is read in one pass.
"""

from collections.abc import Callable, Sequence
from ctypes import c_int64, sizeof
from typing import Any, overload

from pytest_cka_memory.meters.blocks.library import Block

Write = Callable[[Any, int], int]
"""Writes blocks to a C array of this size, and returns how many there are."""


_BLOCK_BYTES = sizeof(Block)


class WrittenBlocks(Sequence[Block]):
    """The blocks that `write` writes, `size` at most."""

    def __init__(self, size: int, write: Write) -> None:
        self._buffer = bytearray(size * _BLOCK_BYTES)
        self._blocks = (Block * size).from_buffer(self._buffer)
        self._count = write(self._blocks, size)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self._blocks[place] for place in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._blocks[index % self._count]

    @property
    def addresses(self) -> list[int]:
        """The address of each block."""
        return self._column("address")

    @property
    def sizes(self) -> list[int]:
        """The bytes of each block."""
        return self._column("bytes")

    @property
    def serials(self) -> list[int]:
        """The number of each allocation."""
        return self._column("serial")

    @property
    def stacks(self) -> list[int]:
        """The stack of each allocation."""
        return self._column("stack")

    def _column(self, name: str) -> list[int]:
        if not self._count:  # as after most tests
            return []
        field = getattr(Block, name)
        words = memoryview(self._buffer)
        numbers = words.cast("q") if field.size == sizeof(c_int64) else words.cast("I")
        per_block = _BLOCK_BYTES // field.size
        first, end = field.offset // field.size, self._count * per_block
        return numbers[first:end:per_block].tolist()
