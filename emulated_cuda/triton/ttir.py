"""A kernel in Triton's intermediate code (TTIR), and the table of what computes each operation.

A kernel consists of types, operations, blocks and functions. The table has one row for each
operation; the modules that compute operations add the rows. A kernel can raise two errors:
:class:`NotComputed` if it cannot be computed here, :class:`KernelError` if it would fail on a card.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType
from typing import Any

import torch


class NotComputed(Exception):  # noqa: N818  never leaves this package
    """The kernel uses something that has no meaning here; the text says what."""


class KernelError(Exception):
    """The kernel fails as it would on a card.

    Args:
        code: of the error, as CUDA's driver numbers it.
        problem: what happened.
    """

    ILLEGAL_ADDRESS = 700
    TIMEOUT = 702
    ASSERT = 710
    MISALIGNED_ADDRESS = 716

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
    "f8E4M3FNUZ": torch.float8_e4m3fnuz,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz,
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "index": torch.int64,
}
"""Element type in the text -> dtype; integers without sign have that of the same size."""
DTYPES |= {f"{sign}{name}": DTYPES[name] for sign in "su" for name in ("i8", "i16", "i32", "i64")}
FLOAT8 = tuple(dtype for name, dtype in DTYPES.items() if name.startswith("f8"))
HALF = (torch.float16, torch.bfloat16, *FLOAT8)
_POINTER = "!tt.ptr<"


def _byte(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    return bytes.fromhex(code.decode()) if len(code) == 2 else {b"n": b"\n"}.get(code, code)


@dataclass(frozen=True)
class Type:
    """The type of a value."""

    element: str
    shape: tuple[int, ...] = ()
    """Empty for a single number."""

    @property
    def is_pointer(self) -> bool:
        """Whether its elements are addresses."""
        return self.element.startswith(_POINTER)

    @property
    def is_descriptor(self) -> bool:
        """Whether it describes a tensor in memory."""
        return self.element.startswith("!tt.tensordesc")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the CPU tensor that holds such values; addresses are int64.

        Raises:
            NotComputed: if torch has no such dtype.
        """
        if self.is_pointer:
            return torch.int64
        if self.element not in DTYPES:
            raise NotComputed(f"cannot compute with the element type {self.element}")
        return DTYPES[self.element]

    @property
    def pointee(self) -> Type:
        """The type at an address."""
        inner = self.element[len(_POINTER) : -1]
        return type_of(re.sub(r",\s*\d+$", "", inner))  # without the address space


def type_of(text: str) -> Type:
    """Return the type that a text such as ``tensor<4x8xf32>`` names."""
    text = text.strip()
    if not text.startswith("tensor<"):
        return Type(text)
    shape = re.match(r"(?:\d+x)*", text[7:-1])
    assert shape is not None
    lengths = tuple(int(length) for length in shape[0].split("x")[:-1])
    return Type(text[7 + shape.end() : -1].strip(), lengths)


@dataclass
class Operation:
    """One operation, as the text has it."""

    name: str
    results: list[str]
    operands: list[str]
    text: str = ""
    """What stands between the name and the types, without attributes."""
    attributes: str = ""
    operand_types: list[Type] = field(default_factory=list)
    """As far as the text names them; those of one type are named once."""
    result_types: list[Type] = field(default_factory=list)
    regions: list[list[Block]] = field(default_factory=list)
    iteration: Iteration | None = None
    """Of a loop."""

    def type(self, index: int = 0) -> Type:
        """The type of a result."""
        return self.result_types[index]

    def quoted(self) -> str:
        """Return the first text in quotes; empty if there is none."""
        quotation = re.search(r'"((?:[^"\\]|\\.)*)"', self.text)
        if quotation is None:
            return ""
        # MLIR writes special characters as two hexadecimal digits of each byte.
        escaped = re.sub(rb"\\([0-9A-Fa-f]{2}|.)", _byte, quotation[1].encode())
        return escaped.decode("utf-8", errors="replace")

    def integer(self, name: str) -> int:
        """Return an attribute such as ``axis = 1 : i32``.

        Raises:
            NotComputed: if the operation has none of this name.
        """
        number = re.search(rf"\b{name} = (-?\d+)", self.attributes)
        if number is None:
            raise NotComputed(
                f"cannot compute the operation {self.name}, because its attribute {name} is missing"
            )
        return int(number[1])

    def string(self, name: str) -> str:
        """Return an attribute such as ``symbol = "__nv_sin"``; empty if there is none."""
        quotation = re.search(rf'\b{name} = "((?:[^"\\]|\\.)*)"', self.attributes)
        return quotation[1] if quotation else ""

    def is_set(self, name: str) -> bool:
        """Whether an attribute is ``true``."""
        return re.search(rf"\b{name} = true", self.attributes) is not None

    @property
    def keyword(self) -> str:
        """The word before the first operand, such as ``slt`` of a comparison."""
        return re.split(r"[,\s]", self.text.strip(), maxsplit=1)[0]


@dataclass(frozen=True)
class Iteration:
    """The names that a loop gives to what changes from one iteration to the next."""

    names: list[str]
    counter: str = ""
    is_unsigned: bool = False


@dataclass
class Block:
    """Operations that run one after the other; the last says what comes next."""

    label: str
    arguments: list[str]
    operations: list[Operation]


@dataclass
class Function:
    """A function of the kernel."""

    name: str
    arguments: list[str]
    argument_types: list[Type]
    blocks: list[Block]
    is_public: bool


def all_operations(blocks: list[Block]) -> Iterator[Operation]:
    """Yield the operations of blocks, and those of their regions."""
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from all_operations(region)


def uses(op: Operation) -> set[str]:
    """Return the values that an operation needs, in its regions too."""
    names = set(op.operands)
    for region in op.regions:
        for inner in all_operations(region):
            names.update(inner.operands)
    return names


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
_REPLACED = (
    "Triton replaces this operation before it writes TTIR, the code that the emulated device "
    "interprets"
)
NOT_COMPUTED = {
    "tt.make_tensor_ptr": _REPLACED,
    "tt.advance": _REPLACED,
    **dict.fromkeys(
        (
            *("scf.execute_region", "scf.forall", "scf.forall.in_parallel", "scf.index_switch"),
            *("scf.parallel", "scf.reduce", "scf.reduce.return", "cf.switch", "ub.unreachable"),
            *("arith.scaling_extf", "arith.scaling_truncf"),
        ),
        "no tested version of Triton writes this operation into TTIR, the code that the emulated "
        "device interprets",
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
        raise NotComputed(
            f"cannot compute the operation {operation.name}" + (f" ({why})" if why else "")
        )
    return row(operation)
