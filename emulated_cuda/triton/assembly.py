"""Inline assembly on elements: PTX instructions on registers, without jumps and memory.

Source: PTX ISA 8.8, chapter 9 (https://docs.nvidia.com/cuda/parallel-thread-execution/).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from emulated_cuda.triton.libdevice import function_of
from emulated_cuda.triton.numbers import (
    bits_of,
    fused,
    high_bits,
    ordered,
    signed_high_bits,
    unsigned,
)
from emulated_cuda.triton.programs import same_length
from emulated_cuda.triton.ttir import (
    HALF,
    OPERATIONS,
    Compute,
    NotComputed,
    Operation,
    operation,
    rounded,
)

_TYPES = {
    **{f"{letter}{size}": dtype for letter in "bsu" for size, dtype in (
        (8, torch.int8), (16, torch.int16), (32, torch.int32), (64, torch.int64))},
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "pred": torch.bool,
}  # fmt: skip
_PAIRS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SPECIAL = re.compile(r"%(?:globaltimer|clock|smid|nsmid|laneid|warpid|tid|ntid|ctaid|nctaid)\b")
"""Registers that a card sets."""

_WITHOUT_EFFECT = (".reg", "griddepcontrol")
"""Declarations, and waiting for kernels that were launched before: they have ended here."""

Registers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Instruction:
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    """The predicate under which it runs, with ``!`` if it must be false; empty for always."""

    @property
    def type(self) -> str:
        """The type of the operation."""
        kinds = [m for m in self.modifiers if m in _TYPES or m in _PAIRS]
        if not kinds:
            raise NotComputed(
                f"cannot compute the PTX instruction {self.name}, which is written without a type "
                "such as .f32"
            )
        return kinds[0]


def _row(name: str) -> Callable[..., torch.Tensor]:
    compute = OPERATIONS[name](Operation(name, [], []))
    return lambda *values: compute(None, *values)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov": lambda a: a,
    "add": torch.add,
    "sub": torch.sub,
    "fma": fused,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "rcp": torch.reciprocal,
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": _row("arith.shli"),
    "popc": lambda a: _row("math.ctpop")(a).int(),
    "clz": lambda a: _row("math.ctlz")(a).int(),
}
_BY_SIGN: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "shr": (_row("arith.shrsi"), _row("arith.shrui")),
    "div": (_row("arith.divsi"), _row("arith.divui")),
    "rem": (_row("arith.remsi"), _row("arith.remui")),
    "min": (torch.minimum, _row("arith.minui")),
    "max": (torch.maximum, _row("arith.maxui")),
}
"""Functions of integers with sign, and without."""
_OF_FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "min": torch.fmin,
    "max": torch.fmax,
}


def _function(instruction: _Instruction) -> Callable[..., torch.Tensor]:
    kind, has_sign = instruction.type, instruction.type.startswith("s")
    if (kind[0] in "bf" and kind not in _TYPES) or kind in ("f16", "bf16", "f32", "f64"):
        function = _OF_FLOATS.get(instruction.name) or _FUNCTIONS.get(instruction.name)
        return _flushed(function) if function else _unknown(instruction)
    if instruction.name in ("mul", "mad"):
        return _product(instruction, has_sign)
    if instruction.name in _BY_SIGN:
        return _BY_SIGN[instruction.name][0 if has_sign else 1]
    return _FUNCTIONS.get(instruction.name) or _unknown(instruction)


def _flushed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute(*values: torch.Tensor) -> torch.Tensor:
        dtype = values[0].dtype
        if dtype not in HALF:
            return function(*values)
        return rounded(function(*[v.float() for v in values]), dtype)

    return compute


def _product(instruction: _Instruction, has_sign: bool) -> Callable[..., torch.Tensor]:
    high = signed_high_bits if has_sign else high_bits

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if "wide" in instruction.modifiers:
            wide = _BITS[2 * a.element_size()]
            return a.to(wide) * b.to(wide) if has_sign else (unsigned(a) * unsigned(b)).to(wide)
        return high(a, b) if "hi" in instruction.modifiers else a * b

    return multiply if instruction.name == "mul" else lambda a, b, c: multiply(a, b) + c


def _unknown(instruction: _Instruction) -> Any:
    raise NotComputed(
        f"cannot compute the PTX instruction {'.'.join((instruction.name, *instruction.modifiers))}"
    )


# ---- Instructions that are more than a function of one type ----


def _convert(instruction: _Instruction, values: Registers) -> torch.Tensor:
    kinds = [m for m in instruction.modifiers if m in _TYPES]
    if len(kinds) != 2:
        _unknown(instruction)
    target, source = kinds
    value = _read(values, instruction.operands[1], _TYPES[source])
    dtype = _TYPES[target]
    if target[0] in "fb" and target[0:2] != "b8" and dtype.is_floating_point:
        if source[0] == "u":
            value = unsigned(value).double()
        return rounded(value, dtype)
    if source[0] in "fb" and _TYPES[source].is_floating_point:
        whole = {"rzi": torch.trunc, "rni": torch.round, "rmi": torch.floor, "rpi": torch.ceil}
        mode = next((m for m in instruction.modifiers if m in whole), "rzi")
        limits = torch.iinfo(dtype)
        low, high = (limits.min, limits.max) if target[0] == "s" else (0, 2**limits.bits - 1)
        number = torch.nan_to_num(whole[mode](value.double()), 0.0).clamp(low, high)
        return number.long().to(dtype)
    return (unsigned(value) if source[0] == "u" else value).to(dtype)


_COMPARISONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "lo": torch.lt,
    "ls": torch.le,
    "hi": torch.gt,
    "hs": torch.ge,
}


def _compare(instruction: _Instruction, values: Registers) -> torch.Tensor:
    how = instruction.modifiers[0]
    dtype = _TYPES[instruction.type]
    a, b = (_read(values, name, dtype) for name in instruction.operands[1:3])
    if instruction.type[0] == "u" or how in ("lo", "ls", "hi", "hs"):
        a, b = ordered(a), ordered(b)
    if how not in _COMPARISONS:
        _unknown(instruction)
    return _COMPARISONS[how](a, b)


def _select(instruction: _Instruction, values: Registers) -> torch.Tensor:
    dtype = _TYPES[instruction.type]
    a, b = (_read(values, name, dtype) for name in instruction.operands[1:3])
    return torch.where(_read(values, instruction.operands[3], torch.bool), a, b)


def _permute(instruction: _Instruction, values: Registers) -> torch.Tensor:
    a, b, selector = (_read(values, name, torch.int32) for name in instruction.operands[1:4])
    return function_of("byte_perm")(a, b, selector)


def _logic(instruction: _Instruction, values: Registers) -> torch.Tensor:
    """Compute ``lop3``: a function of three bits, whose table of eight results is an operand."""
    a, b, c = (_read(values, name, torch.int32) for name in instruction.operands[1:4])
    table, result = int(instruction.operands[4], 0), torch.zeros_like(a)
    for case in range(8):
        if table >> case & 1:
            x, y, z = (v if case >> at & 1 else ~v for v, at in ((a, 2), (b, 1), (c, 0)))
            result = result | (x & y & z)
    return result


def _extract(instruction: _Instruction, values: Registers) -> torch.Tensor:
    dtype = _TYPES[instruction.type]
    value = _read(values, instruction.operands[1], dtype)
    start, length = (
        _read(values, name, torch.int32).long() & 255 for name in instruction.operands[2:4]
    )
    result = (unsigned(value) >> start.clamp(max=63)) & ((1 << length.clamp(max=62)) - 1)
    if instruction.type[0] == "s":
        sign = (result >> (length - 1).clamp_min(0)) & 1
        result = result - (sign << length)
    return result.to(dtype)


def _funnel_shift(instruction: _Instruction, values: Registers) -> torch.Tensor:
    """The upper or lower half of two registers that are shifted as one number of 64 bits."""
    low, high, count = (
        unsigned(_read(values, name, torch.int32)) for name in instruction.operands[1:4]
    )
    count = count & 31 if "wrap" in instruction.modifiers else count.clamp(max=32)
    back = 32 - count
    left = (high << count) | (low >> back)
    result = left if "l" in instruction.modifiers else (low >> count) | (high << back)
    return result.to(torch.int32)  # keeps the low 32 bits


_OTHERS: dict[str, Callable[[_Instruction, Registers], torch.Tensor]] = {
    "cvt": _convert,
    "setp": _compare,
    "selp": _select,
    "prmt": _permute,
    "lop3": _logic,
    "bfe": _extract,
    "shf": _funnel_shift,
}


# ---- Programs of instructions ----


def _instructions(text: str) -> list[_Instruction]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    instructions = []
    for line in re.split(r"[;{}]", re.sub(r"\{([^{};]*)\}", r"<\1>", text)):
        line = line.strip()
        if not line or line.startswith(_WITHOUT_EFFECT):
            continue
        parts = re.match(
            r"(?:@(!?[%\w$]+)\s+)?([a-z]\w*)((?:\.\w+(?:::\w+)?)*)\s*(.*)", line, re.DOTALL
        )
        if parts is None or "[" in line or "<" in line:
            raise NotComputed(f"cannot compute the PTX instruction {line}")
        special = _SPECIAL.search(line)
        if special is not None:
            raise NotComputed(f"cannot read the register {special[0]} in inline assembly")
        operands = tuple(operand.strip() for operand in parts[4].split(",") if operand.strip())
        modifiers = tuple(parts[3].split(".")[1:])
        instructions.append(_Instruction(parts[2], modifiers, operands, parts[1] or ""))
    return instructions


def _read(values: Registers, operand: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a register, or a number in the code, as a tensor of a type."""
    if operand.startswith("-") and operand[1:] in values:
        return -_read(values, operand[1:], dtype)
    if operand in values:
        value = values[operand]
        if value.dtype is dtype:
            return value
        if torch.bool in (value.dtype, dtype):
            return value.to(dtype)
        if value.element_size() != dtype.itemsize:
            size = _BITS[dtype.itemsize]
            value = unsigned(value.view(_BITS[value.element_size()])).to(size)
        return value.contiguous().view(dtype)
    in_hexadecimal = re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand)
    if in_hexadecimal is not None:
        size = torch.int32 if in_hexadecimal[1] else torch.int64
        bits = int(in_hexadecimal[1] or in_hexadecimal[2], 16)
        limit = 2 ** (bits_of(torch.empty(0, dtype=size)) - 1)
        exact = torch.tensor(bits - 2 * limit if bits >= limit else bits, dtype=size)
        return exact.view(torch.float32 if in_hexadecimal[1] else torch.float64).to(dtype)
    try:
        number = float(operand) if dtype.is_floating_point else int(operand.rstrip("U"), 0)
    except ValueError:
        raise NotComputed(f"cannot read the PTX operand {operand}") from None
    if dtype.is_floating_point or dtype is torch.bool:
        return torch.tensor(number).to(dtype)
    return torch.tensor(int(number) & (2**63 - 1) if int(number) >= 0 else int(number)).to(dtype)


