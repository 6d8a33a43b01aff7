"""Scaled dot-product attention: the flash, memory-efficient and cuDNN forms, and their backward.

``..._sequences`` take (batch, positions, heads, size), or packed sequences of different lengths:
(positions of all, heads, size) with the first position of each sequence.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emulated_cuda.values import Everywhere, Fitted
from emulated_cuda.values.equivalents import equivalent

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
            raise NotImplementedError(f"the emulated device does not support attention with {name}")


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


def _parts(tensor: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Split into sequences, with heads before positions."""
    if starts is None:
        return [tensor.transpose(-3, -2)]
    flat = tensor[0] if tensor.dim() == 4 else tensor
    pairs = itertools.pairwise(starts.tolist())
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
    q: Tensor, k: Tensor, v: Tensor, starts_q: Any, starts_k: Any, bias: Any, options: Options
) -> tuple[Tensor, list[Tensor]]:
    outputs, logarithms = [], []
    parts = zip(*(_parts(q, starts_q), _parts(k, starts_k), _parts(v, starts_k)), strict=True)
    for part_q, part_k, part_v in parts:
        output, denominator = forward(part_q, part_k, part_v, bias, options)
        outputs.append(output)
        logarithms.append(denominator)
    return _joined(outputs, q), logarithms


@equivalent("aten::_flash_attention_forward", source=f"{_FORWARD}: _flash_attention_forward")
def flash_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    **others: Any,
) -> Any:
    refuse(others)
    options = _windowed(scale, is_causal, dropout_p, window_size_left, window_size_right)
    output, parts = _sequences(query, key, value, cum_seq_q, cum_seq_k, None, options)
    logarithms = Fitted(_logarithms(parts, cum_seq_q, packed=True))
    return output, logarithms, Everywhere(options.seed), Everywhere(0), None


@equivalent(
    "aten::_flash_attention_forward_no_dropout_inplace",
    source=f"{_FORWARD}: _flash_attention_forward_no_dropout_inplace",
)
def flash_sequences_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    **others: Any,
) -> Any:
    starts, window = (cum_seq_q, cum_seq_k), (window_size_left, window_size_right)
    output, logarithms, *_ = flash_sequences(
        query, key, value, *starts, 0.0, is_causal, scale, *window, **others
    )
    out.copy_(output)
    return logarithms


@equivalent("aten::_flash_attention_backward", source=f"{_BACKWARD}: _flash_attention_backward")
def flash_sequences_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
) -> Any:
    options = _windowed(
        scale, is_causal, dropout_p, window_size_left, window_size_right, seed_in(rng_state)
    )
    tensors = grad_out, query, key, value
    return _sequences_backward(tensors, _given(cum_seq_q), _given(cum_seq_k), None, options)[:3]


@equivalent(
    "aten::_efficient_attention_forward", source=f"{_FORWARD}: _efficient_attention_forward"
)
def efficient_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout_p: float,
    custom_mask_type: int,
    scale: float | None,
    window_size: int | None,
    **others: Any,
) -> Any:
    refuse({**others, "window_size": window_size or None})
    options = Options(scale, custom_mask_type, dropout_p, new_seed(dropout_p))
    output, parts = _sequences(query, key, value, cu_seqlens_q, cu_seqlens_k, bias, options)
    logarithms = _logarithms(parts, cu_seqlens_q, packed=False)
    return output, Fitted(logarithms), Everywhere(options.seed), Everywhere(0), 0, 0


@equivalent(
    "aten::_efficient_attention_backward", source=f"{_BACKWARD}: _efficient_attention_backward"
)
def efficient_sequences_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout_p: float,
    philox_seed: Any,
    custom_mask_type: int,
    bias_requires_grad: bool,
    scale: float | None,
    window_size: int | None,
) -> Any:
    refuse({"window_size": window_size or None})
    options = Options(scale, custom_mask_type, dropout_p, seed_in(philox_seed))
    tensors = grad_out_, query, key, value
    *gradients, of_scores = _sequences_backward(tensors, cu_seqlens_q, cu_seqlens_k, bias, options)
    of_bias = None
    if bias is not None and bias_requires_grad:
        of_bias = of_scores[0].sum_to_size(bias.shape)
    return *gradients, of_bias


def _sequences_backward(
    tensors: tuple[Tensor, ...], starts_q: Any, starts_k: Any, bias: Any, options: Options
) -> Any:
    gradient, q, k, v = tensors
    split = zip(
        _parts(gradient, starts_q),
        _parts(q, starts_q),
        _parts(k, starts_k),
        _parts(v, starts_k),
        strict=True,
    )
    gradients = [backward(*part, bias, options) for part in split]
    of_q, of_k, of_v, of_scores = zip(*gradients, strict=True)
    joined = (_joined(list(parts), like) for parts, like in ((of_q, q), (of_k, k), (of_v, v)))
    return *joined, of_scores


def _windowed(
    scale: float | None,
    is_causal: bool,
    dropout: float,
    left: int | None,
    right: int | None,
    seed: int | None = None,
) -> Options:
    known = new_seed(dropout) if seed is None else seed
    windows = (-1 if side is None else side for side in (left, right))
    return Options(scale, BOTTOM_RIGHT if is_causal else 0, dropout, known, *windows)


def _given(starts: Any) -> Any:
    return starts if isinstance(starts, Tensor) and starts.numel() else None
