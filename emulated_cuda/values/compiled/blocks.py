"""Loads and stores of blocks whose addresses are progressions, by csrc/blocks.cpp.

They touch the same elements in the same order as :mod:`accesses`, without an address for each.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from emulated_cuda.values.compiled import accesses
from emulated_cuda.values.compiled.programs import Programs
from emulated_cuda.values.compiled.progressions import Progression

MOST_DIMS = 16  # kMostDims in csrc/blocks.cpp


class _Block(ctypes.Structure):
    """``Block`` in csrc/blocks.cpp."""

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


def load(
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
    given = [v.shape[0] for v in (addresses.base, active, mask, other) if v is not None]
    shape = (max(given), *addresses.shape)
    if active is None and mask is None:
        found = torch.empty(shape, dtype=dtype)
    elif other is None:
        found = torch.zeros(shape, dtype=dtype)
    else:
        found = torch.empty(shape, dtype=dtype).copy_(other)
    _call(programs, "load", "reads", found, addresses, active, mask)
    return found


def store(programs: Programs, addresses: Progression, values: torch.Tensor, mask: Any) -> None:
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
    given = [v.shape[0] for v in (addresses.base, active, mask, values) if v is not None]
    values = values.expand(max(given), *addresses.shape).contiguous()
    _call(programs, "store", "writes", values, addresses, active, mask)


def _active(programs: Programs, mask: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which programs touch the block, and which elements of each; None for all."""
    active = programs.active
    if not isinstance(mask, Progression):
        return active, mask
    if mask.number == 1:
        return active, None
    return (mask.base if active is None else mask.base & active), None


def _call(
    programs: Programs,
    name: str,
    verb: str,
    values: torch.Tensor,
    addresses: Progression,
    active: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    base, count = addresses.base.contiguous(), values.shape[0]
    size = values.element_size()
    lengths, steps = _arrays(addresses.shape, addresses.steps)
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
    index = accesses.functions()[f"emulated_{name}_block"](
        ctypes.c_void_p(values.data_ptr()), ctypes.byref(block)
    )
    if index >= 0:
        every = addresses.tensor()
        if len(base) < count and (active is not None or mask is not None or verb == "writes"):
            every = every.expand(count, *addresses.shape)
        accesses.check(programs, index, verb, every.contiguous(), size)


@lru_cache(256)
def _arrays(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Any, Any]:
    array = ctypes.c_int64 * len(shape)
    return array(*shape), array(*steps)
