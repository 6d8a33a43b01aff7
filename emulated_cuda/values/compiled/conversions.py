"""Conversions between types, and choices between values."""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.values.compiled.choices import chosen
from emulated_cuda.values.compiled.errors import NotComputed
from emulated_cuda.values.compiled.integers import unsigned
from emulated_cuda.values.compiled.operations import Operation
from emulated_cuda.values.compiled.programs import choose
from emulated_cuda.values.compiled.table import Compute, operation, rounded

_ROUNDINGS = ("", "rtne")


@operation("arith.extf", "arith.truncf", "arith.convertf", "tt.fp_to_fp")
def between_floats(one: Operation) -> Compute:
    """A floating-point number in another type, rounded to the nearest or towards zero."""
    dtype = one.type().dtype
    mode = re.search(r"rounding = (\w+)", one.text + one.attributes)
    if mode is not None and mode[1] not in _ROUNDINGS:
        if mode[1] != "rtz":
            raise NotComputed(f"rounding by {mode[1]}")
        return lambda programs, value: _towards_zero(value, dtype)
    return lambda programs, value: rounded(value, dtype)


def _towards_zero(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    nearest = rounded(value, dtype)
    is_larger = nearest.float().abs() > value.float().abs()
    bits = {1: torch.uint8, 2: torch.int16}[nearest.element_size()]
    below = (nearest.view(bits) - 1).view(dtype)  # the next number of smaller size
    found = torch.where(is_larger, below.view(bits), nearest.view(bits))
    return found.view(dtype)


@operation("arith.sitofp", "arith.uitofp")
def integer_to_float(one: Operation) -> Compute:
    """An integer as a floating-point number."""
    dtype, has_sign = one.type().dtype, one.name == "arith.sitofp"

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is torch.bool:
            return -value.to(dtype) if has_sign else value.to(dtype)
        if has_sign:
            return rounded(value.to(torch.float32) if dtype.itemsize == 1 else value, dtype)
        if value.dtype is torch.int64:
            return (value.double() + (value < 0) * 2.0**64).to(dtype)
        return rounded(unsigned(value).double(), dtype)

    return compute


@operation("arith.fptosi", "arith.fptoui")
def float_to_integer(one: Operation) -> Compute:
    """A floating-point number without its fraction; the nearest integer if it is too large."""
    dtype, has_sign = one.type().dtype, one.name == "arith.fptosi"
    if dtype is torch.bool:
        return lambda programs, value: value.float() != 0
    size = torch.iinfo(dtype).bits
    low, high = (-(2.0 ** (size - 1)), 2.0 ** (size - 1)) if has_sign else (0.0, 2.0**size)

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        number = torch.nan_to_num(value.double(), nan=0.0, posinf=high, neginf=low)
        number = number.trunc().clamp(low, high)
        if size < 64:
            number = number.clamp(max=high - 1)
            return number.long().to(dtype)
        is_large = number >= 2.0**63
        small = torch.where(is_large, 0.0, number).long()
        if has_sign:
            return torch.where(is_large, 2**63 - 1, small)
        return torch.where(is_large, (number - 2.0**64).clamp(max=-1.0).long(), small)

    return compute


@operation("arith.extsi", "arith.trunci", "arith.index_cast")
def between_integers(one: Operation) -> Compute:
    """An integer in another size; a longer one has the sign of the shorter."""
    dtype = one.type().dtype

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if dtype is torch.bool:
            return (value & 1).bool()
        return -value.to(dtype) if value.dtype is torch.bool else value.to(dtype)

    return compute


@operation("arith.extui", "arith.index_castui")
def longer_without_sign(one: Operation) -> Compute:
    """An integer without sign in a larger size."""
    dtype = one.type().dtype
    return lambda programs, value: unsigned(value).to(dtype)


@operation("arith.bitcast", "tt.bitcast", "tt.int_to_ptr", "tt.ptr_to_int")
def same_bits(one: Operation) -> Compute:
    """The same bits in another type."""
    dtype = one.type().dtype

    def compute(programs: Any, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is dtype:
            return value
        if torch.bool in (value.dtype, dtype):
            return value.to(dtype)
        return value.view(dtype)  # of the same size

    return compute


@operation("arith.select")
def select(one: Operation) -> Compute:
    """One of two values, by a condition for each element or for all."""

    def compute(programs: Any, condition: torch.Tensor, first: Any, second: Any) -> Any:
        if not isinstance(first, torch.Tensor) or condition.dim() < first.dim():
            return choose(condition, first, second)
        if second.dim() < first.dim():  # a constant in code that runs on elements at once
            second = second.view(-1, *[1] * (first.dim() - 1))
        return chosen(condition, first, second)

    return compute
