"""Compares inline assembly, libdevice, printing and assertions with plain Python."""

import pytest
import torch
from ttir import apply, elements, function, launch

from emulated_cuda.triton.ttir import KernelError

# ---- Assertions, assembly ----


def test_failed_assertion_is_an_error_with_its_text():
    """``device_assert`` is an error with its text and the program that failed."""
    body = """
    %zero = arith.constant 0 : i32
    %id = tt.get_program_id x : i32
    %ok = arith.cmpi eq, %id, %zero : i32
    tt.assert %ok, "must be first" : i1
    """
    message = r"device-side assert triggered in the kernel kernel, program \(1, 0, 0\): must be f"
    with pytest.raises(KernelError, match=message):
        launch(function("%x: !tt.ptr<i32>", body), [torch.zeros(1).cuda()], (4, 1, 1))


def test_print_writes_a_line_for_each_element(capsys):
    """``device_print`` writes a line for each element with program and position."""
    body = """
    %c = arith.constant dense<[3, 4]> : tensor<2xi32>
    tt.print " x: " {hex = false, isSigned = array<i32: 1>} : %c : tensor<2xi32>
    """
    launch(function("%x: !tt.ptr<i32>", body), [torch.zeros(1).cuda()])
    assert capsys.readouterr().out == "pid (0, 0, 0) idx (0) x: 3\npid (0, 0, 0) idx (1) x: 4\n"


ASSEMBLY = [
    ("ex2.approx.f32 $0, $1;", "f32", lambda a: 2.0**a),
    ("neg.f32 $0, $1;", "f32", lambda a: -a),
    (r"// of \22lines\22\0A abs.f32 $0, $1;\0A", "f32", abs),
    ("{ .reg .f32 t; mul.f32 t, $1, 0f40000000; add.f32 $0, t, $1; }", "f32", lambda a: 3 * a),
    ("setp.gt.f32 p, $1, 0f00000000; selp.f32 $0, $1, 0f00000000, p;", "f32", lambda a: max(a, 0)),
    ("shl.b32 $0, $1, 3;", "i32", lambda a: a << 3),
    ("lop3.b32 $0, $1, 15, 255, 0x80;", "i32", lambda a: a & 15),
    ("mad.lo.s32 $0, $1, 3, 1;", "i32", lambda a: 3 * a + 1),
    ("shf.l.wrap.b32 $0, $1, 0, 35;", "i32", lambda a: 0),
    ("shf.l.wrap.b32 $0, 0, $1, 35;", "i32", lambda a: a << 3),
    ("shf.r.clamp.b32 $0, $1, 1, 40;", "i32", lambda a: 1),
    ("bfe.u32 $0, $1, 1, 3;", "i32", lambda a: a >> 1 & 7),
    ("cvt.s32.u8 $0, $1;", "i32", lambda a: a & 255),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "element", "expected"), ASSEMBLY, ids=[row[0] for row in ASSEMBLY]
)
def test_inline_assembly_computes_common_instructions(text, element, expected):
    """Instructions of PTX on registers have the results of Python."""
    numbers = [1.0, -2.0, 3.0, 0.5] if element == "f32" else [1, 300, 77, 12]
    kind = f"tensor<4x{element}>"
    attributes = '{constraints = "=r,r", packed_element = 1 : i32, pure = true}'
    operation = f'tt.elementwise_inline_asm "{text}" {attributes} %x0 : {kind} -> {kind}'
    found = apply(operation, [(element, elements(element, numbers))], element)
    torch.testing.assert_close(
        found.cpu().double(), torch.tensor([expected(a) for a in numbers]).double()
    )


