"""Compares loads, stores, atomic operations and control flow with plain Python."""

import itertools
import re

import pytest
import torch
from ttir import elements, function, launch, loaded, stored

from emulated_cuda.triton.ttir import KernelError

# ---- Memory ----


def test_store_leaves_masked_elements_and_load_replaces_them():
    """A masked load gives the other value, and a masked store changes nothing."""
    x, out = torch.arange(4.0).cuda(), torch.full((4,), -1.0).cuda()
    body = """
    %at = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>
    %two = arith.constant dense<2> : tensor<4xi32>
    %three = arith.constant dense<3> : tensor<4xi32>
    %other = arith.constant dense<9.0> : tensor<4xf32>
    %first = arith.cmpi slt, %at, %two : tensor<4xi32>
    %some = arith.cmpi slt, %at, %three : tensor<4xi32>
    %a = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %b = tt.addptr %a, %at : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    %c = tt.load %b, %first, %other : tensor<4x!tt.ptr<f32>>
    %d = tt.splat %y : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %e = tt.addptr %d, %at : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    tt.store %e, %c, %some : tensor<4x!tt.ptr<f32>>
    """
    launch(function("%x: !tt.ptr<f32>, %y: !tt.ptr<f32>", body), [x, out])
    assert out.tolist() == [0, 1, 9, -1]


ATOMICS = {
    "add": lambda a, b: a + b,
    "max": max,
    "min": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
}


