"""Operations on progressions whose results are progressions again.

A row returns NotImplemented if its result is none; then the elements are computed as usual. Results
are the same in both ways: sums and products of integers may wrap at any time, and what depends on
the size of a number asks :attr:`Progression.wraps` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda.triton import numbers
from emulated_cuda.triton.memory import pointee_of
from emulated_cuda.triton.progressions import Progression
from emulated_cuda.triton.ttir import Compute, Operation, on_progressions


def _both(function: Callable[[Progression, Progression], Any]) -> Compute:
    """Return a computation of two values that are both progressions."""

    def compute(programs: Any, a: Any, b: Any) -> Any:
        if type(a) is Progression and type(b) is Progression:
            return function(a, b)
        return NotImplemented

    return compute


# ---- Arithmetic ----


@on_progressions("arith.addi", "arith.subi")
def sum_or_difference(op: Operation) -> Compute:
    """Add or subtract two progressions: their bases, and their steps."""
    sign = 1 if op.name == "arith.addi" else -1

    def compute(a: Progression, b: Progression) -> Any:
        if a.base.dtype is torch.bool:
            return NotImplemented
        steps = tuple(x + sign * y for x, y in zip(a.steps, b.steps, strict=True))
        return Progression(torch.add(a.base, b.base, alpha=sign), steps, a.shape)

    return _both(compute)


@on_progressions("arith.muli")
def product(op: Operation) -> Compute:
    """Multiply a progression by a number; other products are not progressions."""

    def compute(a: Progression, b: Progression) -> Any:
        if not b.is_one_number:
            a, b = b, a
        if not b.is_one_number or a.base.dtype is torch.bool:
            return NotImplemented
        steps = a.steps
        if not a.is_one_number:
            factor = b.number
            if factor is None:  # a factor for each program: a progression has the same steps in all
                return NotImplemented
            steps = tuple(step * factor for step in steps)
        return Progression(a.base * b.base, steps, a.shape)

    return _both(compute)


@on_progressions("arith.divsi", "arith.divui", "arith.remsi", "arith.remui")
def position_in_rows(op: Operation) -> Compute:
    """The row or the column of positions.

    It is a progression if the positions of each program are all in the same row. If each program
    begins with a row, only the positions in one program are divided. Powers of 2 need no division.
    """
    is_row = op.name.startswith("arith.div")

    def within_rows(first: torch.Tensor, number: int, a: Progression) -> torch.Tensor:
        offsets = a.offsets()
        row = torch.div(offsets, number, rounding_mode="floor")
        positions = row + first.view(-1, *[1] * len(a.shape)) if is_row else offsets - row * number
        return positions.expand(-1, *a.shape)

    def compute(a: Progression, length: Progression) -> Any:
        number = length.number
        # The code below rounds down and a card towards zero: the same only if nothing is negative.
        if number is None or number <= 0 or a.limits()[0] < 0 or a.wraps:
            return NotImplemented
        row = torch.div(a.base, number, rounding_mode="floor")
        column = a.base - row * number
        # All positions of a program are in the row of its first one.
        if min(a.steps) >= 0 and int(column.max()) + a.distance() < number:
            if is_row:
                return Progression(row, (0,) * len(a.shape), a.shape)
            return Progression(column, a.steps, a.shape)
        if not column.any():  # each program begins at the beginning of a row
            return within_rows(row, number, a)
        if number & (number - 1):
            return NotImplemented
        elements = a.compact()
        positions = elements >> (number.bit_length() - 1) if is_row else elements & (number - 1)
        return positions.expand(-1, *a.shape)

    return _both(compute)


@on_progressions("arith.extsi", "arith.extui", "arith.trunci")
def in_another_size(op: Operation) -> Compute:
    """A longer or a shorter integer."""
    dtype, name = op.type().dtype, op.name

    def compute(programs: Any, a: Progression) -> Any:
        if torch.bool in (a.base.dtype, dtype):
            return NotImplemented
        # An element that wraps in the shorter type does not in the longer one.
        if name != "arith.trunci" and a.wraps:
            return NotImplemented
        if name == "arith.extui" and a.limits()[0] < 0:
            return NotImplemented
        return Progression(a.base.to(dtype), a.steps, a.shape)

    return compute


@on_progressions("tt.addptr")
def address(op: Operation) -> Compute:
    """An address, and how many elements further."""
    size = pointee_of(op).dtype.itemsize

    def compute(a: Progression, count: Progression) -> Any:
        if count.wraps:  # a count that wraps in its own type does not wrap as an address
            return NotImplemented
        steps = tuple(x + size * y for x, y in zip(a.steps, count.steps, strict=True))
        return Progression(torch.add(a.base, count.base, alpha=size), steps, a.shape)

    return _both(compute)


# ---- Masks ----

_BITS = {bit: torch.tensor([bit]) for bit in (False, True)}


@on_progressions("arith.cmpi")
def compare(op: Operation) -> Compute:
    """Compare numbers with a bound; often all are below it, or none."""
    name = op.keyword
    function = numbers.COMPARISONS[name]

    def compute(a: Progression, b: Progression) -> Any:
        if a.is_one_number and b.is_one_number:
            return Progression(function(a.base, b.base), a.steps, a.shape)
        if not a.wraps and not b.wraps:
            decided = _decided(name, a.limits(), b.limits())
            if decided is not None:
                return Progression(_BITS[decided], (0,) * len(a.shape), a.shape)
        return function(a.compact(), b.compact()).expand(-1, *a.shape)

    return _both(compute)


def _decided(name: str, a: tuple[int, int], b: tuple[int, int]) -> bool | None:
    """Return the result of a comparison of any two numbers in these limits; None if it varies."""
    if name[0] == "u":
        if a[0] < 0 or b[0] < 0:
            return None
        name = "s" + name[1:]
    if name[1] == "g":  # a > b is b < a
        a, b, name = b, a, "sl" + name[2:]
    if name in ("eq", "ne"):
        return None if a[0] <= b[1] and b[0] <= a[1] else name == "ne"
    is_strict = name == "slt"
    if a[1] < b[0] or (a[1] == b[0] and not is_strict):
        return True
    if a[0] > b[1] or (a[0] == b[1] and is_strict):
        return False
    return None


@on_progressions("arith.andi", "arith.ori")
def both_masks(op: Operation) -> Compute:
    """Combine two masks, if one of them is true or false everywhere."""
    is_and = op.name == "arith.andi"
    function = torch.bitwise_and if is_and else torch.bitwise_or

    def compute(programs: Any, a: Any, b: Any) -> Any:
        if a is NotImplemented or _dtype(a) is not torch.bool:
            return NotImplemented
        if type(a) is not Progression:
            a, b = b, a
        if type(b) is Progression:
            return Progression(function(a.base, b.base), a.steps, a.shape)
        if a.number is None:
            return NotImplemented
        return b if bool(a.number) is is_and else a

    return compute


def _dtype(value: Any) -> torch.dtype:
    dtype: torch.dtype = (value.base if type(value) is Progression else value).dtype
    return dtype


@on_progressions("arith.select")
def select(op: Operation) -> Compute:
    """The first or the second value, if the condition is the same everywhere."""

    def compute(programs: Any, condition: Any, first: Any, second: Any) -> Any:
        if type(condition) is not Progression or condition.number is None:
            return NotImplemented
        return first if condition.number else second

    return compute


# ---- Arrangement ----


@on_progressions("tt.expand_dims")
def expand_dims(op: Operation) -> Compute:
    """One more dimension, of length 1."""
    axis = op.integer("axis")

    def compute(programs: Any, a: Progression) -> Any:
        steps = (*a.steps[:axis], 0, *a.steps[axis:])
        return Progression(a.base, steps, (*a.shape[:axis], 1, *a.shape[axis:]))

    return compute


@on_progressions("tt.broadcast")
def broadcast(op: Operation) -> Compute:
    """Repeat along the dimensions of length 1."""
    shape = op.type().shape

    def compute(programs: Any, a: Progression) -> Any:
        steps = tuple(
            step if length > 1 else 0 for step, length in zip(a.steps, a.shape, strict=True)
        )
        return Progression(a.base, steps, shape)

    return compute


@on_progressions("tt.trans")
def transpose(op: Operation) -> Compute:
    """The dimensions in another order."""
    order = re.search(r"order = array<i32: ([^>]*)>", op.attributes)
    axes = [int(axis) for axis in order[1].split(",")] if order is not None else []

    def compute(programs: Any, a: Progression) -> Any:
        steps = tuple(a.steps[axis] for axis in axes)
        return Progression(a.base, steps, tuple(a.shape[axis] for axis in axes))

    return compute
