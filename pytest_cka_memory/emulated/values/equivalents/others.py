"""Fused dropout, log sigmoid, softmax, bags of embeddings and the CTC loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_cka_memory.emulated.torch_private import operator_of
from pytest_cka_memory.emulated.values.results import Fitted


# aten/src/ATen/native/cuda/Dropout.cu: p is the probability to keep, the mask is of bytes
def fused_dropout(values: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    mask = torch.rand(values.shape, generator=generator) < p
    return values * mask / p, mask.to(torch.uint8)


# aten/src/ATen/native/cuda/Dropout.cu
def masked_scale(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return values * mask * scale


# derivative of log(sigmoid(x)); on CUDA the buffer that the CPU uses is empty
def log_sigmoid_backward(gradient: Tensor, values: Tensor, buffer: Tensor) -> Tensor:
    return gradient * torch.sigmoid(-values)


# aten/src/ATen/native/SoftMax.cpp: CUDA converts half precision inside the kernel if a result in
# single precision is asked for, and gradients back; the CPU refuses to
def softmax(name: str) -> Callable[..., Any]:
    operator = operator_of(name)

    def compute(values: Tensor, dim: int, half_to_float: bool) -> Any:
        return operator(values.float() if half_to_float else values, dim, False)

    return compute


def softmax_backward(name: str) -> Callable[..., Any]:
    operator = operator_of(name)

    def compute(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        return operator(gradient, output, dim, gradient.dtype).to(input_dtype)

    return compute


# aten/src/ATen/native/LossCTC.cpp, on targets that are concatenated as cuDNN takes them
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    deterministic: bool,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    lengths = [
        value.tolist() if isinstance(value, Tensor) else list(value)
        for value in (input_lengths, target_lengths)
    ]
    targets = targets.long()
    losses, alpha = operator_of("aten::_ctc_loss")(
        log_probs, targets, *lengths, blank, zero_infinity
    )
    gradient = operator_of("aten::_ctc_loss_backward")(
        torch.ones_like(losses), log_probs, targets, *lengths, losses, alpha, blank, zero_infinity
    )
    return losses, gradient


# aten/src/ATen/native/cuda/EmbeddingBag.cu: it always returns the bag of each index, and a size for
# the last offset too
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    output, _, sizes, largest = operator_of("aten::_embedding_bag")(
        *(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights),
        *(include_last_offset, padding_idx),
    )
    starts = offsets.long()
    if not include_last_offset:
        starts = torch.cat([starts, torch.tensor([indices.numel()])])
    bags = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff())
    return output, Fitted(bags.to(indices.dtype)), Fitted(sizes), Fitted(largest)


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": embedding_bag,
    "aten::_embedding_bag_forward_only": embedding_bag,
    "aten::_fused_dropout": fused_dropout,
    "aten::_masked_scale": masked_scale,
    "aten::log_sigmoid_backward": log_sigmoid_backward,
    "aten::_softmax": softmax("aten::_softmax"),
    "aten::_log_softmax": softmax("aten::_log_softmax"),
    "aten::_softmax_backward_data": softmax_backward("aten::_softmax_backward_data"),
    "aten::_log_softmax_backward_data": softmax_backward("aten::_log_softmax_backward_data"),
    "aten::_cudnn_ctc_loss": ctc_loss,
    "aten::_cudnn_ctc_loss.Tensor": ctc_loss,
}
