"""Addresses, loads and stores."""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values.compiled import accesses, blocks
from emulated_cuda.values.compiled.errors import NotComputed
from emulated_cuda.values.compiled.operations import Operation, Type
from emulated_cuda.values.compiled.programs import Programs
from emulated_cuda.values.compiled.progressions import Progression, as_tensor
from emulated_cuda.values.compiled.table import INTO_OPERANDS, Compute, on_progressions, operation


def pointee_of(one: Operation) -> Type:
    """Return the type of what an operation's first operand points to.

    Raises:
        NotComputed: if it is no address.
    """
    kind = one.operand_types[0]
    if not kind.is_pointer:
        raise NotComputed(f"{one.name} of {kind.element}")
    return kind.pointee


@operation("tt.addptr")
def add_to_address(one: Operation) -> Compute:
    """An address some elements further."""
    size = pointee_of(one).dtype.itemsize

    def compute(
        programs: Programs, address: torch.Tensor, count: torch.Tensor, **out: torch.Tensor
    ) -> torch.Tensor:
        # torch takes long over two types at once.
        return torch.add(address, count.long(), alpha=size, **out)

    return compute


INTO_OPERANDS["tt.addptr"] = add_to_address


@operation("tt.load", "tt.atomic_load")
def load(one: Operation) -> Compute:
    """The elements at addresses; where a mask is false another value."""
    dtype = pointee_of(one).dtype

    def compute(
        programs: Programs, addresses: torch.Tensor, mask: Any = None, other: Any = None
    ) -> Any:
        found = accesses.load(programs, addresses, mask, dtype)
        return found if other is None else torch.where(mask, found, other)

    return compute


@operation("tt.store", "tt.atomic_store")
def store(one: Operation) -> Compute:
    """Write elements to addresses where a mask is true."""
    pointee_of(one)

    def compute(
        programs: Programs, addresses: torch.Tensor, value: torch.Tensor, mask: Any = None
    ) -> None:
        accesses.store(programs, addresses, value, mask)

    return compute


# ---- With addresses or masks that are progressions ----


def _is_block(addresses: Any) -> bool:
    return type(addresses) is Progression and len(addresses.shape) <= blocks.MOST_DIMS


@on_progressions("tt.load")
def load_block(one: Operation) -> Compute:
    """The elements at addresses of which only the first and the steps are known."""
    dtype, plain = pointee_of(one).dtype, load(one)

    def compute(programs: Programs, addresses: Any, mask: Any = None, other: Any = None) -> Any:
        if _is_block(addresses):
            return blocks.load(programs, addresses, mask, dtype, as_tensor(other))
        if type(mask) is Progression and mask.number == 1:
            mask, other = None, None
        return plain(programs, *map(as_tensor, (addresses, mask, other)))

    return compute


@on_progressions("tt.store")
def store_block(one: Operation) -> Compute:
    """Write elements to addresses of which only the first and the steps are known."""
    plain = store(one)

    def compute(programs: Programs, addresses: Any, value: Any, mask: Any = None) -> None:
        if _is_block(addresses):
            blocks.store(programs, addresses, as_tensor(value), mask)
            return
        if type(mask) is Progression and mask.number == 1:
            mask = None
        plain(programs, *map(as_tensor, (addresses, value, mask)))

    return compute
