"""Matrix products, reductions and scans with any function.

Sums of products are added in single precision, also where a card rounds inputs to tf32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from emulated_cuda.triton.programs import Code, Environment, Programs, prepare, same_length
from emulated_cuda.triton.progressions import as_tensor
from emulated_cuda.triton.ttir import CONTROL, Compute, NotComputed, Operation, control, operation

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits without their sign (OCP Microscaling Formats, 5.3.3)."""
_BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b + c`` in the type of `c`; integers are exact."""
    if not a.dtype.is_floating_point:
        # Products of 8 bits in double precision are exact.
        return torch.matmul(a.double(), b.double()).add_(c.double()).to(c.dtype)
    # A card adds products of any narrower type in single precision.
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    wide_product = torch.matmul(a.to(wide), b.to(wide))
    return wide_product.add_(c.to(wide)).to(c.dtype)


@operation("tt.dot")
def dot(op: Operation) -> Compute:
    """``a @ b + c`` of matrices, or of batches of them."""
    return lambda programs, a, b, c: product(a, b, c)


@operation("tt.dot_scaled")
def scaled_dot(op: Operation) -> Compute:
    """``a @ b + c`` of numbers in groups of 32 or 16 with a scale each."""
    forms = re.search(r"lhs = (\w+) rhs = (\w+)", op.text)
    operands = re.match(
        r"(%[\w$.#-]+)(?: scale (%[\w$.#-]+))?, (%[\w$.#-]+)(?: scale (%[\w$.#-]+))?", op.text
    )
    if forms is None or operands is None:
        raise NotComputed(f"cannot compute the matrix product {op.text}")
    has_left, has_right = operands[2] is not None, operands[4] is not None
    packs_rows = "lhs_k_pack = false" in op.attributes, "rhs_k_pack = false" in op.attributes
    left_form, right_form = forms[1], forms[2]

    def compute(programs: Programs, *operands: Any) -> torch.Tensor:
        rest = list(operands)
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
    bits = value.long() & 255  # an int8 may be negative
    pair = torch.stack((bits & 15, bits >> 4), -1)  # the lower half of a byte comes first
    sizes = torch.tensor(_FP4)[pair & 7]
    numbers = torch.where(pair > 7, -sizes, sizes)
    axis = axis % value.dim()
    return numbers.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _scales(scale: torch.Tensor, length: int) -> torch.Tensor:
    """Return the scale of each element along the last axis: powers of 2, or float8."""
    if scale.dtype.is_floating_point:
        factor = scale.float()
    else:
        exponent = scale.long() & 255  # E8M0: 255 is NaN (OCP Microscaling Formats, 5.4.1)
        factor = torch.where(
            exponent == 255, torch.nan, torch.exp2(exponent.double() - 127).float()
        )
    return factor.repeat_interleave(length // scale.shape[-1], -1)


Values = list[torch.Tensor]
Combine = Callable[[Programs, Environment, Values, Values], Values]


def _maximum_of_numbers(a: torch.Tensor, axis: int) -> torch.Tensor:
    extremes = a.amax(axis)
    if not extremes.isnan().any():  # amax gives NaN if any element is NaN; here NaN is ignored
        return extremes
    extremes = torch.where(a.isnan(), -torch.inf, a).amax(axis)
    return torch.where(a.isnan().all(axis), torch.nan, extremes)


def _minimum_of_numbers(a: torch.Tensor, axis: int) -> torch.Tensor:
    extremes = a.amin(axis)
    if not extremes.isnan().any():  # as above
        return extremes
    extremes = torch.where(a.isnan(), torch.inf, a).amin(axis)
    return torch.where(a.isnan().all(axis), torch.nan, extremes)


_REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "arith.addf": lambda a, axis: a.sum(axis, dtype=a.dtype),
    "arith.addi": lambda a, axis: a.sum(axis, dtype=a.dtype),
    "arith.mulf": lambda a, axis: a.prod(axis, dtype=a.dtype),
    "arith.muli": lambda a, axis: a.prod(axis, dtype=a.dtype),
    "arith.maxsi": lambda a, axis: a.amax(axis),
    "arith.minsi": lambda a, axis: a.amin(axis),
    "arith.maximumf": lambda a, axis: a.amax(axis),
    "arith.minimumf": lambda a, axis: a.amin(axis),
    "arith.maxnumf": _maximum_of_numbers,
    "arith.minnumf": _minimum_of_numbers,
}
"""Functions that torch can apply along an axis at once; sums are added in torch's order."""

_SCANS: dict[str, Callable[..., torch.Tensor]] = {
    "arith.addf": torch.cumsum,
    "arith.addi": torch.cumsum,
    "arith.mulf": torch.cumprod,
    "arith.muli": torch.cumprod,
}
"""The same for scans; in half precision torch rounds each result once."""


