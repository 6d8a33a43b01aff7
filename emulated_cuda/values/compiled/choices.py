"""Choices between two tensors by a mask, without a branch for each element.

``torch.where`` branches for each element: if the mask is irregular, it takes eight times as long.
"""

from __future__ import annotations

import torch

_FEW = 2**12
"""For so few elements one operator of torch is faster than three."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def chosen(mask: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return elements of the first tensor where the mask is true, and of the second elsewhere.

    Args:
        mask: booleans; all three may have any shapes that broadcast.
        first: any dtype.
        second: of the same dtype.
    """
    dtype = first.dtype
    if max(first.numel(), second.numel(), mask.numel()) < _FEW or second.dtype is not dtype:
        return torch.where(mask, first, second)
    bits = _BITS[dtype.itemsize]
    base = second.view(bits)
    found = (first.view(bits) ^ base) * mask
    return found.bitwise_xor_(base).view(dtype)
