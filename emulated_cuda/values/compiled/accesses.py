"""The functions of csrc/accesses.cpp, by which kernels load and store many elements at once."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from emulated_cuda.values.compiled.errors import KernelError
from emulated_cuda.values.compiled.programs import Programs

_functions: Any = None


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


def load(
    programs: Programs, addresses: torch.Tensor, mask: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Return the elements at addresses (programs or 1, ...); zeros where the mask is false.

    Raises:
        KernelError: if an address is not in memory that a card could read.
    """
    mask = active_mask(programs, mask, addresses.dim())
    addresses, mask = _spread(addresses, mask)
    new = torch.empty if mask is None else torch.zeros
    found = new(addresses.shape, dtype=dtype)
    _call(programs, "load", "reads", found, addresses, mask, dtype.itemsize)
    return found


def store(programs: Programs, addresses: torch.Tensor, values: torch.Tensor, mask: Any) -> None:
    """Write elements to addresses where the mask is true; the last program wins.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, mask, addresses.dim())
    addresses, values = torch.broadcast_tensors(addresses, values)
    addresses, mask = _spread(addresses, mask)
    values = values.expand(addresses.shape).contiguous()
    _call(programs, "store", "writes", values, addresses, mask, values.element_size())


def atomic(
    programs: Programs,
    kind: tuple[int, str],
    addresses: torch.Tensor,
    given: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    """Combine elements with those at addresses, one after the other; return what was there before.

    Args:
        programs: those that run; each does it, also if all have the same values.
        kind: number of the operation and letter of the type, see csrc/accesses.cpp.
        addresses: (programs or 1, ...).
        given: (programs or 1, ...).
        mask: (programs or 1, ...) which elements are touched; None for all.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, mask, addresses.dim())
    shape = (programs.count, *addresses.shape[1:])
    addresses, mask = _spread(addresses.expand(shape), mask)
    given = given.expand(addresses.shape).contiguous()
    before = torch.zeros_like(given)
    number, letter = kind
    index = _functions.emulated_atomic(
        number,
        ctypes.c_char(letter.encode()),
        *(_pointer(addresses), _pointer(mask), _pointer(given), _pointer(before)),
        ctypes.c_int64(addresses.numel()),
    )
    check(programs, index, "changes", addresses, given.element_size())
    return before


def compare_and_swap(
    programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    """Store elements where those at addresses are the expected ones; return what was there before.

    Raises:
        KernelError: if an address is not in memory that a card could write.
    """
    mask = active_mask(programs, None, addresses.dim())
    shape = (programs.count, *addresses.shape[1:])
    addresses, mask = _spread(addresses.expand(shape), mask)
    expected = expected.expand(addresses.shape).contiguous()
    given = given.expand(addresses.shape).contiguous()
    before = torch.zeros_like(given)
    tensors = (addresses, mask, expected, given, before)
    count, size = ctypes.c_int64(addresses.numel()), given.element_size()
    index = _functions.emulated_compare_and_swap(*map(_pointer, tensors), count, size)
    check(programs, index, "changes", addresses, size)
    return before


def _spread(
    addresses: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return addresses and mask with one element for each access, in order."""
    if mask is None:
        return addresses.contiguous(), None
    addresses, mask = torch.broadcast_tensors(addresses, mask)
    return addresses.contiguous(), mask.contiguous()


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _call(
    programs: Programs,
    name: str,
    verb: str,
    values: torch.Tensor,
    addresses: torch.Tensor,
    mask: torch.Tensor | None,
    size: int,
) -> None:
    function = getattr(_functions, f"emulated_{name}")
    count = ctypes.c_int64(addresses.numel())
    index = function(_pointer(values), _pointer(addresses), _pointer(mask), count, size)
    check(programs, index, verb, addresses, size)


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
    if len(addresses) == programs.count:
        program = index // of_one
        position = ", ".join(str(int(programs.ids[axis][program])) for axis in "xyz")
        at = f" in program ({position})"
    where = f"the kernel {programs.name} {verb} {size} bytes at 0x{address & (2**64 - 1):x}{at}"
    if address % size:
        raise KernelError(KernelError.MISALIGNED_ADDRESS, f"misaligned address: {where}")
    raise KernelError(
        KernelError.ILLEGAL_ADDRESS,
        f"an illegal memory access was encountered: {where}, which is not in memory of the device",
    )