def _compute(instruction: _Instruction, values: Registers) -> torch.Tensor:
    if instruction.name in _OTHERS:
        return _OTHERS[instruction.name](instruction, values)
    function = _function(instruction)
    if instruction.type not in _PAIRS:
        operands = [
            _read(values, name, _TYPES[instruction.type]) for name in instruction.operands[1:]
        ]
        if instruction.name in ("shl", "shr"):
            operands[1] = _read(values, instruction.operands[2], torch.int32).to(operands[0].dtype)
        if instruction.name == "mad" and "wide" in instruction.modifiers:
            operands[2] = _read(
                values, instruction.operands[3], _BITS[2 * operands[0].element_size()]
            )
        return function(*operands)
    # Two numbers in a register.
    pairs = [
        _read(values, name, torch.int32).unsqueeze(-1).view(_PAIRS[instruction.type])
        for name in instruction.operands[1:]
    ]
    return function(*pairs).contiguous().view(torch.int32).squeeze(-1)


@operation("tt.elementwise_inline_asm")
def inline_assembly(op: Operation) -> Compute:
    """Instructions that get elements in registers ``$n``, results first."""
    instructions = _instructions(op.quoted())
    for instruction in instructions:
        if instruction.name not in _OTHERS:
            _function(instruction)  # raises if it is not known
    pack = op.integer("packed_element")
    dtypes = [kind.dtype for kind in op.result_types]

    def compute(programs: Any, *operands: torch.Tensor) -> Any:
        operands = (
            tuple(same_length(*operands)) if operands else (torch.zeros(1, *op.type().shape),)
        )
        shape, pieces = operands[0].shape, []
        for value in operands if op.operands else ():
            pieces += _packed(value, pack)
        outputs = [_registers_of(dtype, pack) for dtype in dtypes]
        values: Registers = {f"${sum(outputs) + i}": register for i, register in enumerate(pieces)}
        for instruction in instructions:
            _execute(instruction, values)
        unwritten = torch.zeros(operands[0].numel() // pack, dtype=torch.int32)
        results, at = [], 0
        for dtype, count in zip(dtypes, outputs, strict=True):
            registers = [values.get(f"${at + i}", unwritten) for i in range(count)]
            results.append(_elements(registers, dtype, pack).expand(-1, pack).reshape(shape))
            at += count
        return results[0] if len(results) == 1 else results

    return compute


def _execute(instruction: _Instruction, values: Registers) -> None:
    new = _compute(instruction, values)
    if instruction.guard:
        name = instruction.guard.lstrip("!")
        condition = _read(values, name, torch.bool) ^ instruction.guard.startswith("!")
        old = values.get(instruction.operands[0])
        if old is not None:
            new = torch.where(condition, new, _read(values, instruction.operands[0], new.dtype))
    values[instruction.operands[0]] = new


def _registers_of(dtype: torch.dtype, pack: int) -> int:
    """Return how many registers hold `pack` elements: short ones share one of 32 bits."""
    return pack // min(pack, max(1, 4 // dtype.itemsize))


def _packed(value: torch.Tensor, pack: int) -> list[torch.Tensor]:
    """Return the registers that hold elements, `pack` in a row together."""
    if value.dtype is torch.bool:
        value = value.to(torch.int8)
    value = value.reshape(
        -1, _registers_of(value.dtype, pack), pack // _registers_of(value.dtype, pack)
    )
    if value.shape[2] == 1:
        return list(value.squeeze(2).unbind(1))
    size = value.shape[2] * value.element_size()
    return list(value.contiguous().view(_BITS[size]).squeeze(2).unbind(1))


def _elements(registers: list[torch.Tensor], dtype: torch.dtype, pack: int) -> torch.Tensor:
    """Return the elements (n, pack) that registers hold."""
    per_register = pack // len(registers)
    parts = []
    for register in registers:
        if per_register == 1:
            parts.append(_read({"$": register}, "$", dtype).reshape(-1, 1))
        else:
            bits = _read({"$": register}, "$", _BITS[per_register * dtype.itemsize])
            parts.append(bits.reshape(-1, 1).contiguous().view(dtype))
    return torch.cat(parts, 1)
