"""Addresses, loads and stores: of elements by an address each, and of whole blocks.

A block has addresses that are a progression, of which only the first and the steps are kept. Both
ways touch the same elements in the same order (csrc/accesses.cpp and csrc/block_accesses.cpp). The
rows of atomic operations are in :mod:`.descriptors`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from emulated_cuda.triton.programs import Programs
from emulated_cuda.triton.progressions import Progression, as_tensor
from emulated_cuda.triton.ttir import (
    INTO_OPERANDS,
    Compute,
    KernelError,
    NotComputed,
    Operation,
    Type,
    on_progressions,
    operation,
)

_functions: Any = None
_VERBS = {"load": "reads", "store": "writes"}
"""Function of csrc/accesses.cpp or csrc/block_accesses.cpp -> the verb of a message about it."""


def functions() -> Any:
    """Return the loaded library."""
    return _functions


def use_library(path: str) -> None:
    """Use the functions of the loaded library from now on."""
    global _functions
    _functions = ctypes.CDLL(path)
    for name in ("load", "store", "load_block", "store_block", "atomic", "compare_and_swap"):
        getattr(_functions, f"emulated_{name}").restype = ctypes.c_int64


def active_mask(programs: Programs, mask: torch.Tensor | None, dims: int) -> torch.Tensor | None:
    """Return which elements are touched: those of active programs that the kernel's mask allows.

    Args:
        programs: those that run.
        mask: (programs or 1, ...) of the kernel; None for all.
        dims: how many dimensions an address tensor has, with that of the programs.
    """
    if programs.active is None:
        return mask
    active = programs.active.view(-1, *[1] * (dims - 1))
    return active if mask is None else mask & active


def read_elements(
    programs: Programs, addresses: torch.Tensor, mask: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Return the elements at addresses (programs or 1, ...); zeros where the mask is false.

    Raises:
        KernelError: if an address is not in memory that a card could read.
    """
    mask = active_mask(programs, mask, addresses.dim())
    addresses, mask = _spread(addresses, mask)
    # The library leaves out what the mask does; without one it writes every element.
    new = torch.empty if mask is None else torch.zeros
    values = new(addresses.shape, dtype=dtype)
    _call(programs, "load", values, addresses, mask, dtype.itemsize)
    return values


def write_elements(
    programs: Programs, addresses: torch.Tensor, values: torch.Tensor, mask: Any
) -> None:
    """Write elements to addresses where the mask is true; the last program wins.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, mask, addresses.dim())
    # If all programs have one address but values of their own, each of them stores; the last wins.
    addresses, values = torch.broadcast_tensors(addresses, values)
    addresses, mask = _spread(addresses, mask)
    values = values.expand(addresses.shape).contiguous()
    _call(programs, "store", values, addresses, mask, values.element_size())


def atomic(
    programs: Programs,
    kind: tuple[int, str],
    addresses: torch.Tensor,
    operand: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    """Combine elements with those at addresses, one after the other; return what was there before.

    Args:
        programs: those that run; each does it, also if all have the same values.
        kind: number of the operation and letter of the type, see csrc/accesses.cpp.
        addresses: (programs or 1, ...).
        operand: (programs or 1, ...).
        mask: (programs or 1, ...) which elements are touched; None for all.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, mask, addresses.dim())
    # Addresses that are kept once for all programs are written out: each program changes them.
    shape = (programs.count, *addresses.shape[1:])
    addresses, mask = _spread(addresses.expand(shape), mask)
    operand = operand.expand(addresses.shape).contiguous()
    before = torch.zeros_like(operand)
    number, letter = kind
    index = _functions.emulated_atomic(
        number,
        ctypes.c_char(letter.encode()),
        *(_pointer(addresses), _pointer(mask), _pointer(operand), _pointer(before)),
        ctypes.c_int64(addresses.numel()),
    )
    check(programs, index, "changes", addresses, operand.element_size())
    return before


