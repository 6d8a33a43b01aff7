"""Runs the operations of a kernel for many programs of a launch at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from emulated_cuda.triton import ttir
from emulated_cuda.triton.progressions import Progression, as_tensor
from emulated_cuda.triton.ttir import (
    HALF,
    INTO_OPERANDS,
    Block,
    Function,
    NotComputed,
    Operation,
    uses,
)

_FEW = 2**12
"""For so few elements one operator of torch is faster than three."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def chosen(mask: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return elements of the first tensor where the mask is true, and of the second elsewhere.

    Args:
        mask: booleans; all three may have any shapes that broadcast.
        first: any dtype.
        second: of the same dtype.
    """
    dtype = first.dtype
    if max(first.numel(), second.numel(), mask.numel()) < _FEW or second.dtype is not dtype:
        return torch.where(mask, first, second)
    # torch.where branches for each element; an exclusive or with the mask does not.
    bits = _BITS[dtype.itemsize]
    base = second.view(bits)
    differing = (first.view(bits) ^ base) * mask
    return differing.bitwise_xor_(base).view(dtype)


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
        for op in operations
        if op.name in INTO_OPERANDS or op.name in _TAKES_NEW_MEMORY
        for name in op.results
    }
    # An operation may return its operand unchanged, or a view of it. Two values then share memory,
    # and a result written over one would change the other: so its operands are not overwritten.
    for op in operations:
        if op.name not in INTO_OPERANDS and op.name not in _KEEPS_NO_VIEW:
            own.difference_update(uses(op))  # a region, too, may return a value of its outer block
    return [
        tuple(at for at, name in enumerate(op.operands) if name in own.intersection(names))
        if _writes_into_operands(op)
        else ()
        for op, names in zip(operations, released, strict=True)
    ]


def _writes_into_operands(op: Operation) -> bool:
    """Whether an operation is computed without a rounding or a conversion after it."""
    return (
        op.name in INTO_OPERANDS
        and bool(op.type().shape)
        and op.type().dtype not in HALF
        and op.type().element != "i1"
    )


Environment = dict[str, Any]
"""The values of a function by name."""


@dataclass(frozen=True)
class Step:
    """An operation that is ready to run."""

    compute: ttir.Compute
    on_progressions: ttir.Compute | None
    """What is tried first if an operand is a progression."""
    into_operand: ttir.Compute | None
    """The same with a tensor for the result, see :func:`spare_operands`."""
    spare: tuple[int, ...]
    """Positions of operands whose memory the result may take."""
    dtype: torch.dtype | None
    """The dtype of a result that may take an operand's memory."""
    operands: tuple[str, ...]
    results: tuple[str, ...]
    released: tuple[str, ...]
    """Values that nothing after this step needs."""
    is_control: bool

    def run(self, programs: Programs, operands: list[Any], tensors: list[Any]) -> Any:
        """Return the results.

        Args:
            programs: those that run.
            operands: the operands.
            tensors: the same without progressions.
        """
        if self.into_operand is not None:
            for at in self.spare:
                room = operands[at]
                # An operand that is equal in all programs has one row of memory, which is too small
                # for a result with one row for each program.
                if self._takes_result(room) and all(
                    tensor.shape[0] <= room.shape[0] for tensor in tensors
                ):
                    return self.into_operand(programs, *tensors, out=room)
        return self.compute(programs, *tensors)

    def _takes_result(self, room: Any) -> bool:
        # A progression keeps its elements for later readers, so no result may overwrite them.
        return type(room) is torch.Tensor and room.dtype is self.dtype and room.is_contiguous()


@dataclass(frozen=True)
class Code:
    """A block that is ready to run."""

    label: str
    arguments: list[str]
    steps: list[Step]
    end: Operation
    """What ends the block."""


