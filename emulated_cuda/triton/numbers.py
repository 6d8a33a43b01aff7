"""Arithmetic on integers and floating-point numbers (dialects ``arith`` and ``math``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda.triton import memory
from emulated_cuda.triton.ttir import (
    HALF,
    Compute,
    Operation,
    elementwise,
    in_single_precision,
    into_operands,
    operation,
)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * b + c``; that of single precision is rounded once."""
    if a.dtype is torch.float32:  # double precision has all digits of a product of two
        return (a.double() * b.double() + c.double()).float()
    return a * b + c


def _odd_root(value: torch.Tensor) -> torch.Tensor:
    # A negative number to the power of 1/3 is NaN for torch, so its sign is put back afterwards.
    return torch.sign(value) * value.abs().double().pow(1 / 3).to(value.dtype)


in_single_precision(
    {
        "arith.addf": torch.add,
        "arith.subf": torch.sub,
        "arith.mulf": torch.mul,
        "arith.divf": torch.div,
        "arith.remf": torch.fmod,
        "arith.negf": torch.neg,
        "arith.maxnumf": torch.fmax,
        "arith.minnumf": torch.fmin,
        "arith.maximumf": torch.maximum,
        "arith.minimumf": torch.minimum,
        "arith.flush_denormals": lambda a: a,
        "tt.precise_divf": torch.div,
        "tt.approx_divf": torch.div,
        # In double precision first: with MKL, torch does not round single precision to the nearest.
        "tt.precise_sqrt": lambda a: a.double().sqrt().to(a.dtype),
        "math.sqrt": torch.sqrt,
        "math.rsqrt": torch.rsqrt,
        "math.cbrt": _odd_root,
        "math.exp": torch.exp,
        "math.exp2": torch.exp2,
        "math.expm1": torch.expm1,
        "math.log": torch.log,
        "math.log2": torch.log2,
        "math.log10": torch.log10,
        "math.log1p": torch.log1p,
        "math.sin": torch.sin,
        "math.cos": torch.cos,
        "math.tan": torch.tan,
        "math.asin": torch.asin,
        "math.acos": torch.acos,
        "math.atan": torch.atan,
        "math.atan2": torch.atan2,
        "math.sinh": torch.sinh,
        "math.cosh": torch.cosh,
        "math.tanh": torch.tanh,
        "math.asinh": torch.asinh,
        "math.acosh": torch.acosh,
        "math.atanh": torch.atanh,
        "math.erf": torch.erf,
        "math.erfc": torch.erfc,
        "math.absf": torch.abs,
        "math.floor": torch.floor,
        "math.ceil": torch.ceil,
        "math.trunc": torch.trunc,
        "math.roundeven": torch.round,
        "math.round": lambda a: torch.trunc(a + torch.copysign(torch.full_like(a, 0.5), a)),
        "math.copysign": torch.copysign,
        "math.powf": torch.pow,
        "math.fma": fused,
    }
)


@operation("tt.clampf", "math.clampf")
def clamp(op: Operation) -> Compute:
    """A number between two others; NaN stays NaN if the operation says so, else it is ignored."""
    ignores_nan = "none" in op.text

    def compute(
        programs: Any, value: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        if ignores_nan:
            return torch.fmin(torch.fmax(value, low), high)
        return torch.minimum(torch.maximum(value, low), high)

    return compute


@operation("math.sincos")
def sine_and_cosine(op: Operation) -> Compute:
    """The sine and the cosine of an angle."""
    return lambda programs, value: [torch.sin(value), torch.cos(value)]


@operation("math.fpowi")
def power_of_integer(op: Operation) -> Compute:
    """A number to the power of an integer."""
    return lambda programs, base, power: torch.pow(base, power.to(base.dtype))


@operation("math.ipowi")
def integer_power(op: Operation) -> Compute:
    """An integer to the power of one that is not negative."""
    return lambda programs, base, power: torch.pow(base, power.clamp_min(0))


@operation("math.isnan", "math.isinf", "math.isfinite", "math.isnormal")
def classify(op: Operation) -> Compute:
    """Whether a number is of a kind."""
    if op.name == "math.isnormal":
        return lambda programs, a: a.isfinite() & (a.abs() >= torch.finfo(a.dtype).tiny)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, op.name[5:])
    return lambda programs, a: function(a)


# ---- Comparisons ----

_COMPARISONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "eq": torch.eq,
    "ne": lambda a, b: (a < b) | (a > b),  # false for NaN, which torch.ne is not
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


