"""Atomic operations, and tensors in memory that a descriptor describes.

Atomic operations of each program, and of each element, come one after the other. Kernels for cards
of compute capability 9.0 or higher may load and store tiles by descriptors.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from emulated_cuda.triton import memory
from emulated_cuda.triton.memory import pointee_of
from emulated_cuda.triton.programs import Programs, choose
from emulated_cuda.triton.ttir import Compute, KernelError, NotComputed, Operation, Type, operation

_KINDS = {
    "add": 0,
    "fadd": 0,
    "inc_wrap": -1,
    "dec_wrap": -1,
    "max": 1,
    "umax": 1,
    "min": 2,
    "umin": 2,
    "and": 3,
    "or": 4,
    "xor": 5,
    "exch": 6,
}
"""Name -> number in csrc/accesses.cpp; -1 for those that are not computed."""
_LETTERS = {
    torch.float64: "d",
    torch.float32: "f",
    torch.float16: "e",
    torch.bfloat16: "b",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
}


def kind_of(name: str, element: Type) -> tuple[int, str]:
    """Return an atomic operation as :func:`.memory.atomic` takes it.

    Raises:
        NotComputed: if it is not known for elements of this type.
    """
    letter = _LETTERS.get(element.dtype)
    if _KINDS.get(name, -1) < 0 or letter is None:
        raise NotComputed(f"cannot compute the atomic operation {name} on {element.element}")
    return _KINDS[name], letter.upper() if name in ("umax", "umin") else letter


@operation("tt.atomic_rmw")
def change(op: Operation) -> Compute:
    """Change elements in memory; the results are what was there before."""
    kind = kind_of(op.keyword, pointee_of(op))

    def compute(
        programs: Programs, addresses: torch.Tensor, value: torch.Tensor, mask: Any = None
    ) -> torch.Tensor:
        return memory.atomic(programs, kind, addresses, value, mask)

    return compute


@operation("tt.atomic_cas")
def compare_and_swap(op: Operation) -> Compute:
    """Store a value where the expected one is; the results are what was there before."""
    pointee_of(op)

    def compute(
        programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return memory.compare_and_swap(programs, addresses, expected, value)

    return compute


@operation("tt.atomic_poll")
def wait_for_value(op: Operation) -> Compute:
    """Whether elements in memory have the expected values; without a time limit they must."""
    dtype = pointee_of(op).dtype

    def compute(
        programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, limit: Any = None
    ) -> torch.Tensor:
        is_there = memory.read_elements(programs, addresses, None, dtype) == expected
        mask = memory.active_mask(programs, None, addresses.dim())
        if limit is None and not (is_there if mask is None else is_there | ~mask).all():
            raise KernelError(
                KernelError.TIMEOUT,
                f"the launch timed out and was terminated: the kernel {programs.name} waits for a "
                "value that no earlier program of the grid has written. The program that writes "
                "it has not run yet, because the emulated device does not run programs "
                "concurrently; run such a kernel on a GPU",
            )
        return is_there

    return compute


class TensorMap(ctypes.Structure):
    """``TensorMap`` in csrc/modules.cpp: a descriptor that the host has made."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("lengths", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("nan", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Descriptor:
    """A tensor in memory, for each program or for all; numbers have the shape (programs or 1,)."""

    address: torch.Tensor
    lengths: list[torch.Tensor]
    strides: list[torch.Tensor]
    """In bytes; the last is the size of an element."""
    fills_with_nan: bool
    """Whether what is loaded outside of the tensor is NaN; otherwise 0."""

    def chosen(self, mask: torch.Tensor, other: Descriptor) -> Descriptor:
        """Return this descriptor where the mask is true and the other where it is false."""
        return replace(
            self,
            address=choose(mask, self.address, other.address),
            lengths=[choose(mask, *pair) for pair in zip(self.lengths, other.lengths, strict=True)],
            strides=[choose(mask, *pair) for pair in zip(self.strides, other.strides, strict=True)],
        )

    def addresses(self, positions: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the address of each element of a block, and whether it is inside the tensor.

        Args:
            positions: one tensor for each dimension, of shape (programs or 1, ...); together they
                broadcast to the block.
        """
        dims = positions[0].dim()
        view = [-1, *[1] * (dims - 1)]
        at: torch.Tensor = self.address.view(view)
        inside = torch.ones([1] * dims, dtype=torch.bool)
        for position, length, stride in zip(positions, self.lengths, self.strides, strict=True):
            inside = inside & (position >= 0) & (position < length.view(view))
            at = at + position * stride.view(view)
        return at, inside.expand(torch.broadcast_shapes(at.shape, inside.shape))


def from_host(map: TensorMap) -> Descriptor:
    """Return the descriptor that a host has passed to a kernel."""

    def numbers(values: list[int]) -> list[torch.Tensor]:
        return [torch.tensor([value], dtype=torch.int64) for value in reversed(values)]

    lengths, strides = list(map.lengths[: map.rank]), list(map.strides[: map.rank])
    return Descriptor(
        torch.tensor([map.address], dtype=torch.int64),
        numbers(lengths),
        numbers(strides),
        bool(map.nan),
    )


def block_of(kind: Type) -> tuple[Type, list[int]]:
    """Return the type of an element and the shape of a block from the type of a descriptor."""
    type_match = re.search(r"<(?:tensor<)?((?:\d+x)+)([\w]+)", kind.element)
    if type_match is None:
        raise NotComputed(f"cannot read a tensor descriptor of type {kind.element}")
    return Type(type_match[2]), [int(length) for length in type_match[1].split("x")[:-1]]


@operation("tt.make_tensor_descriptor")
def make(op: Operation) -> Compute:
    """A descriptor from an address, lengths and strides."""
    size = block_of(op.result_types[-1])[0].dtype.itemsize
    fills_with_nan = "nan" in op.attributes

    def compute(
        programs: Programs, address: torch.Tensor, *lengths_and_strides: torch.Tensor
    ) -> Descriptor:
        rank = len(lengths_and_strides) // 2
        lengths = [length.long() for length in lengths_and_strides[:rank]]
        strides = [stride.long() * size for stride in lengths_and_strides[rank:]]
        return Descriptor(address, lengths, strides, fills_with_nan)

    return compute


def _positions(descriptor: Descriptor, block: list[int], starts: Any) -> list[torch.Tensor]:
    """Return the positions of a block's elements along each dimension of the tensor."""
    rank = len(descriptor.lengths)
    block = [1] * (rank - len(block)) + block
    positions = []
    for axis, (length, start) in enumerate(zip(block, starts, strict=True)):
        along = torch.arange(length).view(1, *[length if i == axis else 1 for i in range(rank)])
        # The innermost stride of a tensor from the host is not in its descriptor.
        positions.append(start.long().view(-1, *[1] * rank) + along)
    return positions


def _with_element_size(descriptor: Descriptor, size: int) -> Descriptor:
    strides = [*descriptor.strides[:-1], torch.tensor([size])]
    return replace(descriptor, strides=strides)


def _fill(descriptor: Descriptor, tensor: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    if not descriptor.fills_with_nan or not tensor.dtype.is_floating_point:
        return tensor
    return torch.where(inside, tensor, torch.nan)


@operation("tt.descriptor_load")
def load(op: Operation) -> Compute:
    """A block of a tensor; what is outside of the tensor is 0 or NaN."""
    element, block = block_of(op.operand_types[0])
    shape, dtype = op.type().shape, element.dtype

    def compute(programs: Programs, descriptor: Descriptor, *starts: torch.Tensor) -> torch.Tensor:
        descriptor = _with_element_size(descriptor, dtype.itemsize)
        addresses, inside = descriptor.addresses(_positions(descriptor, block, starts))
        elements = memory.read_elements(programs, addresses, inside, dtype)
        return _fill(descriptor, elements, inside).reshape(-1, *shape)

    return compute


@operation("tt.descriptor_store", "tt.descriptor_reduce")
def store(op: Operation) -> Compute:
    """Write a block, or combine it with the tensor; nothing happens outside of the tensor."""
    element, block = block_of(op.operand_types[0])
    size = element.dtype.itemsize
    name = "" if op.name == "tt.descriptor_store" else op.keyword
    if name == "add" and element.dtype.is_floating_point:
        name = "fadd"
    kind = kind_of(name, element) if name else None

    def compute(
        programs: Programs, descriptor: Descriptor, *starts_and_value: torch.Tensor
    ) -> None:
        *starts, value = starts_and_value
        descriptor = _with_element_size(descriptor, size)
        addresses, inside = descriptor.addresses(_positions(descriptor, block, starts))
        value = value.reshape(-1, *addresses.shape[1:])
        if kind is None:
            memory.write_elements(programs, addresses, value, inside)
        else:
            memory.atomic(programs, kind, addresses, value, inside)

    return compute


def _rows(
    descriptor: Descriptor, rows: torch.Tensor, start: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the addresses of rows (programs, n), from a column on, and which are inside."""
    column = start.long().view(-1, 1, 1) + torch.arange(columns)
    return descriptor.addresses([rows.long().unsqueeze(2), column])


@operation("tt.descriptor_gather")
def gather(op: Operation) -> Compute:
    """Rows of a tensor by their numbers, from a column on."""
    dtype, columns = op.type().dtype, op.type().shape[1]

    def compute(
        programs: Programs, descriptor: Descriptor, rows: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        descriptor = _with_element_size(descriptor, dtype.itemsize)
        addresses, inside = _rows(descriptor, rows, start, columns)
        return _fill(descriptor, memory.read_elements(programs, addresses, inside, dtype), inside)

    return compute


@operation("tt.descriptor_scatter")
def scatter(op: Operation) -> Compute:
    """Write rows of a tensor by their numbers, from a column on."""

    def compute(
        programs: Programs,
        descriptor: Descriptor,
        rows: torch.Tensor,
        start: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        descriptor = _with_element_size(descriptor, value.element_size())
        addresses, inside = _rows(descriptor, rows, start, value.shape[2])
        memory.write_elements(programs, addresses, value, inside)

    return compute
