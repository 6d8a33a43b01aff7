"""Compares each operation on single elements with Python's own integers and floats."""

import itertools
import math

import pytest
import torch
from ttir import apply, elements

# ---- Integers ----

SIZES = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}


def wrapped(number: int, size: int) -> int:
    """Return the integer with sign that has the low bits of a number."""
    number &= 2**size - 1
    return number - 2**size if number >= 2 ** (size - 1) else number


def plain(number: int, size: int) -> int:
    """Return the integer without sign."""
    return number & (2**size - 1)


def quotient(a: int, b: int) -> int:
    """Return a quotient rounded towards zero."""
    found = abs(a) // abs(b)
    return -found if (a < 0) != (b < 0) else found


INTEGERS = {
    "arith.addi": lambda a, b, n: a + b,
    "arith.subi": lambda a, b, n: a - b,
    "arith.muli": lambda a, b, n: a * b,
    "arith.andi": lambda a, b, n: a & b,
    "arith.ori": lambda a, b, n: a | b,
    "arith.xori": lambda a, b, n: a ^ b,
    "arith.shli": lambda a, b, n: a << b if 0 <= b < n else 0,
    "arith.shrsi": lambda a, b, n: a >> (b if 0 <= b < n else n - 1),
    "arith.shrui": lambda a, b, n: plain(a, n) >> b if 0 <= b < n else 0,
    "arith.divsi": lambda a, b, n: quotient(a, b),
    "arith.remsi": lambda a, b, n: a - b * quotient(a, b),
    "arith.floordivsi": lambda a, b, n: a // b,
    "arith.ceildivsi": lambda a, b, n: -(-a // b),
    "arith.divui": lambda a, b, n: plain(a, n) // plain(b, n),
    "arith.remui": lambda a, b, n: plain(a, n) % plain(b, n),
    "arith.ceildivui": lambda a, b, n: -(-plain(a, n) // plain(b, n)),
    "arith.minsi": lambda a, b, n: min(a, b),
    "arith.maxsi": lambda a, b, n: max(a, b),
    "arith.minui": lambda a, b, n: min(plain(a, n), plain(b, n)),
    "arith.maxui": lambda a, b, n: max(plain(a, n), plain(b, n)),
    "tt.mulhiui": lambda a, b, n: (plain(a, n) * plain(b, n)) >> n,
}
DIVISIONS = ("div", "rem")


def edges(size: int) -> list[int]:
    """Return numbers of a size around which mistakes are."""
    top = 2 ** (size - 1)
    return [0, 1, 2, 7, -1, -2, -7, top - 1, -top, top // 3, -top // 3, 13]


@pytest.mark.parametrize("element", SIZES)
@pytest.mark.parametrize("name", INTEGERS)
def test_operation_on_integers_wraps_as_on_a_machine(name, element):
    """An operation on integers has the bits of the exact result, for every pair of edge cases."""
    size = SIZES[element]
    pairs = list(itertools.product(edges(size), repeat=2))
    if any(part in name for part in DIVISIONS):
        lowest = -(2 ** (size - 1))
        pairs = [(a, b) for a, b in pairs if b != 0 and (a, b) != (lowest, -1)]
    first, second = (elements(element, numbers) for numbers in zip(*pairs, strict=True))
    operation = f"{name} %x0, %x1 : tensor<{len(pairs)}x{element}>"
    found = apply(operation, [(element, first), (element, second)], element)
    expected = [wrapped(INTEGERS[name](a, b, size), size) for a, b in pairs]
    assert found.tolist() == expected


COUNTS = {
    "math.absi": lambda a, n: abs(a),
    "math.ctpop": lambda a, n: bin(plain(a, n)).count("1"),
    "math.ctlz": lambda a, n: n - plain(a, n).bit_length(),
    "math.cttz": lambda a, n: (a & -a).bit_length() - 1 if a else n,
}


@pytest.mark.parametrize("element", SIZES)
@pytest.mark.parametrize("name", COUNTS)
def test_operation_on_one_integer(name, element):
    """Sizes and counts of bits are those of the integer without sign."""
    size, numbers = SIZES[element], edges(SIZES[element])
    operation = f"{name} %x0 : tensor<{len(numbers)}x{element}>"
    found = apply(operation, [(element, elements(element, numbers))], element)
    assert found.tolist() == [wrapped(COUNTS[name](a, size), size) for a in numbers]


ORDERS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("element", SIZES)
@pytest.mark.parametrize("how", ["eq", "ne", *(s + o for s in "su" for o in list(ORDERS)[2:])])
def test_comparison_of_integers_with_and_without_sign(how, element):
    """Comparisons take integers with or without sign, as their name says."""
    size = SIZES[element]
    pairs = list(itertools.product(edges(size), repeat=2))
    first, second = (elements(element, numbers) for numbers in zip(*pairs, strict=True))
    operation = f"arith.cmpi {how}, %x0, %x1 : tensor<{len(pairs)}x{element}>"
    found = apply(operation, [(element, first), (element, second)], "i1")
    order = ORDERS[how if how in ("eq", "ne") else how[1:]]
    view = (lambda a: plain(a, size)) if how[0] == "u" else (lambda a: a)
    assert found.tolist() == [int(order(view(a), view(b))) for a, b in pairs]


@pytest.mark.parametrize("name", ["addi", "subi", "muli", "minsi", "maxsi", "xori"])
def test_operation_on_single_bits(name):
    """Single bits are integers of one bit, whose only numbers are 0 and -1."""
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, second = (elements("i8", numbers) for numbers in zip(*pairs, strict=True))
    found = apply(f"arith.{name} %x0, %x1 : tensor<4xi1>", [("i1", first), ("i1", second)], "i1")
    assert found.tolist() == [plain(INTEGERS[f"arith.{name}"](-a, -b, 1), 1) for a, b in pairs]


# ---- Floating-point numbers ----

NUMBERS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -2.5, 3.75, 10.0, -10.25, 0.001]
SPECIAL = [math.inf, -math.inf, math.nan]
UNARY = {
    "arith.negf": lambda a: -a,
    "math.absf": abs,
    "math.exp": math.exp,
    "math.exp2": lambda a: 2.0**a,
    "math.expm1": math.expm1,
    "math.sin": math.sin,
    "math.cos": math.cos,
    "math.tan": math.tan,
    "math.atan": math.atan,
    "math.sinh": math.sinh,
    "math.cosh": math.cosh,
    "math.tanh": math.tanh,
    "math.asinh": math.asinh,
    "math.erf": math.erf,
    "math.erfc": math.erfc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.roundeven": round,
    "math.round": lambda a: math.copysign(math.floor(abs(a) + 0.5), a),
    "arith.flush_denormals": lambda a: a,
}
OF_POSITIVE = {
    "math.sqrt": math.sqrt,
    "tt.precise_sqrt": math.sqrt,
    "math.rsqrt": lambda a: 1 / math.sqrt(a),
    "math.cbrt": lambda a: a ** (1 / 3),
    "math.log": math.log,
    "math.log2": math.log2,
    "math.log10": math.log10,
    "math.log1p": math.log1p,
}
OF_FRACTIONS = {
    "math.asin": math.asin,
    "math.acos": math.acos,
    "math.atanh": math.atanh,
}
ABOVE_ONE = {"math.acosh": math.acosh}
DOMAINS = [
    *((name, function, NUMBERS) for name, function in UNARY.items()),
    *((name, function, [0.25, 1.0, 3.0, 100.0]) for name, function in OF_POSITIVE.items()),
    *((name, function, [-0.75, 0.0, 0.25, 0.9]) for name, function in OF_FRACTIONS.items()),
    *((name, function, [1.0, 1.5, 20.0]) for name, function in ABOVE_ONE.items()),
]
TOLERANCES = {"f64": 1e-14, "f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}


@pytest.mark.parametrize("element", TOLERANCES)
@pytest.mark.parametrize(("name", "function", "numbers"), DOMAINS, ids=[row[0] for row in DOMAINS])
def test_function_of_a_floating_point_number(name, function, numbers, element):
    """A function has Python's result, within the precision of its type."""
    given = elements(element, numbers)
    operation = f"{name} %x0 : tensor<{len(numbers)}x{element}>"
    found = apply(operation, [(element, given)], element).double().cpu()
    expected = torch.tensor(
        [float(function(a)) for a in given.double().tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[element], atol=TOLERANCES[element])


BINARY = {
    "arith.addf": lambda a, b: a + b,
    "arith.subf": lambda a, b: a - b,
    "arith.mulf": lambda a, b: a * b,
    "arith.divf": lambda a, b: a / b,
    "tt.precise_divf": lambda a, b: a / b,
    "tt.approx_divf": lambda a, b: a / b,
    "arith.remf": math.fmod,
    "arith.maximumf": max,
    "arith.minimumf": min,
    "arith.maxnumf": max,
    "arith.minnumf": min,
    "math.atan2": math.atan2,
    "math.copysign": math.copysign,
    "math.powf": lambda a, b: abs(a) ** b,
}


@pytest.mark.parametrize("element", TOLERANCES)
@pytest.mark.parametrize("name", BINARY)
def test_function_of_two_floating_point_numbers(name, element):
    """A function of two numbers has Python's result, within the precision of its type."""
    pairs = [(a, b) for a in NUMBERS for b in (0.5, -0.5, 2.0, 3.0)]
    if name == "math.powf":
        pairs = [(abs(a), b) for a, b in pairs if a]
    first, second = (elements(element, numbers) for numbers in zip(*pairs, strict=True))
    operation = f"{name} %x0, %x1 : tensor<{len(pairs)}x{element}>"
    found = apply(operation, [(element, first), (element, second)], element).double().cpu()
    exact = zip(first.double().tolist(), second.double().tolist(), strict=True)
    expected = torch.tensor([float(BINARY[name](a, b)) for a, b in exact], dtype=torch.float64)
    tolerance = TOLERANCES[element]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "ignores_nan"),
    [("maximumf", False), ("minimumf", False), ("maxnumf", True), ("minnumf", True)],
)
def test_extremes_pass_nan_on_or_ignore_it(name, ignores_nan):
    """The extremes ``maximumf`` and ``minimumf`` pass NaN on, the others ignore it."""
    first, second = elements("f32", [math.nan, 1.0]), elements("f32", [1.0, math.nan])
    given = [("f32", first), ("f32", second)]
    found = apply(f"arith.{name} %x0, %x1 : tensor<2xf32>", given, "f32")
    assert found.isnan().tolist() == [not ignores_nan] * 2


FLOAT_ORDERS = [f"{kind}{order}" for kind in "ou" for order in ORDERS]


@pytest.mark.parametrize("how", [*FLOAT_ORDERS, "ord", "uno"])
def test_comparison_of_floating_point_numbers_and_nan(how):
    """Ordered comparisons with NaN are false, unordered ones true."""
    pairs = list(itertools.product([*NUMBERS[:6], *SPECIAL], repeat=2))
    first, second = (elements("f32", numbers) for numbers in zip(*pairs, strict=True))
    operation = f"arith.cmpf {how}, %x0, %x1 : tensor<{len(pairs)}xf32>"
    found = apply(operation, [("f32", first), ("f32", second)], "i1")
    expected = []
    for a, b in pairs:
        has_nan = math.isnan(a) or math.isnan(b)
        if how in ("ord", "uno"):
            expected.append(has_nan == (how == "uno"))
        else:
            expected.append(how[0] == "u" if has_nan else ORDERS[how[1:]](a, b))
    assert found.tolist() == [int(one) for one in expected]


def test_precise_root_is_rounded_to_the_nearest():
    """``precise_sqrt`` has the single-precision number next to the exact root."""
    given = torch.linspace(0.01, 9, 4096).cuda()
    found = apply("tt.precise_sqrt %x0 : tensor<4096xf32>", [("f32", given)], "f32")
    assert torch.equal(found.cpu(), given.cpu().double().sqrt().float())


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite"])
def test_kind_of_a_floating_point_number(name):
    """The operations that ask for the kind of a number know infinities and NaN."""
    numbers = [1.0, *SPECIAL]
    given = [("f32", elements("f32", numbers))]
    found = apply(f"math.{name} %x0 : tensor<4xf32>", given, "i1")
    assert found.tolist() == [int(getattr(math, name)(a)) for a in numbers]


def test_fused_product_and_sum_is_rounded_once():
    """``fma`` rounds once: the product of 1 + e and 1 - e less 1 is not 0."""
    e = 2.0**-13
    given = [("f32", elements("f32", [a])) for a in (1 + e, 1 - e, -1.0)]
    found = apply("math.fma %x0, %x1, %x2 : tensor<1xf32>", given, "f32")
    assert found.tolist() == [-(e**2)]


@pytest.mark.parametrize(("mode", "of_nan"), [("none", 0.0), ("all", math.nan)])
def test_clamp_keeps_nan_if_it_is_to(mode, of_nan):
    """``clampf`` limits numbers on both sides, and says what it does with NaN."""
    numbers = [-5.0, 0.5, 5.0, math.nan]
    given = [("f32", elements("f32", n)) for n in (numbers, [0.0] * 4, [1.0] * 4)]
    operation = f"tt.clampf %x0, %x1, %x2, propagateNan = {mode} : tensor<4xf32>"
    found = apply(operation, given, "f32").cpu()
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 1.0, of_nan]), equal_nan=True)