def prepare(blocks: list[Block], names: Iterable[str] = ()) -> list[Code]:
    """Return blocks that are ready to run.

    Args:
        blocks: of a function or a region.
        names: values that come from outside for each run, such as those of a loop's iteration.

    Raises:
        NotComputed: names an operation that has no meaning here.
    """
    return [_prepare_block(block, blocks, names) for block in blocks]


def _prepare_block(block: Block, blocks: list[Block], names: Iterable[str]) -> Code:
    if not block.operations or block.operations[-1].name not in ttir.TERMINATORS:
        ending = block.operations[-1].name if block.operations else "nothing"
        raise NotComputed(
            f"cannot compute a kernel that has a basic block which ends with {ending}"
        )
    *operations, end = block.operations
    elsewhere = {
        name
        for other in blocks
        if other is not block
        for op in other.operations
        for name in uses(op)
    }
    own = {*names, *block.arguments, *(name for op in operations for name in op.results)}
    # A value that another block or the end needs lives on after the last step that uses it here.
    own -= elsewhere.union(uses(end))
    last: dict[str, int] = {}
    for index, op in enumerate(operations):
        last.update(dict.fromkeys([*op.results, *uses(op)], index))
    released: list[list[str]] = [[] for _ in operations]
    for name in own.intersection(last):
        released[last[name]].append(name)
    steps = [
        Step(
            ttir.prepare(op),
            ttir.ON_PROGRESSIONS[op.name](op) if op.name in ttir.ON_PROGRESSIONS else None,
            ttir.INTO_OPERANDS[op.name](op) if spare else None,
            spare,
            op.type().dtype if spare else None,
            tuple(op.operands),
            tuple(op.results),
            tuple(released[index]),
            op.name in ttir.CONTROL,
        )
        for index, (op, spare) in enumerate(
            zip(operations, spare_operands(operations, released), strict=True)
        )
    ]
    return Code(block.label, block.arguments, steps, end)


