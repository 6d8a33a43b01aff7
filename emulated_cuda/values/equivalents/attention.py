"""Scaled dot-product attention: the flash, memory-efficient and cuDNN forms, and their backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emulated_cuda.values.equivalents.table import equivalent
from emulated_cuda.values.results import Everywhere, Fitted

TOP_LEFT, BOTTOM_RIGHT = 1, 2  # aten/.../mem_eff_attention/kernel_forward.h: CustomMaskType


@dataclass(frozen=True)
class Options:
    """What the forms of attention differ in, by the names that torch's operators use."""

    scale: float | None = None
    """Factor of q kᵀ; None for 1 / sqrt(size of a head)."""
    causal: int = 0
    """0 for no causal mask, else ``TOP_LEFT`` or ``BOTTOM_RIGHT``: the corner it starts in."""
    dropout: float = 0.0
    seed: int = 0
    """Seed of the random numbers of dropout, from which the backward operator repeats them."""
    left: int = -1
    """How many keys before its own position a query sees; -1 for all."""
    right: int = -1
    """How many keys after its own position a query sees; -1 for all."""


def _visible(queries: int, keys: int, options: Options) -> Tensor | None:
    """Return which keys each query sees; None for all."""
    if not options.causal and options.left < 0 and options.right < 0:
        return None
    shift = keys - queries if options.causal == BOTTOM_RIGHT or not options.causal else 0
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - shift
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if options.causal:
        seen &= distance <= 0
    if options.left >= 0:
        seen &= distance >= -options.left
    if options.right >= 0:
        seen &= distance <= options.right
    return seen


def _kept(shape: torch.Size, options: Options) -> Tensor:
    """Return which weights dropout keeps."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.rand(shape, generator=generator) >= options.dropout


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, options: Options) -> Any:
    """Return the softmax, the logarithm of its denominator and the scale."""
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    seen = _visible(q.shape[-2], k.shape[-2], options)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    denominator = torch.logsumexp(scores, -1)
    return torch.nan_to_num(torch.exp(scores - denominator[..., None])), denominator, scale


def _heads(key: Tensor, query: Tensor) -> Tensor:
    """Repeat heads of keys or values that several query heads share."""
    repeats = query.shape[-3] // key.shape[-3]
    return key if repeats == 1 else key.repeat_interleave(repeats, -3)


def _wide(tensor: Tensor | None) -> Any:
    """Return `tensor` in at least single precision."""
    low = tensor is not None and tensor.dtype != torch.float64
    return tensor.float() if low and tensor is not None else tensor


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: Options) -> Any:
    """Return the output and the logarithm of the denominator; heads come before positions."""
    q, k, v = _wide(q), _heads(_wide(k), q), _heads(_wide(v), q)
    weights, denominator, _ = _weights(q, k, bias, options)
    if options.dropout:
        weights = weights * _kept(weights.shape, options) / (1 - options.dropout)
    return weights @ v, denominator


def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, options: Options) -> Any:
    """Return the gradients of q, k, v and of the scores, which is that of the bias."""
    gradient, wide_q = _wide(gradient), _wide(q)
    wide_k, wide_v = _heads(_wide(k), q), _heads(_wide(v), q)
    weights, _, scale = _weights(wide_q, wide_k, bias, options)
    factor: Any = 1.0
    if options.dropout:
        factor = _kept(weights.shape, options) / (1 - options.dropout)
    of_v = (weights * factor).transpose(-2, -1) @ gradient
    of_weights = gradient @ wide_v.transpose(-2, -1) * factor
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_q = of_scores @ wide_k * scale
    of_k = of_scores.transpose(-2, -1) @ wide_q * scale
    return of_q, _shared(of_k, k), _shared(of_v, v), of_scores


def _shared(gradient: Tensor, key: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a head of `key`."""
    repeats = gradient.shape[-3] // key.shape[-3]
    if repeats == 1:
        return gradient
    shared: Tensor = gradient.unflatten(-3, (key.shape[-3], repeats)).sum(-3)
    return shared


def new_seed(dropout: float) -> int:
    """Draw the seed of a dropout from torch's generator of the CPU; 0 if nothing is dropped."""
    return int(torch.randint(2**31, ())) if dropout else 0


def seed_in(stored: Any) -> int:
    """Return the seed that the forward operator stored in its tensor of random state."""
    has_one = isinstance(stored, Tensor) and stored.numel()
    return int(stored.reshape(-1)[0].to(torch.int64)) if has_one else 0


def refuse(options: dict[str, Any]) -> None:
    """Raise `NotImplementedError` if one of these options of an operator is given."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"attention with {name} is not computed")


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


@equivalent("aten::_scaled_dot_product_cudnn_attention_backward", source=_BACKWARD)
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
    return backward(grad_out, query, key, value, bias, options)[:3]
