"""Compares operations on shapes, reductions, scans and products with torch and plain Python."""

import itertools

import pytest
import torch
from ttir import elements, function, launch, loaded, stored


def run(body, inputs, shape, element="f32"):
    """Run a body on inputs ``{name: (tensor, element)}``; return what it calls ``%found``."""
    out = torch.zeros(shape, dtype=next(iter(inputs.values()))[0].dtype, device="cuda")
    if element == "i32":
        out = out.int()
    arguments = [f"%p_{name}: !tt.ptr<{kind}>" for name, (_, kind) in inputs.items()]
    lines = [loaded(name, tuple(value.shape), kind) for name, (value, kind) in inputs.items()]
    text = function(
        ", ".join([*arguments, f"%p_out: !tt.ptr<{element}>"]),
        "\n".join([*lines, body, stored("%found", "out", shape, element)]),
    )
    launch(text, [*(value for value, _ in inputs.values()), out])
    return out


# ---- Arrangement ----


def test_arranging_operations_have_the_elements_of_torch():
    """Transposed, joined, split, gathered and broadcast tensors have the elements of torch's."""
    x = torch.arange(8.0).view(2, 4).cuda()
    t, b = "tensor<2x4xf32>", "tensor<4x2xf32>"
    found = run(
        f"%found = tt.trans %x {{order = array<i32: 1, 0>}} : {t} -> {b}", {"x": (x, "f32")}, (4, 2)
    )
    assert torch.equal(found, x.T)
    body = f"%found = tt.join %x, %x : {t}, {t} -> tensor<2x4x2xf32>"
    assert torch.equal(run(body, {"x": (x, "f32")}, (2, 4, 2)), torch.stack((x, x), -1))
    body = "%left, %found = tt.split %x : tensor<4x2xf32> -> tensor<4xf32>"
    assert run(body, {"x": (x.view(4, 2), "f32")}, (4,)).tolist() == [1, 3, 5, 7]
    body = f"%found = tt.cat %x, %x : {t} -> tensor<4x4xf32>"
    assert torch.equal(run(body, {"x": (x, "f32")}, (4, 4)), torch.cat((x, x)))
    body = "\n".join(
        [
            "%wide = tt.expand_dims %x {axis = 1 : i32} : tensor<4xf32> -> tensor<4x1xf32>",
            "%found = tt.broadcast %wide : tensor<4x1xf32> -> tensor<4x2xf32>",
        ]
    )
    row = torch.arange(4.0).cuda()
    assert torch.equal(run(body, {"x": (row, "f32")}, (4, 2)), row.unsqueeze(1).expand(4, 2))
    index = torch.tensor([[3, 3, 0, 1], [0, 2, 2, 1]], dtype=torch.int32).cuda()
    body = f"%found = tt.gather %x[%i] {{axis = 1 : i32}} : ({t}, tensor<2x4xi32>) -> {t}"
    inputs = {"x": (x, "f32"), "i": (index, "i32")}
    assert torch.equal(run(body, inputs, (2, 4)), x.gather(1, index.long()))


def test_constants_are_read_in_every_form():
    """Constants are numbers, hexadecimal bits, lists and blocks of bytes."""
    x = torch.zeros(4).cuda()
    for text, expected in (
        ("dense<1.500000e+00>", [1.5] * 4),
        ("dense<0xFF800000>", [-torch.inf] * 4),
        ("dense<[1.0, 2.0, 3.0, 4.0]>", [1.0, 2.0, 3.0, 4.0]),
        ('dense<"0x0000803F000000400000404000008040">', [1.0, 2.0, 3.0, 4.0]),
    ):
        body = f"%found = arith.constant {text} : tensor<4xf32>"
        assert run(body, {"x": (x, "f32")}, (4,)).tolist() == expected
    number = "%c = arith.constant 4294967295 : i32\n%found = tt.splat %c : i32 -> tensor<4xi32>"
    assert run(number, {"x": (x.int(), "i32")}, (4,), "i32").tolist() == [-1] * 4


def test_histogram_counts_numbers_in_range():
    """A histogram counts each number, and leaves out those out of range or masked."""
    x = elements("i32", [0, 1, 1, 3, 3, 3, 9, -1])
    body = "%found = tt.histogram %x : tensor<8xi32> -> tensor<4xi32>"
    assert run(body, {"x": (x, "i32")}, (4,), "i32").tolist() == [1, 2, 0, 3]


# ---- Reductions and scans ----

FOLDS = {
    "arith.addf": sum,
    "arith.maxnumf": max,
    "arith.minnumf": min,
    "arith.maximumf": max,
    "arith.minimumf": min,
    "arith.mulf": lambda numbers: torch.tensor(numbers).prod().item(),
}


