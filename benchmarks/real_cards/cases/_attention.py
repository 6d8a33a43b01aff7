"""Attention without heads, as course assignments measure it: a softmax of single operators."""

import math
from typing import Any

WIDTHS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)
BATCH = 8


def softmax(scores: Any) -> Any:
    """Return the softmax of the last dimension; autograd keeps each step."""
    import torch

    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]  # lives until the result is there
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attention(queries: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    """Return softmax(Q K^T / sqrt(d)) V."""
    import torch

    scores = torch.einsum("...md,...nd->...mn", queries, keys) / math.sqrt(keys.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...mn,...nd->...md", softmax(scores), values)


def inputs(length: int, width: int, *, requires_grad: bool = True) -> list[Any]:
    """Return queries, keys and values."""
    import torch

    shape = (BATCH, length, width)
    return [torch.randn(shape, device="cuda", requires_grad=requires_grad) for _ in range(3)]


def table(text: str) -> list[list[str]]:
    """Return the cells of a published table."""
    return [line.split() for line in text.strip().splitlines()]
