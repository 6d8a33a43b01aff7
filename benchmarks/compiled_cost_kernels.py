"""The kernels of compiled_cost.py: Triton reads them from a file."""

import triton
import triton.language as tl


@triton.jit
def add(out, x, y, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < count
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def gelu(out, x, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < count)
    tl.store(out + at, 0.5 * value * (1 + tl.erf(value * 0.7071067811865476)), mask=at < count)


@triton.jit
def softmax(out, x, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.program_id(0) * columns
    values = tl.load(x + row + at, mask=at < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row + at, values / tl.sum(values, 0), mask=at < columns)


@triton.jit
def layer_norm(out, x, columns, epsilon, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.program_id(0) * columns
    values = tl.load(x + row + at, mask=at < columns, other=0.0)
    mean = tl.sum(values, 0) / columns
    centered = tl.where(at < columns, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / columns + epsilon)
    tl.store(out + row + at, centered * scale, mask=at < columns)


@triton.jit
def sum_rows(out, x, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * columns + at, mask=at < columns, other=0.0), 0))


@triton.jit
def product(out, x, y, count, SIZE: tl.constexpr, STEP: tl.constexpr):
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inner = tl.arange(0, STEP)
    found = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, count, STEP):
        left = tl.load(x + rows[:, None] * count + start + inner[None, :])
        right = tl.load(y + (start + inner[:, None]) * count + columns[None, :])
        found = tl.dot(left, right, found)
    tl.store(out + rows[:, None] * count + columns[None, :], found)


@triton.jit
def sort(out, x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.sort(tl.load(x + at)))


@triton.jit
def attention(out, q, k, v, length, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1) * length * WIDTH
    rows, inner = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = tl.load(q + head + rows[:, None] * WIDTH + inner[None, :]) * scale
    largest = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, length, ROWS):
        columns = start + tl.arange(0, ROWS)
        key = tl.load(k + head + columns[None, :] * WIDTH + inner[:, None])
        scores = tl.dot(query, key)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(v + head + columns[:, None] * WIDTH + inner[None, :])
        found = found * shrink[:, None] + tl.dot(weights, value)
        largest = new
    tl.store(out + head + rows[:, None] * WIDTH + inner[None, :], found / total[:, None])


@triton.jit
def count(out, x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.atomic_add(out + tl.load(x + at), 1)


@triton.jit
def take(out, x, places, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(places + at // WIDTH)
    tl.store(out + at, tl.load(x + row * WIDTH + at % WIDTH))


@triton.jit
def dropout(out, x, count, rate, seed, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    kept = tl.rand(seed, at) > rate
    value = tl.load(x + at, mask=at < count)
    tl.store(out + at, tl.where(kept, value / (1 - rate), 0.0), mask=at < count)
