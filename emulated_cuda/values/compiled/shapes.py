"""Constants, positions in the grid, and operations that only arrange elements."""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.values.compiled.errors import NotComputed
from emulated_cuda.values.compiled.operations import Operation, Type
from emulated_cuda.values.compiled.programs import Programs, same_length
from emulated_cuda.values.compiled.progressions import Progression
from emulated_cuda.values.compiled.table import Compute, operation
from emulated_cuda.values.uncounted import uncounted

_SHORT = 16
_MANY = 64
"""If the last dimension is shorter and there are so many programs, such as in a sort, elements of
different programs follow each other in memory: torch's operators take long over short rows."""
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


@operation("tt.get_program_id")
def program_id(one: Operation) -> Compute:
    """The program's position in the grid, along one axis."""
    return lambda programs: programs.ids[one.keyword]


@operation("tt.get_num_programs")
def number_of_programs(one: Operation) -> Compute:
    """The length of the grid along one axis."""
    return lambda programs: torch.tensor([programs.grid[one.keyword]], dtype=torch.int32)


# ---- Constants ----


@operation("arith.constant")
def constant(one: Operation) -> Compute:
    """A number, or a tensor of numbers."""
    kind = one.result_types[0] if one.result_types else Type("i1")
    elements = _constant(one.text, kind)
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
def undefined(one: Operation) -> Compute:
    """A value that the kernel does not use: zeros."""
    kind = one.type()
    if kind.is_descriptor:
        raise NotComputed("an undefined descriptor")
    value = uncounted(torch.zeros((1, *kind.shape), dtype=kind.dtype))
    return lambda programs: value


@operation("tt.make_range")
def numbers(one: Operation) -> Compute:
    """The numbers from a start to an end."""
    start, end = one.integer("start"), one.integer("end")
    value = Progression(uncounted(torch.tensor([start], dtype=torch.int32)), (1,), (end - start,))
    return lambda programs: value


# ---- Arrangement ----


@operation("tt.splat")
def splat(one: Operation) -> Compute:
    """A number in every element."""
    shape = one.type().shape
    ones, steps = [1] * len(shape), (0,) * len(shape)

    def compute(programs: Programs, a: torch.Tensor) -> Any:
        if a.dtype.is_floating_point or not shape:
            return a.view(-1, *ones).expand(-1, *shape)
        if a.dtype is torch.bool and a.all():  # such as that a program's row is in the matrix
            a = a[:1]
        return Progression(a, steps, shape)

    return compute


@operation("tt.unsplat")
def only_element(one: Operation) -> Compute:
    """The only element of a tensor."""
    return lambda programs, a: a.reshape(len(a))


@operation("tt.broadcast")
def broadcast(one: Operation) -> Compute:
    """Repeat along the dimensions of length 1."""
    shape = one.type().shape
    return lambda programs, a: a.expand(-1, *shape)


@operation("tt.reshape")
def reshape(one: Operation) -> Compute:
    """The same elements in another shape."""
    shape = one.type().shape
    is_short = shape[-1:] < (_SHORT,)

    def compute(programs: Programs, a: torch.Tensor) -> torch.Tensor:
        if is_short and len(a) >= _MANY and a.is_contiguous():
            a = a.view(len(a), -1).t().contiguous().t()
        return a.reshape(len(a), *shape)

    return compute


@operation("tt.expand_dims")
def expand_dims(one: Operation) -> Compute:
    """One more dimension, of length 1."""
    axis = 1 + one.integer("axis")
    return lambda programs, a: a.unsqueeze(axis)


@operation("tt.trans")
def transpose(one: Operation) -> Compute:
    """The dimensions in another order."""
    order = re.search(r"order = array<i32: ([^>]*)>", one.attributes)
    if order is None:
        raise NotComputed("tt.trans without an order")
    dims = [0, *(1 + int(axis) for axis in order[1].split(","))]
    return lambda programs, a: a.permute(dims)


@operation("tt.join")
def join(one: Operation) -> Compute:
    """Two tensors in a new last dimension of length 2."""
    return lambda programs, a, b: torch.stack(same_length(a, b), -1)


@operation("tt.split")
def split(one: Operation) -> Compute:
    """The two parts of a last dimension of length 2."""
    return lambda programs, a: list(a.unbind(-1))


@operation("tt.cat")
def concatenate(one: Operation) -> Compute:
    """One tensor after the other; a card may give the elements in another order."""
    return lambda programs, a, b: torch.cat(same_length(a, b), 1)


@operation("tt.gather")
def gather(one: Operation) -> Compute:
    """Elements along an axis, by their positions; those out of range give any element."""
    axis = 1 + one.integer("axis")

    def compute(programs: Programs, a: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        a, positions = same_length(a, positions)
        return torch.gather(a, axis, positions.long().clamp(0, a.shape[axis] - 1))

    return compute


@operation("tt.histogram")
def histogram(one: Operation) -> Compute:
    """How often each of the first numbers occurs; others are not counted."""
    bins, dtype = one.type().shape[0], one.type().dtype

    def compute(programs: Programs, a: torch.Tensor, mask: Any = None) -> torch.Tensor:
        counted = (a >= 0) & (a < bins)
        if mask is not None:
            a, counted = same_length(a, counted & mask)
        rows = torch.arange(len(a)).unsqueeze(1) * bins
        found = torch.bincount((a + rows)[counted], minlength=len(a) * bins)
        return found.view(len(a), bins).to(dtype)

    return compute


@operation("llvm.intr.assume", "gpu.barrier", "ttg.barrier", "tt.debug_barrier")
@operation("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents", "tt.prefetch")
def without_effect(one: Operation) -> Compute:
    """What only orders or hastens the work of a card."""
    return lambda programs, *values: []
