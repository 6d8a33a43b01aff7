"""Compares results that take an operand's memory with the same kernels without that."""

import pytest
import torch
from lines_of_eight import POINTER, load_at, number, outcome, store

from emulated_cuda.triton import programs

LOADED = load_at("v", "%at")
TWO = number("two", "2.0", "f32")


def computed(name, operation, *operands):
    """Return the text of an operation on eight numbers."""
    return f"%{name} = {operation} {', '.join(operands)} : tensor<8xf32>"


DOUBLED = [LOADED, TWO, computed("w", "arith.mulf", "%v", "%two")]
CASES = {
    "operand is not needed": [*DOUBLED, store("%w")],
    "operand is needed later": [*DOUBLED, computed("r", "arith.addf", "%w", "%v"), store("%r")],
    "operand is stored later": [*DOUBLED, store("%w"), store("%v")],
    "both operands are the same": [*DOUBLED, computed("r", "arith.mulf", "%w", "%w"), store("%r")],
    "second operand is not needed": [
        *DOUBLED,
        computed("r", "arith.subf", "%two", "%w"),
        store("%r"),
    ],
    "constant": [
        LOADED,
        TWO,
        computed("r", "math.sqrt", "%two"),
        computed("s", "arith.mulf", "%r", "%v"),
        store("%s"),
    ],
    "another value is a view": [
        *DOUBLED,
        "%seen = tt.reshape %w : tensor<8xf32> -> tensor<2x4xf32>",
        computed("r", "math.exp2", "%w"),
        "%back = tt.reshape %seen : tensor<2x4xf32> -> tensor<8xf32>",
        computed("s", "arith.addf", "%r", "%back"),
        store("%s"),
    ],
    "other operand differs between programs": [
        load_at("v", "%range"),
        load_at("u", "%at"),
        computed("r", "arith.addf", "%v", "%u"),
        store("%r"),
    ],
    "position is loaded": [
        LOADED,
        "%i = arith.fptosi %v : tensor<8xf32> to tensor<8xi64>",
        number("limit", 63, "i64"),
        number("three", 3, "i64"),
        "%small = arith.andi %i, %limit : tensor<8xi64>",
        "%far = arith.muli %small, %three : tensor<8xi64>",
        "%on = arith.addi %far, %three : tensor<8xi64>",
        load_at("u", "%on", element="i64"),
        store("%u"),
    ],
    "a branch gives it as it is": [
        *DOUBLED,
        "%zero = arith.constant 0 : i32",
        "%all = arith.cmpi sge, %zero, %zero : i32",
        "%same = scf.if %all -> (tensor<8xf32>) {",
        "scf.yield %w : tensor<8xf32>",
        "} else {",
        "scf.yield %v : tensor<8xf32>",
        "}",
        computed("r", "arith.mulf", "%w", "%two"),
        computed("s", "arith.subf", "%r", "%same"),
        store("%s"),
    ],
    "needed in a branch": [
        *DOUBLED,
        "%zero = arith.constant 0 : i32",
        "%first = arith.cmpi eq, %id, %zero : i32",
        "scf.if %first {",
        computed("r", "arith.addf", "%w", "%v"),
        f"tt.store %to, %r : tensor<8x{POINTER}>",
        "} else {",
        store("%w"),
        "}",
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_result_is_the_same_in_the_memory_of_an_operand(name, monkeypatch):
    """Every value is that of a kernel whose operations all take memory of their own."""
    found = outcome(CASES[name])
    monkeypatch.setattr(
        programs, "spare_operands", lambda operations, released: [()] * len(operations)
    )
    expected = outcome(CASES[name])
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1] == ""
    assert expected[0].any()


def test_chain_of_operations_takes_the_memory_of_one_value(monkeypatch):
    """The last three operations write into the same memory."""
    places = []
    run = programs.Step.run

    def noted(step, *given):
        result = run(step, *given)
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            places.append(result.data_ptr())
        return result

    monkeypatch.setattr(programs.Step, "run", noted)
    lines = [*DOUBLED, computed("r", "math.exp2", "%w"), computed("s", "arith.negf", "%r")]
    outcome([*lines, store("%s")])
    assert len(set(places[-3:])) == 1
    assert len(set(places)) > 1  # constants are not overwritten
