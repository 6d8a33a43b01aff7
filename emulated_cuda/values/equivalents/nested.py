"""Parts of attention on strided nested tensors whose results CUDA pads and the CPU does not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent

_split_heads = operator_of("aten::_transform_bias_rescale_qkv")
_MULTIPLE = 8  # of positions, so that products can use tensor cores


@equivalent(
    "aten::_transform_bias_rescale_qkv",
    source="aten/src/ATen/native/transformers/cuda/attention.cu: transform_bias_rescale_qkv_cuda",
)
def split_heads(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, (batch, heads, positions, size); positions beyond a sequence are 0.

    If `qkv` is nested, the number of positions is a multiple of 8.
    """
    if not qkv.is_nested:
        return tuple(_split_heads(qkv, qkv_bias, num_heads))
    sequences = qkv.unbind()
    longest = max((sequence.shape[0] for sequence in sequences), default=0)
    positions = -(-longest // _MULTIPLE) * _MULTIPLE
    parts = [_split_heads(sequence[None], qkv_bias, num_heads) for sequence in sequences]
    return tuple(
        torch.cat([pad(part, (0, 0, 0, positions - part.shape[2])) for part in kind])
        for kind in zip(*parts, strict=True)
    )