def folding(kind, operation, axis, source, target, extra=""):
    """Return a reduction or a scan with a function of one operation."""
    return "\n".join(
        [
            f'%found = "tt.{kind}"(%x) <{{axis = {axis} : i32{extra}}}> ({{',
            "^bb0(%a: f32, %b: f32):",
            f"  %c = {operation} %a, %b : f32",
            f"  tt.{kind}.return %c : f32",
            f"}}) : ({source}) -> {target}",
        ]
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", FOLDS)
def test_reduction_combines_all_elements_along_an_axis(name, axis):
    """A reduction has the result of Python's own function of all elements."""
    x = torch.randn(4, 8).cuda()
    shape = (8,) if axis == 0 else (4,)
    body = folding("reduce", name, axis, "tensor<4x8xf32>", f"tensor<{shape[0]}xf32>")
    found = run(body, {"x": (x, "f32")}, shape)
    expected = [FOLDS[name](row) for row in (x.T if axis == 0 else x).tolist()]
    torch.testing.assert_close(found.cpu(), torch.tensor(expected))


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("name", ["arith.addf", "arith.mulf", "arith.maxnumf"])
def test_scan_combines_each_element_with_those_before_it(name, is_reversed):
    """A scan has the results of Python's ``accumulate``, from either end."""
    x = torch.randn(16).cuda()
    extra = f", reverse = {str(is_reversed).lower()}"
    body = folding("scan", name, 0, "tensor<16xf32>", "tensor<16xf32>", extra)
    numbers = x.tolist()[::-1] if is_reversed else x.tolist()
    expected = list(itertools.accumulate(numbers, lambda a, b: FOLDS[name]([a, b])))
    found = run(body, {"x": (x, "f32")}, (16,)).cpu()
    torch.testing.assert_close(found, torch.tensor(expected[::-1] if is_reversed else expected))


def test_scan_of_products_in_half_precision_rounds_each_result_once():
    """A product of bfloat16 numbers is as near to the exact one as the type allows."""
    x = (1 + torch.arange(32) / 128).bfloat16().cuda()
    body = folding("scan", "arith.mulf", 0, "tensor<32xbf16>", "tensor<32xbf16>")
    body = body.replace(": f32", ": bf16")
    found = run(body, {"x": (x, "bf16")}, (32,), "bf16").cpu()
    torch.testing.assert_close(found, x.cpu().double().cumprod(0).bfloat16(), rtol=0, atol=0)


def test_reduction_with_a_function_of_several_values_and_branches():
    """A function of a value and its position, with a branch in it, finds the largest element."""
    x = torch.tensor([3.0, 9.0, 1.0, 9.0]).cuda()
    body = """
    %at = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>
    %top:2 = "tt.reduce"(%x, %at) <{axis = 0 : i32}> ({
    ^bb0(%a: f32, %i: i32, %b: f32, %j: i32):
      %larger = arith.cmpf oge, %a, %b : f32
      %c:2 = scf.if %larger -> (f32, i32) {
        scf.yield %a, %i : f32, i32
      } else {
        scf.yield %b, %j : f32, i32
      }
      tt.reduce.return %c#0, %c#1 : f32, i32
    }) : (tensor<4xf32>, tensor<4xi32>) -> (f32, i32)
    %n = arith.sitofp %top#1 : i32 to f32
    %s = arith.addf %top#0, %n : f32
    %found = tt.splat %s : f32 -> tensor<1xf32>
    """
    assert run(body, {"x": (x, "f32")}, (1,)).item() in (10.0, 12.0)


def test_function_of_elements_may_branch():
    """``map_elementwise`` runs a function with a branch for each element."""
    x = torch.tensor([-2.0, 3.0, -4.0, 5.0]).cuda()
    body = """
    %found = "tt.map_elementwise"(%x) <{pack = 1 : i32}> ({
    ^bb0(%a: f32):
      %zero = arith.constant 0.000000e+00 : f32
      %below = arith.cmpf olt, %a, %zero : f32
      %c = scf.if %below -> (f32) {
        %d = arith.negf %a : f32
        scf.yield %d : f32
      } else {
        scf.yield %a : f32
      }
      tt.map_elementwise.return %c : f32
    }) : (tensor<4xf32>) -> tensor<4xf32>
    """
    assert run(body, {"x": (x, "f32")}, (4,)).tolist() == [2, 3, 4, 5]


# ---- Products ----


@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
def test_product_adds_in_single_precision(element):
    """A product of matrices has the result of double precision, within that of single."""
    a, b = (elements(element, torch.randn(64).tolist()).view(8, 8) for _ in range(2))
    kind = f"tensor<8x8x{element}>"
    body = "\n".join(
        [
            "%c = arith.constant dense<1.0> : tensor<8x8xf32>",
            "%found = tt.dot %a, %b, %c, inputPrecision = tf32 : "
            f"{kind} * {kind} -> tensor<8x8xf32>",
        ]
    )
    inputs = {"z": (torch.zeros(1).cuda(), "f32"), "a": (a, element), "b": (b, element)}
    found = run(body, inputs, (8, 8)).double()
    torch.testing.assert_close(found, a.double() @ b.double() + 1, rtol=1e-5, atol=1e-5)


def test_product_of_integers_is_exact():
    """A product of integers of 8 bits is exact in 32 bits."""
    a, b = torch.randint(-128, 127, (2, 8, 8)).cuda()
    kind = "tensor<8x8xi8>"
    body = "\n".join(
        [
            "%c = arith.constant dense<7> : tensor<8x8xi32>",
            f"%found = tt.dot %a, %b, %c : {kind} * {kind} -> tensor<8x8xi32>",
        ]
    )
    inputs = {"a": (a.to(torch.int8), "i8"), "b": (b.to(torch.int8), "i8")}
    found = run(body, inputs, (8, 8), "i32")
    assert torch.equal(found.cpu().long(), a.cpu() @ b.cpu() + 7)
