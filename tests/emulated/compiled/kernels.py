"""Kernels of Triton for the tests; Triton reads their source from this file."""

import triton
from triton import language as tl
from triton.language.extra import libdevice


@triton.jit
def softmax_of_rows(out, x, columns, stride, size: tl.constexpr):
    """Softmax of each row; a program has one row."""
    row = tl.program_id(0)
    at = tl.arange(0, size)
    values = tl.load(x + row * stride + at, mask=at < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + at, values / tl.sum(values, 0), mask=at < columns)


@triton.autotune(
    configs=[
        triton.Config({"rows": 32, "inner": 32}, num_warps=2),
        triton.Config({"rows": 16, "inner": 16}, num_warps=1),
    ],
    key=["n"],
    restore_value=["c"],
)
@triton.jit
def product(a, b, c, n, rows: tl.constexpr, inner: tl.constexpr):
    """Product of square matrices in blocks, chosen by the autotuner."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * rows + tl.arange(0, rows)
    total = tl.zeros((rows, rows), dtype=tl.float32)
    for start in range(0, n, inner):
        k = start + tl.arange(0, inner)
        left = tl.load(
            a + row[:, None] * n + k[None, :], mask=(row[:, None] < n) & (k[None, :] < n), other=0.0
        )
        right = tl.load(
            b + k[:, None] * n + column[None, :],
            mask=(k[:, None] < n) & (column[None, :] < n),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (row[:, None] < n) & (column[None, :] < n)
    tl.store(c + row[:, None] * n + column[None, :], total, mask=inside)


@triton.jit
def random_numbers(out, seed, size: tl.constexpr):
    """Integers of Philox for the counters 0, 1, 2, ..."""
    at = tl.arange(0, size)
    a, b, c, d = tl.randint4x(seed, at)
    tl.store(out + at * 4, a)
    tl.store(out + at * 4 + 1, b)
    tl.store(out + at * 4 + 2, c)
    tl.store(out + at * 4 + 3, d)


@triton.jit
def add_under_a_lock(lock, total, given):
    """Each program adds to a number that only the owner of a lock may change."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + tl.load(given + tl.program_id(0)))
    tl.atomic_xchg(lock, 0)


@triton.jit
def sorted_and_ranked(out, x, size: tl.constexpr):
    """The sorted numbers, then the running sums, and a function of libdevice."""
    at = tl.arange(0, size)
    values = tl.load(x + at)
    tl.store(out + at, tl.sort(values))
    tl.store(out + size + at, tl.cumsum(values, 0))
    tl.store(out + 2 * size + at, libdevice.atan2(values, values * values + 1))


@triton.jit
def through_descriptor(x, out, rows, columns, block: tl.constexpr):
    """Copy a block by descriptors that the device makes."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [block, block])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [block, block])
    at = [tl.program_id(0) * block, tl.program_id(1) * block]
    target.store(at, source.load(at) * 2)


@triton.jit
def through_host_descriptor(x, out, block: tl.constexpr):
    """Copy a block by descriptors that the host has made."""
    at = [tl.program_id(0) * block, 0]
    out.store(at, x.load(at) + 1)


@triton.jit
def write_far(x, distance):
    """Write far behind a tensor."""
    tl.store(x + distance, 1.0)


@triton.jit
def copy(out, x, size: tl.constexpr):
    """Copy a block."""
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def clock(out, x, size: tl.constexpr):
    """Store the time, which inline assembly reads, beside a copy."""
    time = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out, time)
    tl.store(out + 1, tl.load(x))


@triton.jit
def copy_by_assembly(out, x, size: tl.constexpr):
    """Copy int32 numbers by instructions of assembly, which are not computed."""
    at = tl.arange(0, size)
    tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1]; st.global.b32 [$2], $0;",
        "=r,l,l",
        [x + at, out + at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