@operation("arith.cmpf")
def compare_floats(op: Operation) -> Compute:
    """Compare; ``o..`` is false and ``u..`` true if one of the numbers is NaN."""
    how = op.keyword

    def compute(programs: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype in HALF:  # the CPU has no comparison of all of these types
            a, b = a.float(), b.float()
        if how in ("true", "false"):
            return torch.full(torch.broadcast_shapes(a.shape, b.shape), how == "true")
        if how == "une":
            return torch.ne(a, b)
        if how[0] == "o" and how != "ord":
            return _COMPARISONS[how[1:]](a, b)
        has_nan = torch.isnan(a) | torch.isnan(b)
        if how in ("ord", "uno"):
            return has_nan if how == "uno" else ~has_nan
        return _COMPARISONS[how[1:]](a, b) | has_nan

    return compute


Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_SIGN = -(2**63)
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def bits_of(value: torch.Tensor) -> int:
    """Return the size of an element in bits."""
    return 1 if value.dtype is torch.bool else 8 * value.element_size()


def unsigned(value: torch.Tensor) -> torch.Tensor:
    """Return integers without sign as int64; those of 64 bits keep their bits."""
    if value.dtype in (torch.bool, torch.int64):
        return value.long()
    return value.view(_UNSIGNED[value.element_size()]).long()


def ordered(value: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in whose order the integers without sign are."""
    # With the upper bit turned, signed numbers are in the order of unsigned ones.
    return value ^ _SIGN if value.dtype is torch.int64 else unsigned(value)


def shifted_right(value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Shift right, filling with zeros; a shift by the whole size or more gives 0."""
    if value.dtype is not torch.int64:
        return (unsigned(value) >> unsigned(by).clamp(0, 63)).to(value.dtype)
    # torch fills in the sign bit, which is masked; its shift by 64 or more is undefined.
    fits = (by >= 0) & (by < 64)
    count = torch.where(fits, by, 63)
    kept = torch.where(count == 0, -1, (1 << (64 - count).clamp(max=63)) - 1)
    return torch.where(fits, (value >> count) & kept, 0)


def high_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the upper half of a product of integers without sign."""
    if a.dtype is torch.int32:
        return _high_bits_of_32(a, b)
    if a.dtype is not torch.int64:
        product = unsigned(a) * unsigned(b)  # its 64 bits are right, also if it is negative here
        return product.bitwise_right_shift_(bits_of(a)).to(a.dtype)
    # By halves of 32 bits, whose products fit 64 bits without sign: a = a_high * 2**32 + a_low.
    half, low = torch.tensor(32), 2**32 - 1
    a_low, a_high, b_low, b_high = a & low, shifted_right(a, half), b & low, shifted_right(b, half)
    middle = a_high * b_low + shifted_right(a_low * b_low, half)
    second = a_low * b_high + (middle & low)
    return a_high * b_high + shifted_right(middle, half) + shifted_right(second, half)


def _high_bits_of_32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what :func:`high_bits` does; random numbers need it in each of their ten rounds."""
    if not any(a.stride()):  # a is one number for all elements, which the C function takes as b
        a, b = b, a
    is_one = not any(b.stride()) or b.numel() == 1
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a = a.expand(shape).contiguous()
    b = b if is_one else b.expand(shape).contiguous()
    upper = torch.empty_like(a)
    pointers = [ctypes.c_void_p(value.data_ptr()) for value in (a, b, upper)]
    memory.functions().emulated_high_bits(*pointers, ctypes.c_int64(a.numel()), int(is_one))
    return upper


def signed_high_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the upper half of a product of integers with sign."""
    if a.dtype is not torch.int64:
        return ((a.long() * b.long()) >> bits_of(a)).to(a.dtype)
    # Read without sign, a negative a is larger by 2**64, which adds b to the upper half.
    return high_bits(a, b) - torch.where(a < 0, b, 0) - torch.where(b < 0, a, 0)


def _not_zero(divisor: torch.Tensor) -> torch.Tensor:
    """Return a divisor without zeros: what a card gives for them is undefined."""
    return torch.where(divisor == 0, 1, divisor)


def _divided(rounding: str) -> Function:
    return lambda a, b: torch.div(a, _not_zero(b), rounding_mode=rounding)


def _rounded_up(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a quotient rounded up."""
    b = _not_zero(b)
    down = torch.div(a, b, rounding_mode="floor")
    return down + (torch.fmod(a, b) != 0)


def _unsigned_division(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quotient and remainder of integers without sign."""
    x, y = unsigned(a), _not_zero(unsigned(b))
    quotient = torch.div(x, y, rounding_mode="floor")
    if a.dtype is torch.int64:
        # torch has no unsigned int64, so numbers from 2**63 on are negative here. A divisor from
        # 2**63 on goes into a dividend once at most. For a smaller one, half of the dividend is
        # divided, which is not negative, and the doubled quotient is at most 1 too small.
        half = torch.div(
            shifted_right(x, torch.tensor(1)), y.abs().clamp_min(1), rounding_mode="floor"
        )
        doubled = half * 2
        doubled = doubled + (ordered(x - doubled * y) >= ordered(y))
        quotient = torch.where(y < 0, (ordered(x) >= ordered(y)).long(), doubled)
    return quotient.to(a.dtype), (x - quotient * y).to(a.dtype)


def _shifted_left(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # MLIR leaves a shift by the whole size or more undefined; here it is 0.
    fits = (b >= 0) & (b < bits_of(a))
    return torch.where(fits, a << torch.where(fits, b, 0), 0)


def _shifted_right_with_sign(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    size = bits_of(a)
    return a >> torch.where((b >= 0) & (b < size), b, size - 1)


def _for_bits(numbers: Function, bits: Function) -> Function:
    """Return a function that computes single bits in another way, because booleans do not wrap."""
    return lambda a, b: bits(a, b) if a.dtype is torch.bool else numbers(a, b)


def _one_of_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether one of two bits is set; as bytes, because torch takes long with booleans."""
    return (a.view(torch.uint8) ^ b.view(torch.uint8)).view(torch.bool)


def _smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(ordered(a) < ordered(b), a, b)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(ordered(a) > ordered(b), a, b)


def _count_bits(value: torch.Tensor) -> torch.Tensor:
    count, left = torch.zeros_like(unsigned(value)), unsigned(value)
    for at in range(bits_of(value)):
        count += (left >> at) & 1
    return count.to(value.dtype)


def _leading_zeros(value: torch.Tensor) -> torch.Tensor:
    size = bits_of(value)
    zeros = torch.full_like(unsigned(value), size)
    for at in range(size):  # upwards: the highest bit that is set is met last, and decides
        zeros = torch.where((unsigned(value) >> at) & 1 == 1, size - 1 - at, zeros)
    return zeros.to(value.dtype)


def _trailing_zeros(value: torch.Tensor) -> torch.Tensor:
    size = bits_of(value)
    zeros = torch.full_like(unsigned(value), size)
    for at in reversed(range(size)):  # downwards: the lowest bit that is set decides
        zeros = torch.where((unsigned(value) >> at) & 1 == 1, at, zeros)
    return zeros.to(value.dtype)


elementwise(
    {
        "arith.addi": _for_bits(torch.add, _one_of_both),
        "arith.subi": _for_bits(torch.sub, _one_of_both),
        "arith.muli": _for_bits(torch.mul, torch.bitwise_and),
        "arith.andi": torch.bitwise_and,
        "arith.ori": torch.bitwise_or,
        "arith.xori": _for_bits(torch.bitwise_xor, _one_of_both),
        "arith.shli": _shifted_left,
        "arith.shrsi": _shifted_right_with_sign,
        "arith.shrui": shifted_right,
        "arith.divsi": _divided("trunc"),
        "arith.floordivsi": _divided("floor"),
        "arith.ceildivsi": _rounded_up,
        "arith.ceildivui": lambda a, b: (
            _unsigned_division(a, b)[0] + (_unsigned_division(a, b)[1] != 0)
        ),
        "arith.remsi": lambda a, b: torch.fmod(a, _not_zero(b)),
        "arith.divui": lambda a, b: _unsigned_division(a, b)[0],
        "arith.remui": lambda a, b: _unsigned_division(a, b)[1],
        # A signed number of one bit is 0 or -1, so the smaller of two is their "or".
        "arith.minsi": _for_bits(torch.minimum, torch.bitwise_or),
        "arith.maxsi": _for_bits(torch.maximum, torch.bitwise_and),
        "arith.minui": _smaller,
        "arith.maxui": _larger,
        "tt.mulhiui": high_bits,
        "math.absi": torch.abs,
        "math.ctpop": _count_bits,
        "math.ctlz": _leading_zeros,
        "math.cttz": _trailing_zeros,
    }
)

into_operands({"arith.addi": torch.add, "arith.subi": torch.sub, "arith.muli": torch.mul})


@operation("arith.mului_extended", "arith.mulsi_extended")
def extended_product(op: Operation) -> Compute:
    """The lower and the upper half of a product."""
    high = high_bits if op.name == "arith.mului_extended" else signed_high_bits
    return lambda programs, a, b: [a * b, high(a, b)]


@operation("arith.addui_extended")
def extended_sum(op: Operation) -> Compute:
    """A sum without sign, and whether it wrapped."""

    def compute(programs: Any, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        total = a + b
        return [total, ordered(total) < ordered(a)]

    return compute


@operation("arith.subui_extended")
def extended_difference(op: Operation) -> Compute:
    """A difference without sign, and whether it wrapped."""
    return lambda programs, a, b: [a - b, ordered(a) < ordered(b)]


COMPARISONS: dict[str, Function] = {
    "eq": torch.eq,
    "ne": _for_bits(torch.ne, _one_of_both),
    "slt": torch.lt,
    "sle": torch.le,
    "sgt": torch.gt,
    "sge": torch.ge,
    "ult": lambda a, b: ordered(a) < ordered(b),
    "ule": lambda a, b: ordered(a) <= ordered(b),
    "ugt": lambda a, b: ordered(a) > ordered(b),
    "uge": lambda a, b: ordered(a) >= ordered(b),
}


@operation("arith.cmpi")
def compare_integers(op: Operation) -> Compute:
    """Compare integers, or addresses."""
    function = COMPARISONS[op.keyword]
    return lambda programs, a, b: function(a, b)
