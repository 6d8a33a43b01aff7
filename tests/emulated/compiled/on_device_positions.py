"""Compares arithmetic on positions that are progressions with that on each element."""

import pytest
from lines_of_eight import compare, compared, load_at, number, store


def rows(start: int, length: int, first: str = "addi %at, %start", kind: str = "si") -> list[str]:
    """Return operations that divide positions into rows and columns, and load by both."""
    return [
        number("start", start),
        number("length", length),
        f"%from = arith.{first} : tensor<8xi32>",
        f"%row = arith.div{kind} %from, %length : tensor<8xi32>",
        f"%column = arith.rem{kind} %from, %length : tensor<8xi32>",
        "%sum = arith.addi %row, %column : tensor<8xi32>",
        load_at("v", "%row"),
        load_at("w", "%sum"),
        "%t = arith.addf %v, %w : tensor<8xf32>",
        store("%t"),
    ]


CASES = {
    "comparison without sign": [
        "%down = arith.subi %range, %eight : tensor<8xi32>",
        number("three", 3),
        "%across = arith.addi %down, %three : tensor<8xi32>",
        compared("some", "ult", "%across", "%three"),
        load_at("v", "%at", "%some"),
        store("%v"),
    ],
    "positions that wrap": [
        number("large", 2**31 - 4),
        "%wrapped = arith.addi %range, %large : tensor<8xi32>",
        compared("some", "slt", "%wrapped", "%zeros"),
        load_at("v", "%at", "%some"),
        store("%v"),
    ],
    "wrapped positions that become longer": [
        number("large", 2**31 - 4),
        number("base", 2**31 - 8, "i64"),
        "%wrapped = arith.addi %range, %large : tensor<8xi32>",
        "%long = arith.extsi %wrapped : tensor<8xi32> to tensor<8xi64>",
        "%near = arith.subi %long, %base : tensor<8xi64>",
        number("seven", 7, "i64"),
        number("none", 0, "i64"),
        compared("below", "sle", "%near", "%seven", "i64"),
        compared("above", "sge", "%near", "%none", "i64"),
        "%some = arith.andi %below, %above : tensor<8xi1>",
        load_at("v", "%near", "%some", "i64"),
        store("%v"),
    ],
    "wrapped product that comes back": [
        number("large", 2**30),
        number("four", 4),
        "%a = arith.muli %range, %large : tensor<8xi32>",
        "%b = arith.muli %a, %four : tensor<8xi32>",
        "%c = arith.addi %b, %range : tensor<8xi32>",
        load_at("v", "%c"),
        store("%v"),
    ],
    "longer without sign": [
        "%down = arith.subi %range, %eight : tensor<8xi32>",
        "%long = arith.extui %down : tensor<8xi32> to tensor<8xi64>",
        number("most", 2**32 - 8, "i64"),
        "%near = arith.subi %long, %most : tensor<8xi64>",
        load_at("v", "%near", element="i64"),
        store("%v"),
    ],
    "shorter": [
        "%long = arith.extsi %at : tensor<8xi32> to tensor<8xi64>",
        number("much", 2**32 + 1, "i64"),
        "%a = arith.muli %long, %much : tensor<8xi64>",
        "%short = arith.trunci %a : tensor<8xi64> to tensor<8xi32>",
        load_at("v", "%short"),
        store("%v"),
    ],
    "step of each program": [
        "%a = arith.muli %ids, %range : tensor<8xi32>",
        load_at("v", "%a"),
        store("%v"),
    ],
    "rows as long as blocks": rows(0, 8),
    "rows that begin inside of blocks": rows(3, 16),
    "rows of an odd length": rows(5, 11),
    "short rows": rows(0, 4, kind="ui"),
    "rows from the end": rows(24, 4, first="subi %start, %range"),
    "short rows of an odd length": [
        number("length", 3),
        "%from = arith.muli %at, %length : tensor<8xi32>",
        "%on = arith.addi %from, %range : tensor<8xi32>",
        "%row = arith.divsi %on, %length : tensor<8xi32>",
        "%column = arith.remsi %on, %length : tensor<8xi32>",
        load_at("v", "%row"),
        load_at("w", "%column"),
        "%t = arith.addf %v, %w : tensor<8xf32>",
        store("%t"),
    ],
    "rows of negative positions": [
        number("start", -7),
        number("length", 8),
        "%from = arith.addi %at, %start : tensor<8xi32>",
        "%row = arith.divsi %from, %length : tensor<8xi32>",
        "%column = arith.remsi %from, %length : tensor<8xi32>",
        "%sum = arith.addi %row, %column : tensor<8xi32>",
        load_at("v", "%row"),
        load_at("w", "%sum"),
        "%t = arith.addf %v, %w : tensor<8xf32>",
        store("%t"),
    ],
    "rows of no length": rows(0, 0),
    "columns of positions without sign": [
        number("start", 2**31 - 12),
        "%from = arith.addi %at, %start : tensor<8xi32>",
        "%column = arith.remui %from, %eight : tensor<8xi32>",
        load_at("v", "%column"),
        store("%v"),
    ],
    "selected positions": [
        number("two", 2),
        compared("yes", "sge", "%at", "%zeros"),
        compared("some", "slt", "%at", "%two"),
        "%a = arith.select %yes, %range, %at : tensor<8xi1>, tensor<8xi32>",
        "%b = arith.select %some, %zeros, %a : tensor<8xi1>, tensor<8xi32>",
        load_at("v", "%b"),
        store("%v"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_each_element(name):
    """Numbers that wrap, change their size or are divided are the same in both ways."""
    assert not compare(CASES[name])
