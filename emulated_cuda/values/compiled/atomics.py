"""Atomic operations: each program's, and each element's, comes after the one before it."""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values.compiled import accesses
from emulated_cuda.values.compiled.errors import KernelError, NotComputed
from emulated_cuda.values.compiled.memory import pointee_of
from emulated_cuda.values.compiled.operations import Operation, Type
from emulated_cuda.values.compiled.programs import Programs
from emulated_cuda.values.compiled.table import Compute, operation

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
    """Return an atomic operation as :func:`accesses.atomic` takes it.

    Raises:
        NotComputed: if it is not known for elements of this type.
    """
    letter = _LETTERS.get(element.dtype)
    if _KINDS.get(name, -1) < 0 or letter is None:
        raise NotComputed(f"the atomic operation {name} on {element.element}")
    return _KINDS[name], letter.upper() if name in ("umax", "umin") else letter


@operation("tt.atomic_rmw")
def change(one: Operation) -> Compute:
    """Change elements in memory; the results are what was there before."""
    kind = kind_of(one.keyword, pointee_of(one))

    def compute(
        programs: Programs, addresses: torch.Tensor, value: torch.Tensor, mask: Any = None
    ) -> torch.Tensor:
        return accesses.atomic(programs, kind, addresses, value, mask)

    return compute


@operation("tt.atomic_cas")
def compare_and_swap(one: Operation) -> Compute:
    """Store a value where the expected one is; the results are what was there before."""
    pointee_of(one)

    def compute(
        programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return accesses.compare_and_swap(programs, addresses, expected, value)

    return compute


@operation("tt.atomic_poll")
def wait_for_value(one: Operation) -> Compute:
    """Whether elements in memory are those that are waited for; with a time limit it may be no."""
    dtype = pointee_of(one).dtype

    def compute(
        programs: Programs, addresses: torch.Tensor, expected: torch.Tensor, limit: Any = None
    ) -> torch.Tensor:
        is_there = accesses.load(programs, addresses, None, dtype) == expected
        mask = accesses.active_mask(programs, None, addresses.dim())
        if limit is None and not (is_there if mask is None else is_there | ~mask).all():
            raise KernelError(
                KernelError.TIMEOUT,
                f"the launch timed out and was terminated: the kernel {programs.name} waits for a "
                f"value that no earlier program has written. On the emulated device, programs run "
                f"one after the other",
            )
        return is_there

    return compute
