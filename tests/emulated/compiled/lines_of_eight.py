"""Kernels of four programs that load and store eight elements each, by positions of their own."""

import functools

import torch
from ttir import by_elements, function, launch

from emulated_cuda.triton.ttir import KernelError

POINTER = "!tt.ptr<f32>"
LINE = f"""
%id = tt.get_program_id x : i32
%ids = tt.splat %id : i32 -> tensor<8xi32>
%range = tt.make_range {{end = 8 : i32, start = 0 : i32}} : tensor<8xi32>
%eight = arith.constant dense<8> : tensor<8xi32>
%zeros = arith.constant dense<0> : tensor<8xi32>
%other = arith.constant dense<-5.0> : tensor<8xf32>
%own = arith.muli %ids, %eight : tensor<8xi32>
%at = arith.addi %own, %range : tensor<8xi32>
%xs = tt.splat %x : {POINTER} -> tensor<8x{POINTER}>
%outs = tt.splat %out : {POINTER} -> tensor<8x{POINTER}>
%to = tt.addptr %outs, %at : tensor<8x{POINTER}>, tensor<8xi32>
"""
"""Eight elements for each program: their positions and where a result goes."""


def number(name, value, element="i32"):
    """Return the text of a constant in all elements."""
    return f"%{name} = arith.constant dense<{value}> : tensor<8x{element}>"


def load_at(name, positions, mask="", element="i32"):
    """Return the text that loads elements of `x`, with -5 where the mask is false."""
    rest = f", {mask}, %other" if mask else ""
    return (
        f"%p_{name} = tt.addptr %xs, {positions} : tensor<8x{POINTER}>, tensor<8x{element}>\n"
        f"%{name} = tt.load %p_{name}{rest} : tensor<8x{POINTER}>"
    )


def store(value, mask="", to="%to"):
    """Return the text that stores elements."""
    return f"tt.store {to}, {value}{', ' + mask if mask else ''} : tensor<8x{POINTER}>"


def compared(name, how, left, right, element="i32"):
    """Return the text of a comparison."""
    return f"%{name} = arith.cmpi {how}, {left}, {right} : tensor<8x{element}>"


@functools.cache
def own_pool():
    """Return a pool in which nothing else lies behind a tensor: it has segments of 12 MB only."""
    return torch.cuda.MemPool()


def outcome(lines):
    """Return what a kernel of four programs writes, and its error."""
    with torch.cuda.use_mem_pool(own_pool()):
        x = torch.arange(12 * 2**20 // 4, dtype=torch.float32).cuda()
        out = torch.zeros(12 * 2**20 // 4).cuda()
    text = function(f"%x: {POINTER}, %out: {POINTER}", LINE + "\n".join(lines))
    try:
        launch(text, [x[64:], out], (4, 1, 1))
    except KernelError as error:
        return out.cpu(), str(error), x.data_ptr(), out.data_ptr()
    return out.cpu(), "", 0, 0


def compare(lines):
    """Compare a kernel with the same by an address for each element; return its error.

    Values, what is written before the error, and the error's text must be the same.
    """
    by_block = outcome(lines)
    with by_elements():
        by_element = outcome(lines)
    assert torch.equal(by_block[0], by_element[0])
    assert by_block[1:] == by_element[1:]
    return by_block[1]
