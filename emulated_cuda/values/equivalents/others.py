"""Fused dropout, log sigmoid, softmax and its gradient, bags of embeddings and the CTC loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent
from emulated_cuda.values.results import Fitted

_DROPOUT = "aten/src/ATen/native/cuda/Dropout.cu"
# CUDA converts half precision inside the kernel if a result in single precision is asked for, and
# gradients back; the CPU refuses to.
_SOFTMAX = "aten/src/ATen/native/SoftMax.cpp: half_to_float, which only CUDA accepts"
_softmax = operator_of("aten::_softmax")
_softmax_backward = operator_of("aten::_softmax_backward_data")
_log_softmax_backward = operator_of("aten::_log_softmax_backward_data")


@equivalent(
    "aten::_fused_dropout", source=f"{_DROPOUT}: p is the probability to keep, masks are bytes"
)
def fused_dropout(self: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    mask = torch.rand(self.shape, generator=generator) < p
    return self * mask / p, mask.to(torch.uint8)


@equivalent("aten::_masked_scale", source=f"{_DROPOUT}: masked_scale_kernel")
def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


@equivalent(
    "aten::log_sigmoid_backward",
    source="aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu: its buffer is empty",
)
def log_sigmoid_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    return grad_output * torch.sigmoid(-self)


@equivalent("aten::_softmax", source=_SOFTMAX)
def softmax(self: Tensor, dim: int, half_to_float: bool) -> Any:
    return _softmax(self.float() if half_to_float else self, dim, False)


@equivalent("aten::_softmax_backward_data", source=_SOFTMAX)
def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Any:
    return _softmax_backward(grad_output, output, dim, grad_output.dtype).to(input_dtype)


@equivalent("aten::_log_softmax_backward_data", source=_SOFTMAX)
def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Any:
    return _log_softmax_backward(grad_output, output, dim, grad_output.dtype).to(input_dtype)


@equivalent(
    *("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor"),
    source="aten/src/ATen/native/LossCTC.cpp: on the concatenated targets that cuDNN takes",
)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
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


@equivalent(
    *("aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
    source="aten/src/ATen/native/cuda/EmbeddingBag.cu: it always returns the bag of each index",
)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int,
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
