"""A kernel of Triton, which reads its source from a file."""

import triton
from triton import language as tl


@triton.jit
def add_one(pointer, size: tl.constexpr):
    """Add one to each of `size` numbers."""
    positions = pointer + tl.arange(0, size)
    tl.store(positions, tl.load(positions) + 1)
