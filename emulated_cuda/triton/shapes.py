"""Constants, positions in the grid, conversions, and operations that only arrange elements."""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.triton.numbers import unsigned
from emulated_cuda.triton.programs import Programs, choose, chosen, same_length
from emulated_cuda.triton.progressions import Progression
from emulated_cuda.triton.ttir import Compute, NotComputed, Operation, Type, operation, rounded
from emulated_cuda.values import uncounted

_ROUNDINGS = ("", "rtne")


@operation("arith.extf", "arith.truncf", "arith.convertf", "tt.fp_to_fp")
def between_floats(op: Operation) -> Compute:
    """A floating-point number in another type, rounded to the nearest or towards zero."""
    dtype = op.type().dtype
    mode = re.search(r"rounding = (\w+)", op.text + op.attributes)
    if mode is not None and mode[1] not in _ROUNDINGS:
        if mode[1] != "rtz":
            raise NotComputed(f"cannot round by {mode[1]}")
        return lambda programs, value: _towards_zero(value, dtype)
    return lambda programs, value: rounded(value, dtype)


def _towards_zero(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    nearest = rounded(value, dtype)
    # If the nearest number is farther from zero, the next one towards zero has the bits less 1.
    is_larger = nearest.float().abs() > value.float().abs()
    bits = {1: torch.uint8, 2: torch.int16}[nearest.element_size()]
    below = (nearest.view(bits) - 1).view(dtype)
    truncated_bits = torch.where(is_larger, below.view(bits), nearest.view(bits))
    return truncated_bits.view(dtype)


@operation("arith.sitofp", "arith.uitofp")
def integer_to_float(op: Operation) -> Compute:
    """An integer as a floating-point number."""
    dtype, has_sign = op.type().dtype, op.name == "arith.sitofp"

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is torch.bool:  # with a sign, a set bit stands for -1
            return -value.to(dtype) if has_sign else value.to(dtype)
        if has_sign:
            return rounded(value.to(torch.float32) if dtype.itemsize == 1 else value, dtype)
        if value.dtype is torch.int64:  # as torch has no uint64, a large number is negative here
            return (value.double() + (value < 0) * 2.0**64).to(dtype)
        return rounded(unsigned(value).double(), dtype)

    return compute


@operation("arith.fptosi", "arith.fptoui")
def float_to_integer(op: Operation) -> Compute:
    """A floating-point number without its fraction; the nearest integer if it is too large."""
    dtype, has_sign = op.type().dtype, op.name == "arith.fptosi"
    if dtype is torch.bool:
        return lambda programs, value: value.float() != 0
    size = torch.iinfo(dtype).bits
    low, high = (-(2.0 ** (size - 1)), 2.0 ** (size - 1)) if has_sign else (0.0, 2.0**size)

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        number = torch.nan_to_num(value.double(), nan=0.0, posinf=high, neginf=low)
        number = number.trunc().clamp(low, high)
        if size < 64:
            number = number.clamp(max=high - 1)
            return number.long().to(dtype)
        is_large = number >= 2.0**63
        small = torch.where(is_large, 0.0, number).long()
        if has_sign:
            return torch.where(is_large, 2**63 - 1, small)
        return torch.where(is_large, (number - 2.0**64).clamp(max=-1.0).long(), small)

    return compute


@operation("arith.extsi", "arith.trunci", "arith.index_cast")
def between_integers(op: Operation) -> Compute:
    """An integer in another size; a longer one has the sign of the shorter."""
    dtype = op.type().dtype

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if dtype is torch.bool:
            return (value & 1).bool()
        return -value.to(dtype) if value.dtype is torch.bool else value.to(dtype)

    return compute


@operation("arith.extui", "arith.index_castui")
def longer_without_sign(op: Operation) -> Compute:
    """An integer without sign in a larger size."""
    dtype = op.type().dtype
    return lambda programs, value: unsigned(value).to(dtype)


@operation("arith.bitcast", "tt.bitcast", "tt.int_to_ptr", "tt.ptr_to_int")
def same_bits(op: Operation) -> Compute:
    """The same bits in another type."""
    dtype = op.type().dtype

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is dtype:
            return value
        if torch.bool in (value.dtype, dtype):
            return value.to(dtype)
        return value.view(dtype)  # of the same size

    return compute


@operation("arith.select")
def select(op: Operation) -> Compute:
    """Choose one of two values, by a condition for each element or for all."""

    def compute(programs: Any, condition: torch.Tensor, first: Any, second: Any) -> Any:
        if not isinstance(first, torch.Tensor) or condition.dim() < first.dim():
            return choose(condition, first, second)
        if second.dim() < first.dim():  # a constant in code that runs on elements at once
            second = second.view(-1, *[1] * (first.dim() - 1))
        return chosen(condition, first, second)

    return compute


_SHORT = 16
_MANY = 64
"""If the last dimension is shorter and there are so many programs, such as in a sort, elements of
different programs follow each other in memory: torch's operators take long over short rows."""
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


@operation("tt.get_program_id")
def program_id(op: Operation) -> Compute:
    """The program's position in the grid, along one axis."""
    return lambda programs: programs.ids[op.keyword]


@operation("tt.get_num_programs")
def number_of_programs(op: Operation) -> Compute:
    """The length of the grid along one axis."""
    return lambda programs: torch.tensor([programs.grid[op.keyword]], dtype=torch.int32)


# ---- Constants ----


@operation("arith.constant")
def constant(op: Operation) -> Compute:
    """A number, or a tensor of numbers."""
    kind = op.result_types[0] if op.result_types else Type("i1")
    elements = _constant(op.text, kind)
    value: Any
    if kind.shape and not kind.dtype.is_floating_point and not any(elements.stride()):
        value = Progression(uncounted(elements.flatten()[:1]), (0,) * len(kind.shape), kind.shape)
    else:
        value = uncounted(elements)
    return lambda programs: value


def _constant(text: str, kind: Type) -> torch.Tensor:
    if not text.startswith("dense<"):
        return _number(text, kind.dtype).view(1)
    inner = text[len("dense<") : text.rindex(">")]
    if inner.startswith('"0x'):
        every = torch.frombuffer(bytearray.fromhex(inner[3:-1]), dtype=kind.dtype)
        return every.view(1, *kind.shape)
    if not inner.startswith("["):
        return _number(inner, kind.dtype).expand(1, *kind.shape)
    numbers = [_number(part, kind.dtype) for part in re.findall(r"[^\[\],\s]+", inner)]
    return torch.stack(numbers).view(1, *kind.shape)


def _number(text: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor without dimensions; those in hexadecimal give its bits."""
    text = text.strip()
    if text in ("true", "false"):
        return torch.tensor(text == "true")
    if not dtype.is_floating_point:
        number, size = int(text, 0), 1 if dtype is torch.bool else torch.iinfo(dtype).bits
        if number >= 2 ** (size - 1) and size > 1:
            number -= 2**size
        return torch.tensor(number, dtype=dtype)
    if text.startswith("0x"):
        bits = _BITS.get(dtype, {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize))
        assert bits is not None
        size = 8 * dtype.itemsize
        number = int(text, 16)
        if number >= 2 ** (size - 1) and bits is not torch.uint8:
            number -= 2**size
        return torch.tensor(number, dtype=bits).view(dtype)
    return torch.tensor(float(text), dtype=torch.float64).to(dtype)


@operation("ub.poison")
def undefined(op: Operation) -> Compute:
    """A value that the kernel does not use: zeros."""
    kind = op.type()
    if kind.is_descriptor:
        raise NotComputed("cannot compute an undefined tensor descriptor")
    value = uncounted(torch.zeros((1, *kind.shape), dtype=kind.dtype))
    return lambda programs: value


@operation("tt.make_range")
def numbers(op: Operation) -> Compute:
    """The numbers from a start to an end."""
    start, end = op.integer("start"), op.integer("end")
    value = Progression(uncounted(torch.tensor([start], dtype=torch.int32)), (1,), (end - start,))
    return lambda programs: value


# ---- Arrangement ----


@operation("tt.splat")
def splat(op: Operation) -> Compute:
    """A number in every element."""
    shape = op.type().shape
    ones, steps = [1] * len(shape), (0,) * len(shape)

    def compute(programs: Programs, a: torch.Tensor) -> Any:
        if a.dtype.is_floating_point or not shape:
            return a.view(-1, *ones).expand(-1, *shape)
        # A mask is often true in every program, such as "the row is inside the matrix". Kept once,
        # it is recognized as true for all elements, and loads and stores need no mask.
        if a.dtype is torch.bool and a.all():
            a = a[:1]
        return Progression(a, steps, shape)

    return compute


@operation("tt.unsplat")
def only_element(op: Operation) -> Compute:
    """The only element of a tensor."""
    return lambda programs, a: a.reshape(len(a))


@operation("tt.broadcast")
def broadcast(op: Operation) -> Compute:
    """Repeat along the dimensions of length 1."""
    shape = op.type().shape
    return lambda programs, a: a.expand(-1, *shape)


@operation("tt.reshape")
def reshape(op: Operation) -> Compute:
    """The same elements in another shape."""
    shape = op.type().shape
    is_short = shape[-1:] < (_SHORT,)

    def compute(programs: Programs, a: torch.Tensor) -> torch.Tensor:
        if is_short and len(a) >= _MANY and a.is_contiguous():
            a = a.view(len(a), -1).t().contiguous().t()
        return a.reshape(len(a), *shape)

    return compute


@operation("tt.expand_dims")
def expand_dims(op: Operation) -> Compute:
    """One more dimension, of length 1."""
    axis = 1 + op.integer("axis")
    return lambda programs, a: a.unsqueeze(axis)


@operation("tt.trans")
def transpose(op: Operation) -> Compute:
    """The dimensions in another order."""
    order = re.search(r"order = array<i32: ([^>]*)>", op.attributes)
    if order is None:
        raise NotComputed("cannot compute the operation tt.trans without an order of axes")
    dims = [0, *(1 + int(axis) for axis in order[1].split(","))]
    return lambda programs, a: a.permute(dims)


@operation("tt.join")
def join(op: Operation) -> Compute:
    """Two tensors in a new last dimension of length 2."""
    return lambda programs, a, b: torch.stack(same_length(a, b), -1)


@operation("tt.split")
def split(op: Operation) -> Compute:
    """The two parts of a last dimension of length 2."""
    return lambda programs, a: list(a.unbind(-1))


@operation("tt.cat")
def concatenate(op: Operation) -> Compute:
    """One tensor after the other; a card may give the elements in another order."""
    return lambda programs, a, b: torch.cat(same_length(a, b), 1)


@operation("tt.gather")
def gather(op: Operation) -> Compute:
    """Elements along an axis, by their positions; those out of range give any element."""
    axis = 1 + op.integer("axis")

    def compute(programs: Programs, a: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        a, positions = same_length(a, positions)
        return torch.gather(a, axis, positions.long().clamp(0, a.shape[axis] - 1))

    return compute


@operation("tt.histogram")
def histogram(op: Operation) -> Compute:
    """How often each of the first numbers occurs; others are not counted."""
    bins, dtype = op.type().shape[0], op.type().dtype

    def compute(programs: Programs, a: torch.Tensor, mask: Any = None) -> torch.Tensor:
        counted = (a >= 0) & (a < bins)
        if mask is not None:
            a, counted = same_length(a, counted & mask)
        rows = torch.arange(len(a)).unsqueeze(1) * bins
        counts = torch.bincount((a + rows)[counted], minlength=len(a) * bins)
        return counts.view(len(a), bins).to(dtype)

    return compute


@operation("llvm.intr.assume", "gpu.barrier", "ttg.barrier", "tt.debug_barrier")
@operation("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents", "tt.prefetch")
def without_effect(op: Operation) -> Compute:
    """What only orders or hastens the work of a card."""
    return lambda programs, *values: []
