"""Compares operations on many elements, which are computed in other ways than those on few."""

import pytest
import torch
from ttir import function, launch, loaded, stored

from emulated_cuda.triton import numbers as integers
from emulated_cuda.triton.programs import chosen
from emulated_cuda.triton.ttir import KernelError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shapes", [((64, 100),) * 3, ((64, 1), (64, 100), (1, 100)), ((1,), (1,), (6400,))]
)
def test_choice_has_the_bits_of_one_of_two_tensors(dtype, shapes):
    """A choice between many elements has the bits that ``torch.where`` gives, NaN included."""
    generator = torch.Generator().manual_seed(0)
    bits = BITS[dtype.itemsize]
    mask, *numbers = [torch.randint(0, 2, shape, generator=generator) for shape in shapes]
    if dtype is not torch.bool:
        numbers = [
            torch.randint(-(2**63), 2**63 - 1, shape, generator=generator) for shape in shapes[1:]
        ]
    first, second = (
        value.to(torch.bool if dtype is torch.bool else bits).view(dtype) for value in numbers
    )
    found = chosen(mask.bool(), first, second)
    assert found.dtype is dtype
    assert torch.equal(
        found.view(bits), torch.where(mask.bool(), first.view(bits), second.view(bits))
    )


ROWS = ((32, 8), (32, 1), (1, 8), (1, 1))


@pytest.mark.parametrize("left", ROWS)
@pytest.mark.parametrize("right", ROWS)
def test_upper_half_of_a_product_of_32_bits_is_exact(left, right):
    """Each product of numbers without sign is that of Python's integers, also with one factor."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
        for shape in (left, right)
    )
    a, b = a.expand(-1, 8), b.expand(-1, 8)
    found = integers.high_bits(a, b)
    a, b = torch.broadcast_tensors(a, b)
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    expected = [(x % 2**32) * (y % 2**32) >> 32 for x, y in pairs]
    assert [x % 2**32 for x in found.flatten().tolist()] == expected


def test_rows_of_many_programs_are_rearranged_in_their_order():
    """A hundred programs view their row as a cube, reverse an axis in pairs, and store it again."""
    x = torch.arange(6400, dtype=torch.int32).view(100, 64)
    line, cube = "tensor<64xi32>", "tensor<2x2x2x2x2x2xi32>"
    pointers = "tensor<64x!tt.ptr<i32>>"
    body = f"""
    %id = tt.get_program_id x : i32
    %size = arith.constant 64 : i32
    %start = arith.muli %id, %size : i32
    %starts = tt.splat %start : i32 -> {line}
    %range = tt.make_range {{end = 64 : i32, start = 0 : i32}} : {line}
    %at = arith.addi %starts, %range : {line}
    %xs = tt.splat %x : !tt.ptr<i32> -> {pointers}
    %from = tt.addptr %xs, %at : {pointers}, {line}
    %a = tt.load %from : {pointers}
    %b = tt.reshape %a : {line} -> {cube}
    %c = "tt.reduce"(%b) <{{axis = 5 : i32}}> ({{
    ^bb0(%u: i32, %v: i32):
      %w = arith.xori %u, %v : i32
      tt.reduce.return %w : i32
    }}) : ({cube}) -> tensor<2x2x2x2x2xi32>
    %d = tt.expand_dims %c {{axis = 5 : i32}} : tensor<2x2x2x2x2xi32> -> tensor<2x2x2x2x2x1xi32>
    %e = tt.broadcast %d : tensor<2x2x2x2x2x1xi32> -> {cube}
    %f = arith.xori %e, %b : {cube}
    %g = tt.reshape %f : {cube} -> {line}
    %outs = tt.splat %out : !tt.ptr<i32> -> {pointers}
    %to = tt.addptr %outs, %at : {pointers}, {line}
    tt.store %to, %g : {pointers}
    """
    out = torch.zeros(100, 64, dtype=torch.int32).cuda()
    launch(function("%x: !tt.ptr<i32>, %out: !tt.ptr<i32>", body), [x.cuda(), out], (100, 1, 1))
    assert torch.equal(out.cpu(), x.view(100, 32, 2).flip(2).view(100, 64))


@pytest.mark.parametrize("name", ["maxnumf", "minnumf", "maximumf", "minimumf"])
@pytest.mark.parametrize("has_nan", [False, True])
def test_largest_number_ignores_nan_if_the_operation_does(name, has_nan):
    """``maxnumf`` and ``minnumf`` ignore NaN, the others pass it on."""
    x = torch.tensor([3.0, -2.0, float("nan") if has_nan else 0.0, 1.0])
    body = f"""
    {loaded("x", (4,), "f32")}
    %m = "tt.reduce"(%x) <{{axis = 0 : i32}}> ({{
    ^bb0(%u: f32, %v: f32):
      %w = arith.{name} %u, %v : f32
      tt.reduce.return %w : f32
    }}) : (tensor<4xf32>) -> f32
    %y = tt.splat %m : f32 -> tensor<1xf32>
    {stored("%y", "out", (1,), "f32")}
    """
    out = torch.zeros(1).cuda()
    launch(function("%p_x: !tt.ptr<f32>, %p_out: !tt.ptr<f32>", body), [x.cuda(), out])
    if has_nan and name in ("maximumf", "minimumf"):
        assert out.isnan().all()
    else:
        assert out.item() == (3.0 if name.startswith("max") else -2.0)


def test_launch_leaves_the_number_of_threads_as_it_was():
    """A launch runs on one thread, also if it fails; afterwards torch has as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        body = "%c = tt.load %x : !tt.ptr<f32>"
        launch(function("%x: !tt.ptr<f32>", body), [torch.zeros(1).cuda()])
        with pytest.raises(KernelError):
            launch(function("%x: !tt.ptr<f32>", body), [0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