def compare_and_swap(
    programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, operand: torch.Tensor
) -> torch.Tensor:
    """Store elements where those at addresses are the expected ones; return what was there before.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, None, addresses.dim())
    shape = (programs.count, *addresses.shape[1:])
    addresses, mask = _spread(addresses.expand(shape), mask)
    expected = expected.expand(addresses.shape).contiguous()
    operand = operand.expand(addresses.shape).contiguous()
    before = torch.zeros_like(operand)
    tensors = (addresses, mask, expected, operand, before)
    count, size = ctypes.c_int64(addresses.numel()), operand.element_size()
    index = _functions.emulated_compare_and_swap(*map(_pointer, tensors), count, size)
    check(programs, index, "changes", addresses, size)
    return before


def _spread(
    addresses: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return addresses and mask with one element for each access, in order."""
    # Contiguous, because the library goes through both as through plain arrays.
    if mask is None:
        return addresses.contiguous(), None
    addresses, mask = torch.broadcast_tensors(addresses, mask)
    return addresses.contiguous(), mask.contiguous()


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _call(
    programs: Programs,
    name: str,
    values: torch.Tensor,
    addresses: torch.Tensor,
    mask: torch.Tensor | None,
    size: int,
) -> None:
    function = getattr(_functions, f"emulated_{name}")
    count = ctypes.c_int64(addresses.numel())
    index = function(_pointer(values), _pointer(addresses), _pointer(mask), count, size)
    check(programs, index, _VERBS[name], addresses, size)


def check(programs: Programs, index: int, verb: str, addresses: torch.Tensor, size: int) -> None:
    """Raise an error if an access was refused.

    Args:
        programs: those that run.
        index: of the element in the addresses; negative if none was refused.
        verb: what the kernel does.
        addresses: (programs or 1, ...) of all elements, in order.
        size: of an element in bytes.

    Raises:
        KernelError: as a card would.
    """
    if index < 0:
        return
    address = int(addresses.view(-1)[index])
    of_one = addresses.numel() // len(addresses)
    at = ""
    # If all programs access the same addresses, these are kept once, and no program can be named.
    if len(addresses) == programs.count:
        program = index // of_one
        position = ", ".join(str(int(programs.ids[axis][program])) for axis in "xyz")
        at = f" in program ({position})"
    # In torch an address is a signed number, which may be negative.
    where = f"the kernel {programs.name} {verb} {size} bytes at 0x{address & (2**64 - 1):x}{at}"
    if address % size:
        raise KernelError(KernelError.MISALIGNED_ADDRESS, f"misaligned address: {where}")
    raise KernelError(
        KernelError.ILLEGAL_ADDRESS,
        f"an illegal memory access was encountered: {where}, an address outside the device's "
        "memory",
    )


MOST_DIMS = 16  # kMostDims in csrc/block_accesses.cpp


