"""Functions of CUDA's libdevice by name, as ``triton.language.extra.libdevice`` calls them.

Source: libdevice user's guide, https://docs.nvidia.com/cuda/libdevice-users-guide/. Results are
those of torch or correctly rounded; the library's own differ by a few units in the last place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda.triton.numbers import fused, high_bits, signed_high_bits, unsigned
from emulated_cuda.triton.ttir import OPERATIONS, Compute, NotComputed, Operation, Type, operation

Function = Callable[..., torch.Tensor]


def _in_double(function: Function) -> Function:
    """Return a function of single precision that is computed in double precision."""

    def compute(*values: torch.Tensor) -> torch.Tensor:
        return function(*[v.double() for v in values]).to(values[0].dtype)

    return compute


def _row(name: str) -> Function:
    """Return what computes an operation of the table that has no attributes."""
    compute = OPERATIONS[name](Operation(name, [], []))
    return lambda *values: compute(None, *values)


def _norm(*values: torch.Tensor) -> torch.Tensor:
    return (
        torch.stack(torch.broadcast_tensors(*values)).double().square().sum(0).sqrt().to(values[0])
    )


def _reciprocal(function: Function) -> Function:
    return lambda *values: 1 / function(*values)


def _log_binary(value: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(value)[1] - 1
    exponent = torch.where(value == 0, -(2**31), exponent)
    return torch.where(value.isfinite(), exponent, torch.where(value.isnan(), -(2**31), 2**31 - 1))


def _bessel(first: Function, second: Function) -> Function:
    """Return a Bessel function of an integer order, by its recurrence (DLMF 10.6.1)."""

    def compute(order: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        order, value = torch.broadcast_tensors(order, value.double())
        below, current = first(value), second(value)
        result = torch.where(order == 0, below, current)
        for n in range(1, int(order.max()) if order.numel() else 0):
            below, current = current, 2 * n / value * current - below
            result = torch.where(order == n + 1, current, result)
        return result

    return compute


def _bit_view(dtype: torch.dtype) -> Function:
    return lambda value: value.contiguous().view(dtype)


def _reversed_bits(value: torch.Tensor) -> torch.Tensor:
    size, reversed_bits = 8 * value.element_size(), torch.zeros_like(value)
    for at in range(size):
        reversed_bits |= ((value >> at) & 1) << (size - 1 - at)
    return reversed_bits


def _permuted_bytes(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both, selected = unsigned(a) | (unsigned(b) << 32), torch.zeros_like(unsigned(a))
    for at in range(4):
        which = (unsigned(selector) >> (4 * at)) & 7
        selected |= ((both >> (8 * which)) & 255) << (8 * at)
    return selected.to(torch.int32)


def _first_set(value: torch.Tensor) -> torch.Tensor:
    trailing = _row("math.cttz")(value)
    return torch.where(value == 0, 0, trailing + 1).int()


def _low_24(value: torch.Tensor) -> torch.Tensor:
    return (value << 8) >> 8


def _wide(function: Function) -> Function:
    return lambda *values: function(*[v.long() for v in values]).int()


def _wide_unsigned(function: Function) -> Function:
    return lambda *values: function(*[unsigned(v) for v in values]).int()


_ROUND = _row("math.round")
_FUNCTIONS: dict[str, Function] = {
    "abs": torch.abs,
    "llabs": torch.abs,
    "fabs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "brev": _reversed_bits,
    "brevll": _reversed_bits,
    "byte_perm": _permuted_bytes,
    "cbrt": _row("math.cbrt"),
    "ceil": torch.ceil,
    "clz": _row("math.ctlz"),
    "clzll": _row("math.ctlz"),
    "copysign": torch.copysign,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "cospi": _in_double(lambda a: torch.cos(torch.fmod(a, 2) * math.pi)),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "double2hiint": lambda a: (_bit_view(torch.int64)(a) >> 32).int(),
    "double2loint": lambda a: _bit_view(torch.int64)(a).int(),
    "double_as_longlong": _bit_view(torch.int64),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcinv": _in_double(lambda a: torch.erfinv(1 - a)),
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp10": _in_double(lambda a: torch.pow(10.0, a)),
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fdim": lambda a, b: torch.where(a.isnan() | b.isnan(), torch.nan, (a - b).clamp_min(0)),
    "ffs": _first_set,
    "ffsll": _first_set,
    "finite": torch.isfinite,
    "isfinite": torch.isfinite,
    "float_as_int": _bit_view(torch.int32),
    "float_as_uint": _bit_view(torch.int32),
    "floor": torch.floor,
    "fma": fused,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "fmod": torch.fmod,
    "frsqrt_rn": torch.rsqrt,
    "hadd": _wide(lambda a, b: (a + b) >> 1),
    "hiloint2double": lambda high, low: _bit_view(torch.float64)(
        (high.long() << 32) | unsigned(low)
    ),
    "hypot": torch.hypot,
    "ilogb": _log_binary,
    "int_as_float": _bit_view(torch.float32),
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "jn": _bessel(torch.special.bessel_j0, torch.special.bessel_j1),
    "ldexp": lambda a, b: torch.ldexp(a.double(), b),
    "lgamma": torch.lgamma,
    "llrint": torch.round,
    "llround": _ROUND,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logb": lambda a: _log_binary(a).to(a.dtype),
    "longlong_as_double": _bit_view(torch.float64),
    "mul24": lambda a, b: _low_24(a) * _low_24(b),
    "mul64hi": signed_high_bits,
    "mulhi": signed_high_bits,
    "nearbyint": torch.round,
    "nextafter": torch.nextafter,
    "norm3d": _norm,
    "norm4d": _norm,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "popc": _row("math.ctpop"),
    "popcll": lambda a: _row("math.ctpop")(a).int(),
    "pow": torch.pow,
    "powi": torch.pow,
    "rcbrt": _reciprocal(_row("math.cbrt")),
    "rcp64h": torch.reciprocal,
    "remainder": _in_double(lambda a, b: a - b * torch.round(a / b)),
    "rhadd": _wide(lambda a, b: (a + b + 1) >> 1),
    "rhypot": _reciprocal(torch.hypot),
    "rint": torch.round,
    "rnorm3d": _reciprocal(_norm),
    "rnorm4d": _reciprocal(_norm),
    "round": _ROUND,
    "rsqrt": torch.rsqrt,
    "sad": _wide(lambda a, b, c: (a - b).abs() + c),
    "saturate": lambda a: torch.nan_to_num(a, nan=0.0).clamp(0, 1),
    "scalbn": lambda a, b: torch.ldexp(a.double(), b),
    "signbit": torch.signbit,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sinpi": _in_double(lambda a: torch.sin(torch.fmod(a, 2) * math.pi)),
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "tgamma": lambda a: torch.where(
        (a < 0) & (torch.floor(a) % 2 != 0), -torch.lgamma(a).exp(), torch.lgamma(a).exp()
    ),
    "trunc": torch.trunc,
    "uhadd": _wide_unsigned(lambda a, b: (a + b) >> 1),
    "uint_as_float": _bit_view(torch.float32),
    "umul24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "umul64hi": high_bits,
    "umulhi": high_bits,
    "urhadd": _wide_unsigned(lambda a, b: (a + b + 1) >> 1),
    "usad": _wide_unsigned(lambda a, b, c: (a - b).abs() + c),
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
    "yn": _bessel(torch.special.bessel_y0, torch.special.bessel_y1),
    "fast_fdivide": torch.div,
}
_ARITHMETIC: dict[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "rcp": torch.reciprocal,
    "sqrt": torch.sqrt,
    "ma": lambda a, b, c: a * b + c,
}
_INTEGERS = {
    "int": (torch.int32, True),
    "uint": (torch.int32, False),
    "ll": (torch.int64, True),
    "ull": (torch.int64, False),
}
_FLOATS = {"float": torch.float32, "double": torch.float64}
_TO_WHOLE: dict[str, Function] = {
    "rn": torch.round,
    "rz": torch.trunc,
    "rd": torch.floor,
    "ru": torch.ceil,
}


def function_of(name: str) -> Function:
    """Return what computes a function of libdevice, without the conversion to its result's type.

    Args:
        name: without ``__nv_``.

    Raises:
        NotComputed: if it is not known.
    """
    for candidate in (name, name[:-1] if name[-1:] in "fd" else name):
        if candidate in _FUNCTIONS:
            return _FUNCTIONS[candidate]
        if candidate.startswith("fast_") and candidate[5:] in _FUNCTIONS:
            return _FUNCTIONS[candidate[5:]]
    arithmetic = re.fullmatch(r"(d|f)(add|sub|mul|div|rcp|sqrt|ma)f?_(r[nzdu])", name)
    if arithmetic is not None:
        return _directed(_ARITHMETIC[arithmetic[2]], arithmetic[3], name)
    conversion = re.fullmatch(
        r"(float|double|u?int|u?ll)2(float|double|u?int|u?ll)_(r[nzdu])", name
    )
    if conversion is not None:
        return _conversion(*conversion.groups())
    raise NotComputed(f"cannot compute libdevice's function {name}")


def _directed(function: Function, rounding: str, name: str) -> Function:
    """Return a function of single precision that rounds in one direction."""
    if rounding == "rn":
        return function
    if name.startswith("d"):
        raise NotComputed(
            f"cannot compute libdevice's function {name}; in double precision only functions that "
            "round to nearest are computed"
        )
    return lambda *values: _round_to_float(function(*[v.double() for v in values]), rounding)


def _round_to_float(exact: torch.Tensor, rounding: str) -> torch.Tensor:
    nearest = exact.float()
    if rounding == "rn":
        return nearest
    above, below = torch.full_like(nearest, torch.inf), torch.full_like(nearest, -torch.inf)
    down = torch.where(nearest.double() > exact, torch.nextafter(nearest, below), nearest)
    up = torch.where(nearest.double() < exact, torch.nextafter(nearest, above), nearest)
    return {"rd": down, "ru": up, "rz": torch.where(exact > 0, down, up)}[rounding]


def _conversion(source: str, target: str, rounding: str) -> Function:
    if target in _INTEGERS:
        dtype, has_sign = _INTEGERS[target]
        kind = "arith.fptosi" if has_sign else "arith.fptoui"
        element = "i64" if dtype is torch.int64 else "i32"
        row = OPERATIONS[kind](Operation(kind, [], [], result_types=[Type(element)]))
        return lambda value: row(None, _TO_WHOLE[rounding](value))
    has_sign = source in _FLOATS or _INTEGERS[source][1]

    def convert(value: torch.Tensor) -> torch.Tensor:
        exact = value.double() if has_sign else unsigned(value).double()
        if not has_sign and value.dtype is torch.int64:
            exact = exact + (value < 0) * 2.0**64
        return _round_to_float(exact, rounding) if target == "float" else exact

    return convert


@operation("tt.extern_elementwise")
def external(op: Operation) -> Compute:
    """A function of a library by its symbol."""
    symbol = op.string("symbol")
    if not symbol.startswith("__nv_"):
        raise NotComputed(
            f"cannot compute {symbol}, a function of an external library that the kernel calls"
        )
    function, dtype = function_of(symbol[len("__nv_") :]), op.type().dtype

    def compute(programs: Any, *values: torch.Tensor) -> torch.Tensor:
        return function(*values).to(dtype)

    return compute
