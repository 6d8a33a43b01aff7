"""Scaled dot-product attention: the flash, memory-efficient and cuDNN forms, and their backward.

The seed of the dropout is stored where the operators store theirs, so that the backward pass drops
the same elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pytest_cka_memory.emulated.values.equivalents.softmax_attention import (
    Options,
    backward,
    forward,
    new_seed,
    refuse,
    seed_in,
)
from pytest_cka_memory.emulated.values.results import Everywhere, Fitted

# ---- aten/src/ATen/native/transformers/cuda/attention.cu: (batch, heads, positions, size) ----


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, None, options)
    seed = Everywhere(options.seed)
    return output, Fitted(denominator), None, None, 0, 0, seed, Everywhere(0), None


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    return backward(grad_out, query, key, value, None, options)[:3]


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, attn_bias, options)
    return output, Fitted(denominator), Everywhere(options.seed), Everywhere(0)


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    of_q, of_k, of_v, of_scores = backward(grad_out, query, key, value, attn_bias, options)
    of_bias = None
    if attn_bias is not None and attn_bias.numel():
        of_bias = of_scores.sum_to_size(attn_bias.shape)
    return of_q, of_k, of_v, of_bias


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    options = Options(scale, int(is_causal), dropout_p, new_seed(dropout_p))
    output, denominator = forward(query, key, value, attn_bias, options)
    seeds = Everywhere(options.seed), Everywhere(0)
    # Torch's operator does not run, so nothing else gives the results their type.
    output = output.to(query.dtype)
    return output, Fitted(denominator[..., None]), None, None, 0, 0, *seeds, None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Any,
    philox_offset: Any,
    attn_bias: Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    options = Options(scale, int(is_causal), dropout_p, seed_in(philox_seed))
    gradients = backward(grad_out, query, key, value, bias, options)[:3]
    return tuple(gradient.to(query.dtype) for gradient in gradients)


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> Any:
    refuse({**others, "cum_seq_q": cum_seq_q})
    settings = (attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask)
    return cudnn(query, key, value, *settings, scale=scale)


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten::_cudnn_attention_forward": cudnn_forward,
}