class _Block(ctypes.Structure):
    """``Block`` in csrc/block_accesses.cpp."""

    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("programs", ctypes.c_int64),
        ("base_step", ctypes.c_int64),
        ("active", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_step", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("dims", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


def read_block(
    programs: Programs, addresses: Progression, mask: Any, dtype: torch.dtype, other: Any
) -> torch.Tensor:
    """Return the elements of a block (programs or 1, ...).

    Args:
        programs: those that run.
        addresses: of the elements.
        mask: which elements are loaded: a tensor, or a progression that is one number for each
            program, or None for all.
        dtype: of the elements.
        other: what elements are that are not loaded; None for zeros.

    Raises:
        KernelError: if an address is not in memory that a card could read.
    """
    active, mask = _active(programs, mask)
    counts = [v.shape[0] for v in (addresses.base, active, mask, other) if v is not None]
    shape = (max(counts), *addresses.shape)
    if active is None and mask is None:
        values = torch.empty(shape, dtype=dtype)
    elif other is None:
        values = torch.zeros(shape, dtype=dtype)
    else:
        values = torch.empty(shape, dtype=dtype).copy_(other)
    _call_for_block(programs, "load", values, addresses, active, mask)
    return values


def write_block(
    programs: Programs, addresses: Progression, values: torch.Tensor, mask: Any
) -> None:
    """Write the elements of a block; the last program wins.

    Args:
        programs: those that run.
        addresses: of the elements.
        values: (programs or 1, ...).
        mask: as for :func:`load`.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    active, mask = _active(programs, mask)
    counts = [v.shape[0] for v in (addresses.base, active, mask, values) if v is not None]
    values = values.expand(max(counts), *addresses.shape).contiguous()
    _call_for_block(programs, "store", values, addresses, active, mask)


def _active(programs: Programs, mask: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which programs touch the block, and which elements of each; None for all."""
    active = programs.active
    if not isinstance(mask, Progression):
        return active, mask
    if mask.number == 1:  # true for all elements
        return active, None
    return (mask.base if active is None else mask.base & active), None


def _call_for_block(
    programs: Programs,
    name: str,
    values: torch.Tensor,
    addresses: Progression,
    active: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    base, count = addresses.base.contiguous(), values.shape[0]
    size = values.element_size()
    lengths, steps = _arrays(addresses.shape, addresses.steps)
    # If all programs have the same addresses, these are kept once, and the step from one program to
    # the next is 0.
    block = _Block(base.data_ptr(), count, int(base.shape[0] > 1))
    block.lengths, block.steps = ctypes.addressof(lengths), ctypes.addressof(steps)
    block.dims, block.size = len(lengths), size
    if active is not None:
        active = active.expand(count).contiguous()
        block.active = active.data_ptr()
    if mask is not None:
        mask = mask.contiguous()
        block.mask = mask.data_ptr()
        block.mask_step = mask[0].numel() if len(mask) > 1 else 0
    index = functions()[f"emulated_{name}_block"](
        ctypes.c_void_p(values.data_ptr()), ctypes.byref(block)
    )
    if index >= 0:  # An access was refused. Only its message needs the addresses as elements.
        every = addresses.tensor()
        # The index counts the accesses of all programs, if the library went through each of them.
        if len(base) < count and (active is not None or mask is not None or name == "store"):
            every = every.expand(count, *addresses.shape)
        check(programs, index, _VERBS[name], every.contiguous(), size)


@lru_cache(256)
def _arrays(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Any, Any]:
    array = ctypes.c_int64 * len(shape)
    return array(*shape), array(*steps)


def pointee_of(op: Operation) -> Type:
    """Return the type of what an operation's first operand points to.

    Raises:
        NotComputed: if the operand is not an address.
    """
    kind = op.operand_types[0]
    if not kind.is_pointer:
        raise NotComputed(
            f"cannot compute the operation {op.name} on elements of type {kind.element}"
        )
    return kind.pointee


@operation("tt.addptr")
def add_to_address(op: Operation) -> Compute:
    """An address some elements further."""
    size = pointee_of(op).dtype.itemsize

    def compute(
        programs: Programs, address: torch.Tensor, count: torch.Tensor, **out: torch.Tensor
    ) -> torch.Tensor:
        # torch.add is slow for mixed integer types, so convert first.
        return torch.add(address, count.long(), alpha=size, **out)

    return compute


INTO_OPERANDS["tt.addptr"] = add_to_address


@operation("tt.load", "tt.atomic_load")
def load(op: Operation) -> Compute:
    """The elements at addresses; where a mask is false another value."""
    dtype = pointee_of(op).dtype

    def compute(
        programs: Programs, addresses: torch.Tensor, mask: Any = None, other: Any = None
    ) -> Any:
        values = read_elements(programs, addresses, mask, dtype)
        return values if other is None else torch.where(mask, values, other)

    return compute


@operation("tt.store", "tt.atomic_store")
def store(op: Operation) -> Compute:
    """Write elements to addresses where a mask is true."""
    pointee_of(op)

    def compute(
        programs: Programs, addresses: torch.Tensor, value: torch.Tensor, mask: Any = None
    ) -> None:
        write_elements(programs, addresses, value, mask)

    return compute


# ---- With addresses or masks that are progressions ----


def _is_block(addresses: Any) -> bool:
    return type(addresses) is Progression and len(addresses.shape) <= MOST_DIMS


@on_progressions("tt.load")
def load_block(op: Operation) -> Compute:
    """The elements at addresses of which only the first and the steps are known."""
    dtype, plain = pointee_of(op).dtype, load(op)

    def compute(programs: Programs, addresses: Any, mask: Any = None, other: Any = None) -> Any:
        if _is_block(addresses):
            return read_block(programs, addresses, mask, dtype, as_tensor(other))
        if type(mask) is Progression and mask.number == 1:
            mask, other = None, None
        return plain(programs, *map(as_tensor, (addresses, mask, other)))

    return compute


@on_progressions("tt.store")
def store_block(op: Operation) -> Compute:
    """Write elements to addresses of which only the first and the steps are known."""
    plain = store(op)

    def compute(programs: Programs, addresses: Any, value: Any, mask: Any = None) -> None:
        if _is_block(addresses):
            write_block(programs, addresses, as_tensor(value), mask)
            return
        if type(mask) is Progression and mask.number == 1:
            mask = None
        plain(programs, *map(as_tensor, (addresses, value, mask)))

    return compute
