"""Scaled dot-product attention: the flash, memory-efficient and cuDNN forms, and their backward.

All compute softmax(q kᵀ · scale + bias) v in single precision. The seed of the dropout is stored
where the operators store theirs, so that the backward pass drops the same elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_cka_memory.emulated.values.results import Everywhere, Fitted

_TOP_LEFT, _BOTTOM_RIGHT = 1, 2  # aten/.../mem_eff_attention/kernel_forward.h: CustomMaskType


@dataclass(frozen=True)
class _Options:
    scale: float | None = None
    causal: int = 0
    dropout: float = 0.0
    seed: int = 0
    left: int = -1
    right: int = -1


def _visible(queries: int, keys: int, options: _Options) -> Tensor | None:
    """Return which keys each query sees; None for all."""
    if not options.causal and options.left < 0 and options.right < 0:
        return None
    shift = keys - queries if options.causal == _BOTTOM_RIGHT or not options.causal else 0
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - shift
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if options.causal:
        seen &= distance <= 0
    if options.left >= 0:
        seen &= distance >= -options.left
    if options.right >= 0:
        seen &= distance <= options.right
    return seen


def _kept(shape: torch.Size, options: _Options) -> Tensor:
    generator = torch.Generator().manual_seed(options.seed)
    return torch.rand(shape, generator=generator) >= options.dropout


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, options: _Options) -> Any:
    """Return the softmax, and the logarithm of its denominator."""
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
    low = tensor is not None and tensor.dtype != torch.float64
    return tensor.float() if low and tensor is not None else tensor


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, options: _Options) -> Any:
    """Return the output and the logarithm of the denominator; heads come before positions."""
    q, k, v = _wide(q), _heads(_wide(k), q), _heads(_wide(v), q)
    weights, denominator, _ = _weights(q, k, bias, options)
    if options.dropout:
        weights = weights * _kept(weights.shape, options) / (1 - options.dropout)
    return weights @ v, denominator


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, options: _Options
) -> Any:
    """Return the gradients of q, k, v and of the scores, which is that of the bias."""
    gradient, wide_q = _wide(gradient), _wide(q)
    wide_k, wide_v = _heads(_wide(k), q), _heads(_wide(v), q)
    weights, _, scale = _weights(wide_q, wide_k, bias, options)
    factor = 1.0
    if options.dropout:
        factor = _kept(weights.shape, options) / (1 - options.dropout)
    of_v = (weights * factor).transpose(-2, -1) @ gradient
    of_weights = gradient @ wide_v.transpose(-2, -1) * factor
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_q = of_scores @ wide_k * scale
    of_k = of_scores.transpose(-2, -1) @ wide_q * scale
    return of_q, _shared(of_k, k), _shared(of_v, v), of_scores


def _shared(gradient: Tensor, key: Tensor) -> Tensor:
    repeats = gradient.shape[-3] // key.shape[-3]
    if repeats == 1:
        return gradient
    return gradient.unflatten(-3, (key.shape[-3], repeats)).sum(-3)


def _new_seed(dropout: float) -> int:
    return int(torch.randint(2**31, ())) if dropout else 0


def _seed_in(stored: Any) -> int:
    has_one = isinstance(stored, Tensor) and stored.numel()
    return int(stored.reshape(-1)[0].to(torch.int64)) if has_one else 0


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
    options = _Options(scale, int(is_causal), dropout_p, _new_seed(dropout_p))
    output, denominator = _forward(query, key, value, None, options)
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
    options = _Options(scale, int(is_causal), dropout_p, _seed_in(philox_seed))
    return _backward(grad_out, query, key, value, None, options)[:3]


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
    options = _Options(scale, int(is_causal), dropout_p, _new_seed(dropout_p))
    output, denominator = _forward(query, key, value, attn_bias, options)
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
    options = _Options(scale, int(is_causal), dropout_p, _seed_in(philox_seed))
    of_q, of_k, of_v, of_scores = _backward(grad_out, query, key, value, attn_bias, options)
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
    options = _Options(scale, int(is_causal), dropout_p, _new_seed(dropout_p))
    output, denominator = _forward(query, key, value, attn_bias, options)
    seeds = Everywhere(options.seed), Everywhere(0)
    return output, Fitted(denominator), None, None, 0, 0, *seeds, None


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
    options = _Options(scale, int(is_causal), dropout_p, _seed_in(philox_seed))
    return _backward(grad_out, query, key, value, bias, options)[:3]


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
    _refuse({**others, "cum_seq_q": cum_seq_q})
    settings = (attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask)
    return cudnn(query, key, value, *settings, scale=scale)


# ---- The same without batch, or with sequences of different lengths one behind the other ----
# aten/src/ATen/native/transformers/cuda/attention.cu: (batch, positions, heads, size), or
# (positions of all, heads, size) with cumulated lengths


def _parts(tensor: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Split into sequences, with heads before positions."""
    if starts is None:
        return [tensor.transpose(-3, -2)]
    flat = tensor[0] if tensor.dim() == 4 else tensor
    bounds = starts.tolist()
    pairs = zip(bounds[:-1], bounds[1:], strict=True)
    return [flat[first:last].transpose(-3, -2) for first, last in pairs]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Put sequences back one behind the other."""
    positions = [part.transpose(-3, -2) for part in parts]
    if len(positions) == 1 and positions[0].dim() == like.dim():
        return positions[0]
    joined = torch.cat(positions, 0)
    return joined[None] if like.dim() == 4 else joined


def _logarithms(parts: list[Tensor], starts: Tensor | None, packed: bool) -> Any:
    """Return the logarithms of the denominators, padded unless they are packed."""
    if starts is None:
        return parts[0]
    if packed:
        return torch.cat(parts, -1)
    longest = max(part.shape[-1] for part in parts)
    pad = torch.nn.functional.pad
    return torch.stack([pad(part, (0, longest - part.shape[-1])) for part in parts])


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Any, starts_k: Any, bias: Any, options: _Options
) -> tuple[Tensor, list[Tensor]]:
    outputs, logarithms = [], []
    parts = zip(*(_parts(q, starts_q), _parts(k, starts_k), _parts(v, starts_k)), strict=True)
    for part_q, part_k, part_v in parts:
        output, denominator = _forward(part_q, part_k, part_v, bias, options)
        outputs.append(output)
        logarithms.append(denominator)
    return _joined(outputs, q), logarithms


def flash_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> Any:
    _refuse(others)
    options = _windowed(scale, is_causal, dropout_p, window_size_left, window_size_right)
    output, parts = _sequences(query, key, value, cum_seq_q, cum_seq_k, None, options)
    logarithms = Fitted(_logarithms(parts, cum_seq_q, packed=True))
    return output, logarithms, Everywhere(options.seed), Everywhere(0), None


def flash_sequences_backward(
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
    rng_state: Any,
    unused: Any,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    options = _windowed(
        scale, is_causal, dropout_p, window_size_left, window_size_right, _seed_in(rng_state)
    )
    tensors = grad_out, query, key, value
    return _sequences_backward(tensors, _given(cum_seq_q), _given(cum_seq_k), None, options)[:3]


def efficient_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    window_size: int | None = None,
    **others: Any,
) -> Any:
    _refuse({**others, "window_size": window_size or None})
    options = _Options(scale, custom_mask_type, dropout_p, _new_seed(dropout_p))
    output, parts = _sequences(query, key, value, cu_seqlens_q, cu_seqlens_k, bias, options)
    logarithms = _logarithms(parts, cu_seqlens_q, packed=False)
    return output, Fitted(logarithms), Everywhere(options.seed), Everywhere(0), 0, 0


def efficient_sequences_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Any,
    philox_offset: Any,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:
    _refuse({"window_size": window_size or None})
    options = _Options(scale, custom_mask_type, dropout_p, _seed_in(philox_seed))
    tensors = grad_out, query, key, value
    *gradients, of_scores = _sequences_backward(
        tensors, cu_seqlens_q, cu_seqlens_k, bias, options
    )
    of_bias = None
    if bias is not None and bias_requires_grad:
        of_bias = of_scores[0].sum_to_size(bias.shape)
    return *gradients, of_bias


def _sequences_backward(
    tensors: tuple[Tensor, ...], starts_q: Any, starts_k: Any, bias: Any, options: _Options
) -> Any:
    gradient, q, k, v = tensors
    split = zip(
        _parts(gradient, starts_q),
        _parts(q, starts_q),
        _parts(k, starts_k),
        _parts(v, starts_k),
        strict=True,
    )
    found = [_backward(*part, bias, options) for part in split]
    of_q, of_k, of_v, of_scores = zip(*found, strict=True)
    joined = (_joined(list(parts), like) for parts, like in ((of_q, q), (of_k, k), (of_v, v)))
    return *joined, of_scores


def _windowed(
    scale: float | None,
    is_causal: bool,
    dropout: float,
    left: int | None,
    right: int | None,
    seed: int | None = None,
) -> _Options:
    known = _new_seed(dropout) if seed is None else seed
    causal = _BOTTOM_RIGHT if is_causal else 0
    windows = (-1 if side is None else side for side in (left, right))
    return _Options(scale, causal, dropout, known, *windows)


def _given(starts: Any) -> Any:
    return starts if isinstance(starts, Tensor) and starts.numel() else None


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"attention with {name} is not computed")


EQUIVALENTS = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten::_cudnn_attention_forward": cudnn_forward,
    "aten::_flash_attention_forward": flash_sequences,
    "aten::_flash_attention_backward": flash_sequences_backward,
    "aten::_efficient_attention_forward": efficient_sequences,
    "aten::_efficient_attention_backward": efficient_sequences_backward,
}
