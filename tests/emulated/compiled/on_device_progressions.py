"""Compares blocks whose addresses are progressions with an address for each element."""

import pytest
import torch
from lines_of_eight import POINTER, compare, compared, load_at, number, outcome, store
from ttir import function, launch

from emulated_cuda.triton import memory
from emulated_cuda.triton.progressions import Progression

CASES = {
    "whole block": [load_at("v", "%at"), store("%v")],
    "negative step": [
        "%back = arith.subi %zeros, %range : tensor<8xi32>",
        load_at("v", "%back"),
        store("%v"),
    ],
    "same element": [load_at("v", "%own"), store("%v")],
    "step of two": [
        number("two", 2),
        "%twice = arith.muli %range, %two : tensor<8xi32>",
        load_at("v", "%twice"),
        store("%v"),
    ],
    "rows that overlap": [
        "%near = arith.addi %ids, %range : tensor<8xi32>",
        load_at("v", "%at"),
        f"%q = tt.addptr %outs, %near : tensor<8x{POINTER}>, tensor<8xi32>",
        store("%v", to="%q"),
    ],
    "all programs write the same block": [
        load_at("v", "%at"),
        f"%q = tt.addptr %outs, %range : tensor<8x{POINTER}>, tensor<8xi32>",
        store("%v", to="%q"),
    ],
    "all elements write the same place": [
        load_at("v", "%at"),
        f"%q = tt.addptr %outs, %ids : tensor<8x{POINTER}>, tensor<8xi32>",
        store("%v", to="%q"),
    ],
    "mask is a prefix in the last program": [
        number("bound", 27),
        compared("some", "slt", "%at", "%bound"),
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "mask is a suffix": [
        number("bound", 13),
        compared("some", "sge", "%at", "%bound"),
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "mask is in the middle": [
        number("low", 3),
        number("high", 21),
        compared("above", "sge", "%at", "%low"),
        compared("below", "slt", "%at", "%high"),
        "%some = arith.andi %above, %below : tensor<8xi1>",
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "mask has gaps": [
        number("three", 3),
        "%rest = arith.remsi %at, %three : tensor<8xi32>",
        compared("some", "ne", "%rest", "%zeros"),
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "mask of whole programs": [
        number("two", 2),
        compared("some", "slt", "%ids", "%two"),
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "one mask or the other": [
        number("two", 2),
        number("bound", 29),
        compared("early", "slt", "%ids", "%two"),
        compared("late", "sgt", "%at", "%bound"),
        "%some = arith.ori %early, %late : tensor<8xi1>",
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ],
    "mask is false everywhere": [
        compared("some", "slt", "%at", "%zeros"),
        load_at("v", "%at", "%some"),
        store("%v"),
    ],
    "masked elements lie outside": [
        number("far", 2**28),
        number("bound", 20),
        "%jump = arith.muli %range, %far : tensor<8xi32>",
        compared("some", "slt", "%range", "%zeros"),
        compared("first", "sle", "%range", "%zeros"),
        load_at("v", "%jump", "%first"),
        store("%v"),
    ],
    "address chosen by programs": [
        "%one = arith.constant 1 : i32",
        "%is_late = arith.cmpi sgt, %id, %one : i32",
        "%where = scf.if %is_late -> (tensor<8xi32>) {",
        "scf.yield %at : tensor<8xi32>",
        "} else {",
        "scf.yield %range : tensor<8xi32>",
        "}",
        "%how = scf.if %is_late -> (tensor<8xi32>) {",
        "scf.yield %where : tensor<8xi32>",
        "} else {",
        "scf.yield %zeros : tensor<8xi32>",
        "}",
        load_at("v", "%where"),
        load_at("w", "%how"),
        "%sum = arith.addf %v, %w : tensor<8xf32>",
        store("%sum"),
    ],
    "only some programs store": [
        "%one = arith.constant 1 : i32",
        "%is_late = arith.cmpi sgt, %id, %one : i32",
        "scf.if %is_late {",
        load_at("v", "%at"),
        store("%v"),
        f"%q = tt.addptr %outs, %range : tensor<8x{POINTER}>, tensor<8xi32>",
        store("%v", to="%q"),
        "}",
    ],
    "address moves in a loop": [
        "%none = arith.constant 0 : i32",
        "%one = arith.constant 1 : i32",
        f"%first = tt.addptr %xs, %range : tensor<8x{POINTER}>, tensor<8xi32>",
        f"%r:2 = scf.for %i = %none to %id step %one iter_args(%s = %other, %p = %first) -> "
        f"(tensor<8xf32>, tensor<8x{POINTER}>)  : i32 {{",
        f"%v = tt.load %p : tensor<8x{POINTER}>",
        "%t = arith.addf %s, %v : tensor<8xf32>",
        f"%n = tt.addptr %p, %eight : tensor<8x{POINTER}>, tensor<8xi32>",
        f"scf.yield %t, %n : tensor<8xf32>, tensor<8x{POINTER}>",
        "}",
        store("%r#0"),
        f"%w = tt.load %r#1 : tensor<8x{POINTER}>",
        "%both = arith.addf %r#0, %w : tensor<8xf32>",
        store("%both"),
    ],
    "load outside in the last program": [
        number("far", 2**40, "i64"),  # nearer, there may be another segment of the device
        number("two", 2),
        compared("late", "sgt", "%ids", "%two"),
        "%long = arith.extsi %ids : tensor<8xi32> to tensor<8xi64>",
        "%each = arith.extsi %range : tensor<8xi32> to tensor<8xi64>",
        "%a = arith.muli %long, %far : tensor<8xi64>",
        "%b = arith.addi %a, %each : tensor<8xi64>",
        load_at("v", "%b", "%late", element="i64"),
        store("%v"),
    ],
    "store outside in the last program": [
        number("jump", 2**20 - 2),
        load_at("v", "%at"),
        "%a = arith.muli %ids, %jump : tensor<8xi32>",
        "%b = arith.addi %a, %range : tensor<8xi32>",
        f"%q = tt.addptr %outs, %b : tensor<8x{POINTER}>, tensor<8xi32>",
        store("%v", to="%q"),
    ],
    "load before the start": [
        number("far", -(2**40), "i64"),
        "%long = arith.extsi %range : tensor<8xi32> to tensor<8xi64>",
        "%a = arith.addi %long, %far : tensor<8xi64>",
        load_at("v", "%a", element="i64"),
        store("%v"),
    ],
    "steps as large as the address space": [
        number("huge", 2**61, "i64"),
        "%long = arith.extsi %range : tensor<8xi32> to tensor<8xi64>",
        "%a = arith.muli %long, %huge : tensor<8xi64>",
        load_at("v", "%a", element="i64"),
        store("%v"),
    ],
    "steps that wrap around the address space": [
        number("huge", 2**62, "i64"),
        "%long = arith.extsi %range : tensor<8xi32> to tensor<8xi64>",
        "%a = arith.muli %long, %huge : tensor<8xi64>",
        "%b = arith.addi %a, %long : tensor<8xi64>",
        load_at("v", "%b", element="i64"),
        store("%v"),
    ],
    "bytes between elements": [
        "%b = tt.bitcast %x : !tt.ptr<f32> -> !tt.ptr<i8>",
        "%bs = tt.splat %b : !tt.ptr<i8> -> tensor<8x!tt.ptr<i8>>",
        "%c = tt.addptr %bs, %range : tensor<8x!tt.ptr<i8>>, tensor<8xi32>",
        f"%d = tt.bitcast %c : tensor<8x!tt.ptr<i8>> -> tensor<8x{POINTER}>",
        f"%v = tt.load %d : tensor<8x{POINTER}>",
        store("%v"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_block_has_the_elements_of_its_addresses(name):
    """Values, what is written before an error, and its text are those of an address for each."""
    error = compare(CASES[name])
    refused = ("outside", "before", "as large", "between")
    assert bool(error) == any(word in name for word in refused if "masked" not in name)


@pytest.mark.parametrize("shape", [(8, 4), (4, 8)])
def test_block_of_two_dimensions_may_be_transposed(shape):
    """A tile in rows or columns, of which some are masked, has the elements of its addresses."""
    rows, columns = shape
    tile = f"tensor<{rows}x{columns}x"
    body = f"""
    %r = tt.make_range {{end = {rows} : i32, start = 0 : i32}} : tensor<{rows}xi32>
    %c = tt.make_range {{end = {columns} : i32, start = 0 : i32}} : tensor<{columns}xi32>
    %r1 = tt.expand_dims %r {{axis = 1 : i32}} : tensor<{rows}xi32> -> tensor<{rows}x1xi32>
    %c0 = tt.expand_dims %c {{axis = 0 : i32}} : tensor<{columns}xi32> -> tensor<1x{columns}xi32>
    %rs = tt.broadcast %r1 : tensor<{rows}x1xi32> -> {tile}i32>
    %cs = tt.broadcast %c0 : tensor<1x{columns}xi32> -> {tile}i32>
    %width = arith.constant dense<{columns}> : {tile}i32>
    %height = arith.constant dense<{rows}> : {tile}i32>
    %three = arith.constant dense<3> : {tile}i32>
    %a = arith.muli %rs, %width : {tile}i32>
    %by_row = arith.addi %a, %cs : {tile}i32>
    %b = arith.muli %cs, %height : {tile}i32>
    %by_column = arith.addi %b, %rs : {tile}i32>
    %few_rows = arith.cmpi slt, %rs, %three : {tile}i32>
    %few_columns = arith.cmpi slt, %cs, %three : {tile}i32>
    %some = arith.andi %few_rows, %few_columns : {tile}i1>
    %xs = tt.splat %x : {POINTER} -> {tile}{POINTER}>
    %outs = tt.splat %out : {POINTER} -> {tile}{POINTER}>
    %from = tt.addptr %xs, %by_row : {tile}{POINTER}>, {tile}i32>
    %to = tt.addptr %outs, %by_column : {tile}{POINTER}>, {tile}i32>
    %v = tt.load %from : {tile}{POINTER}>
    tt.store %to, %v, %some : {tile}{POINTER}>
    """
    x, out = torch.rand(shape).cuda(), torch.zeros(columns, rows).cuda()
    launch(function(f"%x: {POINTER}, %out: {POINTER}", body), [x, out])
    expected = torch.zeros(columns, rows)
    expected[:3, :3] = x.cpu().T[:3, :3]
    assert torch.equal(out.cpu(), expected)


def test_launch_of_whole_blocks_writes_no_addresses(monkeypatch):
    """A bounded sum of two tensors loads and stores by blocks, and computes no mask or address."""
    monkeypatch.setattr(Progression, "compact", lambda self: pytest.fail("elements were written"))
    calls = []
    monkeypatch.setattr(
        memory,
        "read_block",
        lambda *given, read=memory.read_block: calls.append("load") or read(*given),
    )
    lines = [
        number("bound", 32),
        compared("some", "slt", "%at", "%bound"),
        load_at("v", "%at", "%some"),
        store("%v", "%some"),
    ]
    out, *_ = outcome(lines)
    assert out[:32].tolist() == list(range(64, 96))
    assert calls == ["load"]
