"""Scaled dot-product attention: the flash, memory-efficient and cuDNN forms, and their backward.

Tensors are (batch, heads, positions, size). The seed of the dropout is stored where the operators
store theirs, so that the backward pass drops the same elements.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from emulated_cuda.values.equivalents.softmax_attention import (
    Options,
    backward,
    forward,
    new_seed,
    refuse,
    seed_in,
)
from emulated_cuda.values.equivalents.table import equivalent
from emulated_cuda.values.results import Everywhere, Fitted

_FORWARD = "aten/src/ATen/native/transformers/cuda/attention.cu"
_BACKWARD = "aten/src/ATen/native/transformers/cuda/attention_backward.cu"


@equivalent("aten::_scaled_dot_product_flash_attention", source=_FORWARD)
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, None, options)
    seed = Everywhere(options.seed)
    return output, Fitted(denominator), None, None, 0, 0, seed, Everywhere(0), None


@equivalent("aten::_scaled_dot_product_flash_attention_backward", source=_BACKWARD)
def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    scale: float | None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    return backward(grad_out, query, key, value, None, options)[:3]


@equivalent("aten::_scaled_dot_product_efficient_attention", source=_FORWARD)
def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, attn_bias, options)
    return output, Fitted(denominator), Everywhere(options.seed), Everywhere(0)


@equivalent("aten::_scaled_dot_product_efficient_attention_backward", source=_BACKWARD)
def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    philox_seed: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    of_q, of_k, of_v, of_scores = backward(grad_out_, query, key, value, attn_bias, options)
    of_bias = None
    if attn_bias is not None and attn_bias.numel():
        of_bias = of_scores.sum_to_size(attn_bias.shape)
    return of_q, of_k, of_v, of_bias


@equivalent("aten::_scaled_dot_product_cudnn_attention", source=_FORWARD)
def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, attn_bias, options)
    seeds = Everywhere(options.seed), Everywhere(0)
    # Torch's operator does not run, so nothing else gives the results their type.
    output = output.to(query.dtype)
    return output, Fitted(denominator[..., None]), None, None, 0, 0, *seeds, None


@equivalent("aten::_cudnn_attention_forward", source=f"{_FORWARD}: _cudnn_attention_forward")
def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    **others: Any,
) -> Any:
    refuse({**others, "cum_seq_q": cum_seq_q})
    return cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale)


@equivalent(
    *("aten::_scaled_dot_product_cudnn_attention_backward", "aten::_cudnn_attention_backward"),
    source=_BACKWARD,
)
def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    philox_seed: Any,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    refuse({"cum_seq_q": cum_seq_q if cum_seq_q is not None and cum_seq_q.numel() else None})
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    gradients = backward(grad_out, query, key, value, bias, options)[:3]
    return tuple(gradient.to(query.dtype) for gradient in gradients)