@pytest.mark.parametrize("element", ["i32", "i64"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_operation_changes_one_element_after_the_other(name, element):
    """All elements change one number in turn, and each gets what was there before."""
    given = [5, -3, 12, 7]
    x, cell = elements(element, given), elements(element, [6])
    out = torch.zeros_like(x)
    pointer, kind = f"!tt.ptr<{element}>", f"tensor<4x{element}>"
    body = f"""
    {loaded("x", (4,), element)}
    %a = tt.splat %cell : {pointer} -> tensor<4x{pointer}>
    %c = tt.atomic_rmw {name}, acq_rel, gpu, %a, %x : (tensor<4x{pointer}>, {kind}) -> {kind}
    {stored("%c", "out", (4,), element)}
    """
    text = function(f"%p_x: {pointer}, %cell: {pointer}, %p_out: {pointer}", body)
    launch(text, [x, cell, out])
    steps = list(itertools.accumulate([6, *given], ATOMICS[name]))
    assert (out.tolist(), cell.item()) == (steps[:-1], steps[-1])


def test_poll_goes_on_if_the_value_is_there_and_is_an_error_if_no_program_writes_it():
    """``atomic_poll`` of a value that is there is true; one that never comes is a timeout."""
    flag, out = torch.full((1,), 3, dtype=torch.int32).cuda(), torch.zeros(1).int().cuda()
    body = """
    %c = arith.constant {} : i32
    %f = tt.atomic_poll acquire, gpu, %flag, %c : !tt.ptr<i32>, i32 -> i1
    %n = arith.extui %f : i1 to i32
    tt.store %out, %n : !tt.ptr<i32>
    """
    arguments = "%flag: !tt.ptr<i32>, %out: !tt.ptr<i32>"
    launch(function(arguments, body.format(3)), [flag, out])
    assert out.tolist() == [1]
    with pytest.raises(
        KernelError, match="waits for a value that no earlier program of the grid has written"
    ):
        launch(function(arguments, body.format(4)), [flag, out])


@pytest.mark.parametrize("element", ["f64", "f32", "f16", "bf16"])
def test_atomic_sum_of_many_programs_is_complete(element):
    """Each of 100 programs adds 1 to the same number, in each type."""
    cell = elements(element, [0.0])
    pointer = f"!tt.ptr<{element}>"
    body = f"""
    %one = arith.constant 1.000000e+00 : {element}
    %yes = arith.constant true
    %c = tt.atomic_rmw fadd, acq_rel, gpu, %x, %one, %yes : ({pointer}, {element}, i1) -> {element}
    """
    launch(function(f"%x: {pointer}", body), [cell], (10, 5, 2))
    assert cell.item() == 100


def test_compare_and_swap_succeeds_once():
    """Of all programs that swap 0 for 1, only the first finds 0."""
    lock, out = torch.zeros(1, dtype=torch.int32).cuda(), torch.zeros(8, dtype=torch.int32).cuda()
    body = """
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %id = tt.get_program_id x : i32
    %old = tt.atomic_cas acq_rel, gpu, %lock, %zero, %one : (!tt.ptr<i32>, i32, i32) -> i32
    %at = tt.addptr %out, %id : !tt.ptr<i32>, i32
    tt.store %at, %old : !tt.ptr<i32>
    """
    launch(function("%lock: !tt.ptr<i32>, %out: !tt.ptr<i32>", body), [lock, out], (8, 1, 1))
    assert (lock.item(), out.tolist()) == (1, [0, 1, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("verb", ["load", "store"])
@pytest.mark.parametrize("step", [0, 2**40, 2, -(2**50)])
def test_address_that_a_card_refuses_is_an_error(verb, step):
    """Addresses of no allocation, and those between elements, are errors that name the program."""
    x = torch.zeros(4).cuda()
    start = step if step == 0 else x.data_ptr() + step
    body = (
        "%c = tt.load %x : !tt.ptr<f32>"
        if verb == "load"
        else "%c = arith.constant 1.0 : f32\ntt.store %x, %c : !tt.ptr<f32>"
    )
    text = function("%x: !tt.ptr<f32>", body)
    problem = "misaligned address" if step == 2 else "an illegal memory access was encountered"
    words = {"load": "reads", "store": "writes"}[verb]
    with pytest.raises(KernelError, match=f"{problem}: the kernel kernel {words} 4 bytes at 0x"):
        launch(text, [start])


def test_pinned_memory_of_the_host_may_be_touched():
    """A kernel may read and write pinned memory of the host, as on a card."""
    x = torch.ones(1).pin_memory()
    body = "%c = arith.constant 5.0 : f32\ntt.store %x, %c : !tt.ptr<f32>"
    launch(function("%x: !tt.ptr<f32>", body), [x])
    assert x.item() == 5


def test_accesses_report_the_first_refused_element():
    """The address in an error is that of the first element that a card would refuse."""
    x = torch.zeros(4).cuda()
    body = """
    %far = arith.constant dense<[0, 1, 99999999999, 3]> : tensor<4xi64>
    %a = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %b = tt.addptr %a, %far : tensor<4x!tt.ptr<f32>>, tensor<4xi64>
    %c = tt.load %b : tensor<4x!tt.ptr<f32>>
    """
    address = re.escape(f"0x{x.data_ptr() + 4 * 99999999999:x}")
    with pytest.raises(KernelError, match=address) as error:
        launch(function("%x: !tt.ptr<f32>", body), [x])
    assert error.value.code == KernelError.ILLEGAL_ADDRESS


@pytest.mark.parametrize("wrong", [0, 255, 256, 511])
@pytest.mark.parametrize("distance", [2**40, -(2**40), 2])
def test_accesses_of_many_elements_stop_at_the_refused_one(wrong, distance):
    """All elements before it are written and none after it, and the error has its address."""
    x = torch.zeros(512, dtype=torch.int32).cuda()
    places = [4 * i + (distance if i == wrong else 0) for i in range(512)]
    body = f"""
    %far = arith.constant dense<{places}> : tensor<512xi64>
    %one = arith.constant dense<1> : tensor<512xi32>
    %a = tt.ptr_to_int %x : !tt.ptr<i32> -> i64
    %b = tt.splat %a : i64 -> tensor<512xi64>
    %c = arith.addi %b, %far : tensor<512xi64>
    %d = tt.int_to_ptr %c : tensor<512xi64> -> tensor<512x!tt.ptr<i32>>
    tt.store %d, %one : tensor<512x!tt.ptr<i32>>
    """
    address = f"0x{x.data_ptr() + places[wrong]:x}"
    with pytest.raises(KernelError, match=address):
        launch(function("%x: !tt.ptr<i32>", body), [x])
    assert x.sum() == x[:wrong].sum() == wrong


# ---- Control flow ----


def test_programs_that_branch_and_loop_differently_have_their_own_results():
    """Each program loops as often as its number says, and leaves early if it is odd."""
    out = torch.full((8,), -1, dtype=torch.int32).cuda()
    body = """
      %zero = arith.constant 0 : i32
      %one = arith.constant 1 : i32
      %two = arith.constant 2 : i32
      %id = tt.get_program_id x : i32
      %at = tt.addptr %out, %id : !tt.ptr<i32>, i32
      %odd = arith.remsi %id, %two : i32
      %leaves = arith.cmpi eq, %odd, %one : i32
      cf.cond_br %leaves, ^bb1, ^bb2
    ^bb1:  // pred: ^bb0
      tt.return
    ^bb2:  // pred: ^bb0
      %sum = scf.for %i = %zero to %id step %one iter_args(%s = %zero) -> (i32)  : i32 {
        %t = arith.addi %s, %i : i32
        scf.yield %t : i32
      }
      %last:2 = scf.while (%k = %id, %n = %zero) : (i32, i32) -> (i32, i32) {
        %more = arith.cmpi sgt, %k, %zero : i32
        scf.condition(%more) %k, %n : i32, i32
      } do {
      ^bb0(%k: i32, %n: i32):
        %l = arith.subi %k, %two : i32
        %m = arith.addi %n, %one : i32
        scf.yield %l, %m : i32, i32
      }
      %large = arith.cmpi sgt, %id, %two : i32
      %bonus = scf.if %large -> (i32) {
        %h = arith.constant 100 : i32
        scf.yield %h : i32
      } else {
        scf.yield %zero : i32
      }
      %u = arith.addi %sum, %last#1 : i32
      %v = arith.addi %u, %bonus : i32
      tt.store %at, %v : !tt.ptr<i32>
    """
    launch(function("%out: !tt.ptr<i32>", body), [out], (8, 1, 1))
    expected = [sum(range(i)) + i // 2 + 100 * (i > 2) if i % 2 == 0 else -1 for i in range(8)]
    assert out.tolist() == expected


def test_branches_and_loops_without_results_store():
    """A branch and a loop may only store, and say nothing at their end."""
    out = torch.zeros(4, dtype=torch.int32).cuda()
    body = """
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %id = tt.get_program_id x : i32
    %at = tt.addptr %out, %id : !tt.ptr<i32>, i32
    %some = arith.cmpi sgt, %id, %one : i32
    scf.if %some {
      tt.store %at, %id : !tt.ptr<i32>
    } else {
      scf.for %i = %zero to %id step %one  : i32 {
        %old = tt.load %at : !tt.ptr<i32>
        %new = arith.addi %old, %one : i32
        tt.store %at, %new : !tt.ptr<i32>
      }
    }
    """
    launch(function("%out: !tt.ptr<i32>", body), [out], (4, 1, 1))
    assert out.tolist() == [0, 1, 2, 3]


def test_loop_that_never_ends_is_an_error():
    """A loop without an end is an error that says what it may wait for."""
    body = """
    %yes = arith.constant true
    scf.while : () -> () {
      scf.condition(%yes)
    } do {
      scf.yield
    }
    """
    with pytest.raises(KernelError, match=r"did not end after [\d,]+ iterations"):
        launch(function("%out: !tt.ptr<i32>", body), [torch.zeros(1).cuda()])


def test_calls_return_values():
    """A function that Triton has not inlined is called with arguments and returns a value."""
    x = torch.ones(4).cuda()
    text = (
        function(
            "%p_x: !tt.ptr<f32>, %p_out: !tt.ptr<f32>",
            loaded("x", (4,), "f32")
            + "\n%y = tt.call @twice(%x) : (tensor<4xf32>) -> tensor<4xf32>\n"
            + stored("%y", "out", (4,), "f32"),
        ).removesuffix("}\n")
        + """
    tt.func private @twice(%a: tensor<4xf32>) -> tensor<4xf32> attributes {noinline = true} {
      %b = arith.addf %a, %a : tensor<4xf32>
      tt.return %b : tensor<4xf32>
    }
    }
    """
    )
    out = torch.zeros(4).cuda()
    launch(text, [x, out])
    assert out.tolist() == [2] * 4


def test_number_of_programs_is_that_of_the_grid():
    """Each program knows the lengths of the grid and its position in it."""
    out = torch.zeros(3, dtype=torch.int32).cuda()
    body = "\n".join(
        f"""
        %n{i} = tt.get_num_programs {axis} : i32
        %i{i} = arith.constant {i} : i32
        %p{i} = tt.addptr %out, %i{i} : !tt.ptr<i32>, i32
        tt.store %p{i}, %n{i} : !tt.ptr<i32>
        """
        for i, axis in enumerate("xyz")
    )
    launch(function("%out: !tt.ptr<i32>", body), [out], (2, 3, 4))
    assert out.tolist() == [2, 3, 4]
