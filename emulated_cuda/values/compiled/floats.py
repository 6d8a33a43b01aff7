"""Arithmetic on floating-point numbers (dialects ``arith`` and ``math``).

Numbers of 16 and 8 bits are computed in single precision and rounded after each operation. On a
card the compiler may fuse a product and a sum, and approximates some functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda.values.compiled.operations import HALF, Operation
from emulated_cuda.values.compiled.table import Compute, in_single_precision, operation


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * b + c``; that of single precision is rounded once."""
    if a.dtype is torch.float32:
        return (a.double() * b.double() + c.double()).float()
    return a * b + c


def _odd_root(value: torch.Tensor) -> torch.Tensor:
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
        # Rounded to the nearest: torch's own in single precision is not, with MKL.
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
def clamp(one: Operation) -> Compute:
    """A number between two others; NaN stays NaN if the operation says so, else it is ignored."""
    ignores_nan = "none" in one.text

    def compute(
        programs: Any, value: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        if ignores_nan:
            return torch.fmin(torch.fmax(value, low), high)
        return torch.minimum(torch.maximum(value, low), high)

    return compute


@operation("math.sincos")
def sine_and_cosine(one: Operation) -> Compute:
    """Both of an angle."""
    return lambda programs, value: [torch.sin(value), torch.cos(value)]


@operation("math.fpowi")
def power_of_integer(one: Operation) -> Compute:
    """A number to the power of an integer."""
    return lambda programs, base, power: torch.pow(base, power.to(base.dtype))


@operation("math.ipowi")
def integer_power(one: Operation) -> Compute:
    """An integer to the power of one that is not negative."""
    return lambda programs, base, power: torch.pow(base, power.clamp_min(0))


@operation("math.isnan", "math.isinf", "math.isfinite", "math.isnormal")
def classify(one: Operation) -> Compute:
    """Whether a number is of a kind."""
    if one.name == "math.isnormal":
        return lambda programs, a: a.isfinite() & (a.abs() >= torch.finfo(a.dtype).tiny)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, one.name[5:])
    return lambda programs, a: function(a)


# ---- Comparisons ----

_COMPARISONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "eq": torch.eq,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


@operation("arith.cmpf")
def compare(one: Operation) -> Compute:
    """Compare; ``o..`` is false and ``u..`` true if one of the numbers is NaN."""
    how = one.keyword

    def compute(programs: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype in HALF:
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
