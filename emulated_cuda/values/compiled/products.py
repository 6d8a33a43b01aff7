"""Matrix products. Sums are added in single precision, also where a card rounds inputs to tf32."""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.values.compiled.errors import NotComputed
from emulated_cuda.values.compiled.operations import Operation
from emulated_cuda.values.compiled.programs import Programs
from emulated_cuda.values.compiled.table import Compute, operation

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits without their sign (OCP Microscaling Formats, 5.3.3)."""
_BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b + c`` in the type of `c`; integers are exact."""
    if not a.dtype.is_floating_point:
        # Products of 8 bits in double precision are exact.
        return torch.matmul(a.double(), b.double()).add_(c.double()).to(c.dtype)
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    found = torch.matmul(a.to(wide), b.to(wide))
    return found.add_(c.to(wide)).to(c.dtype)


@operation("tt.dot")
def dot(one: Operation) -> Compute:
    """``a @ b + c`` of matrices, or of batches of them."""
    return lambda programs, a, b, c: product(a, b, c)


@operation("tt.dot_scaled")
def scaled_dot(one: Operation) -> Compute:
    """``a @ b + c`` of numbers in groups of 32 or 16 with a scale each."""
    forms = re.search(r"lhs = (\w+) rhs = (\w+)", one.text)
    operands = re.match(
        r"(%[\w$.#-]+)(?: scale (%[\w$.#-]+))?, (%[\w$.#-]+)(?: scale (%[\w$.#-]+))?", one.text
    )
    if forms is None or operands is None:
        raise NotComputed(f"the product {one.text}")
    has_left, has_right = operands[2] is not None, operands[4] is not None
    packs_rows = "lhs_k_pack = false" in one.attributes, "rhs_k_pack = false" in one.attributes
    left_form, right_form = forms[1], forms[2]

    def compute(programs: Programs, *given: Any) -> torch.Tensor:
        rest = list(given)
        a = rest.pop(0)
        left_scale = rest.pop(0) if has_left else None
        b = rest.pop(0)
        right_scale = rest.pop(0) if has_right else None
        c = rest.pop(0)
        a = _unpacked(a, left_form, -2 if packs_rows[0] else -1)
        b = _unpacked(b, right_form, -1 if packs_rows[1] else -2)
        if left_scale is not None:
            a = a * _scales(left_scale, a.shape[-1])
        if right_scale is not None:
            b = b * _scales(right_scale, b.shape[-2]).transpose(-1, -2)
        return product(a, b, c)

    return compute


def _unpacked(value: torch.Tensor, form: str, axis: int) -> torch.Tensor:
    """Return numbers in single precision; those of four bits are two in a byte along an axis."""
    if form in _BYTES and not value.dtype.is_floating_point:
        value = value.view(_BYTES[form])
    if form != "e2m1":
        return value.float()
    bits = value.long() & 255
    pair = torch.stack((bits & 15, bits >> 4), -1)
    sizes = torch.tensor(_FP4)[pair & 7]
    numbers = torch.where(pair > 7, -sizes, sizes)
    axis = axis % value.dim()
    return numbers.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _scales(scale: torch.Tensor, length: int) -> torch.Tensor:
    """Return the scale of each element along the last axis: powers of 2, or float8."""
    if scale.dtype.is_floating_point:
        factor = scale.float()
    else:
        exponent = scale.long() & 255
        factor = torch.where(
            exponent == 255, torch.nan, torch.exp2(exponent.double() - 127).float()
        )
    return factor.repeat_interleave(length // scale.shape[-1], -1)
