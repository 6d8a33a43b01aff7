"""What each operation of TTIR does: a row per operation, added by the modules that compute them."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch

from emulated_cuda.triton.operations import FLOAT8, HALF, NotComputed, Operation

Compute = Callable[..., Any]
Prepare = Callable[[Operation], Compute]

OPERATIONS: dict[str, Prepare] = {}
"""Name -> what returns the computation of one operation of this name."""
ON_PROGRESSIONS: dict[str, Prepare] = {}
"""Name -> what returns a computation that also takes progressions, see :mod:`regular`."""
INTO_OPERANDS: dict[str, Prepare] = {}
"""Name -> what returns the same computation with a parameter `out`, a tensor for the result, which
may be an operand; for types that need no rounding. See
``programs.spare_operands``."""
CONTROL: set[str] = set()
"""Operations with regions of their own: they get all values by name in place of their operands."""
TERMINATORS = {
    *("scf.yield", "scf.condition", "cf.br", "cf.cond_br", "tt.return"),
    *("tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"),
}
"""Operations that end a block; what they mean is up to the operation around it."""
NOT_COMPUTED = {
    "tt.make_tensor_ptr": "Triton replaces it before this stage",
    "tt.advance": "Triton replaces it before this stage",
    **dict.fromkeys(
        (
            *("scf.execute_region", "scf.forall", "scf.forall.in_parallel", "scf.index_switch"),
            *("scf.parallel", "scf.reduce", "scf.reduce.return", "cf.switch", "ub.unreachable"),
            *("arith.scaling_extf", "arith.scaling_truncf"),
        ),
        "no version of Triton that was tried writes at this stage",
    ),
}
"""Operations that the language has and that are known not to be computed, with the reason."""


def operation(*names: str) -> Callable[[Prepare], Prepare]:
    """Return a decorator that adds a row for each name."""

    def add(prepare: Prepare) -> Prepare:
        OPERATIONS.update(dict.fromkeys(names, prepare))
        return prepare

    return add


def control(*names: str) -> Callable[[Prepare], Prepare]:
    """Return a decorator that adds a row for each name of an operation with regions."""
    CONTROL.update(names)
    return operation(*names)


def on_progressions(*names: str) -> Callable[[Prepare], Prepare]:
    """Return a decorator that adds a row for each name, which is tried first on progressions."""

    def add(prepare: Prepare) -> Prepare:
        ON_PROGRESSIONS.update(dict.fromkeys(names, prepare))
        return prepare

    return add


def into_operands(rows: dict[str, Callable[..., torch.Tensor]]) -> None:
    """Add functions of torch that have a parameter `out`."""
    for name, function in rows.items():
        INTO_OPERANDS[name] = _ignoring_programs(function)


def elementwise(rows: dict[str, Callable[..., torch.Tensor]]) -> None:
    """Add rows of operations that take tensors and return one."""
    for name, function in rows.items():
        OPERATIONS[name] = _ignoring_programs(function)


def in_single_precision(rows: dict[str, Callable[..., torch.Tensor]]) -> None:
    """Add rows of operations on floating-point numbers; half precision is widened, then rounded."""
    for name, function in rows.items():
        OPERATIONS[name] = _ignoring_programs(widened(function))
        if isinstance(function, BuiltinFunctionType):  # torch's own
            into_operands({name: function})


def _ignoring_programs(function: Callable[..., torch.Tensor]) -> Prepare:
    def compute(programs: Any, *values: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        return function(*values, **out)

    return lambda operation: compute


def widened(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that computes numbers of 16 and 8 bits in single precision."""

    def compute(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        dtype = first.dtype
        if dtype not in HALF:
            return function(first, *others)
        values = [value.float() if value.dtype in HALF else value for value in (first, *others)]
        return rounded(function(*values), dtype)

    return compute


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in another type; those too large for float8 become its largest."""
    if dtype in FLOAT8 and value.dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        value = value.float()
        keeps_infinity = dtype is torch.float8_e5m2
        clamped = value.clamp(-largest, largest)
        value = torch.where(value.isinf(), value, clamped) if keeps_infinity else clamped
    return value.to(dtype)


def prepare(operation: Operation) -> Compute:
    """Return what computes an operation.

    Raises:
        NotComputed: if no row is known for it, or not in this form.
    """
    row = OPERATIONS.get(operation.name)
    if row is None:
        why = NOT_COMPUTED.get(operation.name)
        raise NotComputed(f"the operation {operation.name}" + (f", which {why}" if why else ""))
    return row(operation)
