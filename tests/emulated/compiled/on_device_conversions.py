"""Compares conversions between types with Python's own numbers."""

import math

import pytest
import torch
from on_device_arithmetic import SIZES, edges, plain, wrapped
from ttir import apply, elements

from emulated_cuda.triton.ttir import DTYPES


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        (name, source, target)
        for source in SIZES
        for target in SIZES
        for name in ("arith.extsi", "arith.extui", "arith.trunci")
        if (SIZES[source] < SIZES[target]) == (name != "arith.trunci") and source != target
    ],
)
def test_integer_in_another_size(name, source, target):
    """A longer integer has the sign of the shorter one or none, a shorter one its low bits."""
    numbers = edges(SIZES[source])
    size = len(numbers)
    operation = f"{name} %x0 : tensor<{size}x{source}> to tensor<{size}x{target}>"
    found = apply(operation, [(source, elements(source, numbers))], target)
    view = (lambda a: plain(a, SIZES[source])) if name == "arith.extui" else (lambda a: a)
    assert found.tolist() == [wrapped(view(a), SIZES[target]) for a in numbers]


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("name", ["arith.sitofp", "arith.uitofp"])
def test_integer_as_a_floating_point_number(name, source):
    """An integer with or without sign becomes the nearest number in double precision."""
    numbers = edges(SIZES[source])
    size = len(numbers)
    operation = f"{name} %x0 : tensor<{size}x{source}> to tensor<{size}xf64>"
    found = apply(operation, [(source, elements(source, numbers))], "f64")
    view = (lambda a: plain(a, SIZES[source])) if name == "arith.uitofp" else (lambda a: a)
    assert found.tolist() == [float(view(a)) for a in numbers]


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("name", ["arith.fptosi", "arith.fptoui"])
def test_floating_point_number_without_its_fraction(name, target):
    """A fraction is cut off; numbers that are too large become the nearest integer."""
    limit = 2.0 ** SIZES[target]
    numbers = [0.9, -0.9, 1.5, 100.75, -3.0, limit * 4, -limit * 4, math.nan]
    operation = f"{name} %x0 : tensor<8xf64> to tensor<8x{target}>"
    found = apply(operation, [("f64", elements("f64", numbers).double())], target)
    has_sign, size = name == "arith.fptosi", SIZES[target]
    low, high = (-(2 ** (size - 1)), 2 ** (size - 1) - 1) if has_sign else (0, 2**size - 1)
    expected = [0 if math.isnan(a) else min(max(math.trunc(a), low), high) for a in numbers]
    assert [plain(a, size) for a in found.tolist()] == [plain(a, size) for a in expected]


FLOATS = ["f32", "f16", "bf16"]


@pytest.mark.parametrize("target", [*FLOATS, "f8E4M3FN", "f8E5M2"])
def test_floating_point_number_in_another_type_is_rounded_to_the_nearest(target):
    """A number in another type is the nearest; too large ones become the largest of float8."""
    given = torch.cat([torch.linspace(-3, 3, 61), torch.tensor([1e6])]).cuda()
    name = "tt.fp_to_fp" if target.startswith("f8") else "arith.truncf"
    rounding = ", rounding = rtne" if target.startswith("f8") else ""
    operation = f"{name} %x0{rounding} : tensor<62xf32> to tensor<62x{target}>"
    if target.startswith("f8"):
        operation = operation.replace(" to ", " -> ")
    found = apply(operation, [("f32", given)], target).cpu()
    dtype = DTYPES[target]
    expected = given.cpu().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    if target == "f16":
        expected[-1] = math.inf
    assert torch.equal(found.double(), expected.double())


@pytest.mark.parametrize("target", ["f16", "bf16", "f8E5M2"])
def test_rounding_towards_zero_gives_no_larger_number(target):
    """Rounding towards zero gives the next smaller number where the nearest is larger."""
    given = torch.linspace(-3, 3, 64).cuda()
    operation = f"tt.fp_to_fp %x0, rounding = rtz : tensor<64xf32> -> tensor<64x{target}>"
    found = apply(operation, [("f32", given)], target).float()
    nearest = given.to(DTYPES[target]).float()
    assert (found.abs() <= given.abs()).all()
    is_smaller = nearest.abs() <= given.abs()
    assert torch.equal(found[is_smaller], nearest[is_smaller])
    assert (~is_smaller).any()


def test_same_bits_in_another_type():
    """``bitcast`` keeps the bits: those of 1.0 in single precision are 0x3f800000."""
    given = [("f32", elements("f32", [1.0, -2.0]))]
    found = apply("tt.bitcast %x0 : tensor<2xf32> -> tensor<2xi32>", given, "i32")
    assert found.tolist() == [0x3F800000, wrapped(0xC0000000, 32)]


def test_select_takes_one_of_two_values():
    """``select`` takes the first value where the condition is true."""
    kinds = "tensor<3xi1>, tensor<3xi32>"
    given = [
        ("i1", elements("i8", [1, 0, 1])),
        ("i32", elements("i32", [1, 2, 3])),
        ("i32", elements("i32", [4, 5, 6])),
    ]
    found = apply(f"arith.select %x0, %x1, %x2 : {kinds}", given, "i32")
    assert found.tolist() == [1, 5, 3]


def test_types_with_a_sign_are_integers_of_the_same_size():
    """``si8`` and ``ui8``, which code written by hand has, are integers of 8 bits."""
    assert [DTYPES[name] for name in ("si8", "ui8", "si64")] == [
        torch.int8,
        torch.int8,
        torch.int64,
    ]
