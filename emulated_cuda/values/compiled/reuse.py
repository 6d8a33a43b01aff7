"""Which operations may write their result into an operand that nothing needs afterwards.

Then it stays in the cache of the processor, while a new value takes other memory.
"""

from __future__ import annotations

from emulated_cuda.values.compiled.operations import HALF, Operation, uses
from emulated_cuda.values.compiled.table import INTO_OPERANDS

_TAKES_NEW_MEMORY = {"tt.load"}
"""Others whose result shares memory with no other value."""
_KEEPS_NO_VIEW = {"tt.load", "tt.store", "arith.cmpf", "arith.cmpi"}
"""Others whose results do not share the memory of an operand."""


def spare_operands(operations: list[Operation], released: list[list[str]]) -> list[tuple[int, ...]]:
    """Return for each operation of a block the positions of operands that its result may replace.

    Args:
        operations: of the block, without its end.
        released: for each operation the values of the block that nothing after it needs.
    """
    own = {
        name
        for one in operations
        if one.name in INTO_OPERANDS or one.name in _TAKES_NEW_MEMORY
        for name in one.results
    }
    for one in operations:
        if one.name not in INTO_OPERANDS and one.name not in _KEEPS_NO_VIEW:
            own.difference_update(uses(one))  # a region may give a value as it is
    return [
        tuple(at for at, name in enumerate(one.operands) if name in own.intersection(names))
        if _writes_into_operands(one)
        else ()
        for one, names in zip(operations, released, strict=True)
    ]


def _writes_into_operands(one: Operation) -> bool:
    """Whether an operation is computed without a rounding or a conversion after it."""
    return (
        one.name in INTO_OPERANDS
        and bool(one.type().shape)
        and one.type().dtype not in HALF
        and one.type().element != "i1"
    )