@control("tt.reduce")
def reduce(op: Operation) -> Compute:
    """Combine all elements along an axis."""
    axis = 1 + op.integer("axis")
    usual = _REDUCTIONS.get(_only_operation(op))
    combine = _combination(op)

    def compute(programs: Programs, values: Environment) -> Values:
        operands = [as_tensor(values[name]) for name in op.operands]
        # Booleans are left out: a card adds single bits modulo 2, and torch does not.
        if usual is not None and operands[0].dtype is not torch.bool:
            return [usual(operands[0], axis)]
        operands = same_length(*operands)
        while (length := operands[0].shape[axis]) > 1:
            # A length is a power of 2, so it can be halved. A card combines other pairs. The result
            # is the same if the function is associative; one that returns the position of a maximum
            # must also compare positions, because equal elements meet in another order.
            half = length // 2
            left = [value.narrow(axis, 0, half) for value in operands]
            right = [value.narrow(axis, half, half) for value in operands]
            operands = combine(programs, values, left, right)
        return [value.squeeze(axis) for value in operands]

    return compute


@control("tt.scan")
def scan(op: Operation) -> Compute:
    """Combine each element with all before it along an axis, or with all behind it."""
    axis, is_reversed = 1 + op.integer("axis"), op.is_set("reverse")
    usual = _SCANS.get(_only_operation(op))
    combine = _combination(op)

    def scanned(programs: Programs, values: Environment, operands: Values) -> Values:
        if usual is not None and operands[0].dtype is not torch.bool:
            return [usual(operands[0], axis, dtype=operands[0].dtype)]
        length, distance = operands[0].shape[axis], 1
        # Each round doubles how many elements a position has combined (Hillis and Steele, 1986), so
        # that a few operations on whole tensors replace a loop over the elements.
        while distance < length:
            left = [value.narrow(axis, 0, length - distance) for value in operands]
            right = [value.narrow(axis, distance, length - distance) for value in operands]
            combined = combine(programs, values, left, right)
            # The first elements have nothing before them. What a function returns may be one value
            # for all elements, if it is a constant.
            operands = [
                torch.cat([value.narrow(axis, 0, distance), new.expand(old.shape)], axis)
                for value, new, old in zip(operands, combined, right, strict=True)
            ]
            distance *= 2
        return operands

    def compute(programs: Programs, values: Environment) -> Values:
        operands = same_length(*[as_tensor(values[name]) for name in op.operands])
        if not is_reversed:
            return scanned(programs, values, operands)
        backwards = scanned(programs, values, [value.flip(axis) for value in operands])
        return [value.flip(axis) for value in backwards]

    return compute


@control("tt.map_elementwise")
def map_elements(op: Operation) -> Compute:
    """Apply a function, which may branch, to each element or to each few consecutive ones."""
    (code,) = prepare(op.regions[0])
    pack = op.integer("pack")

    def compute(programs: Programs, values: Environment) -> Values:
        operands = same_length(*[as_tensor(values[name]) for name in op.operands])
        shape = operands[0].shape
        flat = [part for value in operands for part in value.reshape(-1, pack).unbind(1)]
        results = _on_elements(programs, code, values, flat)
        groups = [results[start : start + pack] for start in range(0, len(results), pack)]
        return [torch.stack(group, 1).reshape(shape) for group in groups]

    return compute


# ---- The functions ----


def _only_operation(op: Operation) -> str:
    """Return the name of the only operation of a function of two values; empty if it has others."""
    blocks = op.regions[0]
    if len(blocks) > 1 or len(blocks[0].operations) != 2 or len(op.operands) > 1:
        return ""
    operation = blocks[0].operations[0]
    # In any order: what torch can apply along an axis gives the same for (a, b) and (b, a).
    is_plain = set(operation.operands) == set(blocks[0].arguments)
    return operation.name if is_plain else ""


def _combination(op: Operation) -> Combine:
    """Return the function that combines two elements, on all pairs at once."""
    blocks = op.regions[0]
    (code,) = prepare(blocks)
    names = {operation.name for operation in blocks[0].operations}
    # The function takes single numbers. Without branches it computes tensors just as well. A branch
    # may go another way for each element, so there each element is run as a program of its own.
    by_element = bool(names & {*CONTROL, "tt.call"})

    def at_once(programs: Programs, outer: Environment, left: Values, right: Values) -> Values:
        values = _constants(outer)
        values.update(zip(code.arguments, [*left, *right], strict=True))
        return programs.values_passed(programs.run(code, values), values)

    def one_by_one(programs: Programs, outer: Environment, left: Values, right: Values) -> Values:
        shape = left[0].shape
        flat = [value.reshape(-1) for value in (*left, *right)]
        return [combined.view(shape) for combined in _on_elements(programs, code, outer, flat)]

    return one_by_one if by_element else at_once


def _constants(outer: Environment) -> Environment:
    """Return the numbers around a function that are the same for all programs.

    Others are left out: where each element is a program, a value for each program has no meaning.
    """
    return {
        name: value
        for name, value in outer.items()
        if isinstance(value, torch.Tensor) and value.shape == (1,)
    }


def _on_elements(programs: Programs, code: Code, outer: Environment, flat: Values) -> Values:
    """Run a function of single numbers as if each element were a program."""
    values = _constants(outer)
    values.update(zip(code.arguments, flat, strict=True))
    inner = programs.inner(len(flat[0]))
    results = inner.values_passed(inner.run(code, values), values)
    return [value.expand(len(flat[0])) for value in results]