def test_inline_assembly_gets_short_elements_together_in_a_register():
    """Four elements of 8 bits come in one register of 32 bits, if they are packed."""
    numbers = [1, 2, 3, 4, 5, 6, 7, 8]
    attributes = '{constraints = "=r,r", packed_element = 4 : i32, pure = true}'
    text, kinds = "add.u32 $0, $1, 0x01010101;", "tensor<8xi8> -> tensor<8xi8>"
    operation = f'tt.elementwise_inline_asm "{text}" {attributes} %x0 : {kinds}'
    found = apply(operation, [("i8", elements("i8", numbers))], "i8")
    assert found.tolist() == [a + 1 for a in numbers]


def test_waiting_for_earlier_kernels_has_no_effect():
    """Kernels run one after the other; the instruction writes no register."""
    attributes = '{constraints = "=r,r", packed_element = 1 : i32, pure = false}'
    kinds = "tensor<4xi32> -> tensor<4xi32>"
    for text, expected in (("", [0, 0, 0, 0]), (" mov.b32 $0, $1;", [5, 6, 7, 8])):
        assembly = f"griddepcontrol.wait; // dummy $0\\0A{text}"
        operation = f'tt.elementwise_inline_asm "{assembly}" {attributes} %x0 : {kinds}'
        found = apply(operation, [("i32", elements("i32", [5, 6, 7, 8]))], "i32")
        assert found.tolist() == expected


# ---- Libdevice ----


def external(symbol, inputs, result):
    """Call a function of libdevice on tensors of one shape."""
    kinds = ", ".join(f"tensor<{value.numel()}x{element}>" for element, value in inputs)
    names = ", ".join(f"%x{index}" for index in range(len(inputs)))
    attributes = f'{{libname = "", libpath = "", pure = true, symbol = "__nv_{symbol}"}}'
    size = inputs[0][1].numel()
    operation = f"tt.extern_elementwise {names} {attributes} : ({kinds}) -> tensor<{size}x{result}>"
    return apply(operation, inputs, result)


def test_directed_rounding_of_libdevice_goes_in_its_direction():
    """Sums that round up, down and towards zero enclose the exact sum."""
    pairs = [
        ("f32", elements("f32", [1.0, -1.0])),
        ("f32", elements("f32", [2.0**-30, -(2.0**-30)])),
    ]
    found = {
        mode: external(f"fadd_{mode}", pairs, "f32").tolist() for mode in ("rn", "rz", "rd", "ru")
    }
    above, below = 1 + 2.0**-23, -1 - 2.0**-23
    assert found == {"rn": [1, -1], "rz": [1, -1], "rd": [1, below], "ru": [above, -1]}


LIBDEVICE = [
    ("mulhi", "i32", [2**30, -(2**30)], [2**10, 2**10], [2**8, -(2**8)]),
    ("brev", "i32", [1, 2], None, [-(2**31), 2**30]),
    ("popc", "i32", [255, -1], None, [8, 32]),
    ("ffs", "i32", [0, 8], None, [0, 4]),
    ("hadd", "i32", [3, -3], [4, -4], [3, -4]),
    ("fdimf", "f32", [5.0, 1.0], [3.0, 2.0], [2.0, 0.0]),
    ("hypotf", "f32", [3.0, 5.0], [4.0, 12.0], [5.0, 13.0]),
    ("cbrtf", "f32", [27.0, -8.0], None, [3.0, -2.0]),
    ("cospif", "f32", [1.0, 0.5], None, [-1.0, 0.0]),
    ("tgammaf", "f32", [5.0, -0.5], None, [24.0, -3.5449077]),
    ("ilogbf", "f32", [8.0, 0.75], None, [3, -1]),
]


@pytest.mark.parametrize(
    ("symbol", "element", "first", "second", "expected"),
    LIBDEVICE,
)
def test_function_of_libdevice_has_the_result_of_its_definition(
    symbol, element, first, second, expected
):
    """Functions of libdevice have the results that their definitions give."""
    inputs = [(element, elements(element, n)) for n in (first, second) if n is not None]
    result = "i32" if symbol.startswith("ilogb") else element
    found = external(symbol, inputs, result).cpu().double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)