class Programs:
    """Some programs of a launch.

    Args:
        functions: those of the kernel that it calls, by name, ready to run.
        grid: the numbers of programs in x, y and z.
        ids: (count,) the numbers of these programs in the grid, x first.
        name: of the kernel, for errors.
    """

    def __init__(
        self,
        functions: dict[str, tuple[Function, list[Code]]],
        grid: tuple[int, int, int],
        ids: torch.Tensor,
        name: str,
    ) -> None:
        self.functions = functions
        self.name = name
        self.count = len(ids)
        self.active: torch.Tensor | None = None
        """(count,) which programs take the present branch; None for all."""
        self.grid = dict(zip("xyz", grid, strict=True))
        self.ids = dict(zip("xyz", _positions(ids, grid), strict=True))

    def inner(self, count: int) -> Programs:
        """Return one program for each of `count` elements, to run code on single numbers."""
        return Programs(self.functions, (count, 1, 1), torch.arange(count), self.name)

    def run(self, code: Code, values: Environment) -> Operation:
        """Run the steps of a block; return what ends it."""
        for step in code.steps:
            names = step.results
            if step.is_control:
                # Branches and loops run blocks of their own, which need all values, not operands.
                values.update(zip(names, step.compute(self, values), strict=False))
            else:
                results = self._computed(step, [values[name] for name in step.operands])
                if len(names) == 1:
                    values[names[0]] = results
                elif names:
                    values.update(zip(names, results, strict=True))
            for name in step.released:  # so that its memory serves the next values
                values.pop(name, None)
        return code.end

    def _computed(self, step: Step, operands: list[Any]) -> Any:
        if Progression not in map(type, operands):
            return step.run(self, operands, operands)
        if step.on_progressions is not None:
            # NotImplemented if the result is not a progression: then its elements are computed.
            results = step.on_progressions(self, *operands)
            if results is not NotImplemented:
                return results
        return step.run(self, operands, [as_tensor(value) for value in operands])

    def values_passed(self, end: Operation, values: Environment) -> list[Any]:
        """Return the values that the end of a block passes on."""
        return [values[name] for name in end.operands]

    # ---- Branches ----

    def narrowed(self, condition: torch.Tensor) -> torch.Tensor:
        """Return which active programs meet a condition (count,)."""
        return condition if self.active is None else self.active & condition

    def merged(self, new: list[Any], old: list[Any]) -> list[Any]:
        """Return the new values of active programs and the old ones of others."""
        if self.active is None:
            return new
        return [choose(self.active, *pair) for pair in zip(new, old, strict=True)]

    def call(self, name: str, arguments: Iterable[Any]) -> list[Any]:
        """Run a function of the kernel for the active programs; return its results.

        Its blocks come in an order in which none jumps back, because Triton writes loops as loops.
        """
        function, codes = self.functions[name]
        values: Environment = dict(zip(function.arguments, arguments, strict=True))
        outer = self.active
        # Each program is in one block at a time, so one pass over the blocks serves all: those that
        # take another way wait here until the pass comes to their block.
        waiting: dict[str, torch.Tensor | None] = {codes[0].label: outer}
        returned: list[Any] | None = None
        for code in codes:
            if code.label not in waiting:  # no program has jumped there
                continue
            self.active = waiting[code.label]
            end = self.run(code, values)
            if end.name == "tt.return":
                results = self.values_passed(end, values)
                returned = results if returned is None else self.merged(results, returned)
            else:
                self._branch(end, codes, values, waiting)
        self.active = outer
        return returned or []

    def _branch(
        self,
        end: Operation,
        codes: list[Code],
        values: Environment,
        waiting: dict[str, torch.Tensor | None],
    ) -> None:
        """Note which programs go on in which block, and with which values."""
        targets = re.findall(r"\^(\w+)(?:\(([^)]*)\))?", end.text)
        masks = [self.active]
        if end.name == "cf.cond_br":
            condition = values[end.operands[0]]
            if len(condition) == 1:  # the same for all programs: no mask is needed
                targets = targets[:1] if condition.item() else targets[1:]
            else:
                masks = [self.narrowed(condition), self.narrowed(~condition)]
        for (label, operands), mask in zip(targets, masks, strict=True):
            if mask is not None and not mask.any():
                continue
            code = next(code for code in codes if code.label == label)
            names = re.findall(r"%[\w$.#-]+", operands.partition(" : ")[0])
            passed = [values[name] for name in names]
            if label not in waiting:
                values.update(zip(code.arguments, passed, strict=True))
                waiting[label] = mask
                continue
            # Programs meet here that came another way: each keeps the values of its own way.
            for name, value in zip(code.arguments, passed, strict=True):
                values[name] = value if mask is None else choose(mask, value, values[name])
            before = waiting[label]  # None stands for all programs
            waiting[label] = None if mask is None or before is None else before | mask


def _positions(ids: torch.Tensor, grid: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Return the positions of programs along each axis of a grid, as int32."""
    if grid[1] == grid[2] == 1:  # most grids: two divisions less
        x = ids.int()
        zeros = torch.zeros_like(x)
        return x, zeros, zeros
    above = torch.div(ids, grid[0], rounding_mode="floor")
    z = torch.div(above, grid[1], rounding_mode="floor")
    return (ids % grid[0]).int(), (above % grid[1]).int(), z.int()


def choose(mask: torch.Tensor, new: Any, old: Any) -> Any:
    """Return one value where the mask (count,) is true, and the other where it is false."""
    if new is old:
        return new
    if not isinstance(new, torch.Tensor):
        return new.chosen(mask, old)  # a progression or a descriptor: by its fields
    return chosen(mask.view(-1, *[1] * (new.dim() - 1)), new, as_tensor(old))


def same_length(*values: torch.Tensor) -> list[torch.Tensor]:
    """Return values for the same number of programs."""
    count = max(len(value) for value in values)
    return [value.expand(count, *value.shape[1:]) for value in values]
