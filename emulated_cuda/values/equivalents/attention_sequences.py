"""Attention over packed sequences of different lengths, and over sequences without a batch.

Tensors are (batch, positions, heads, size), or (positions of all, heads, size) with the first
position of each sequence.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from emulated_cuda.values.equivalents.attention import (
    BOTTOM_RIGHT,
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


def _parts(tensor: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Split into sequences, with heads before positions."""
    if starts is None:
        return [tensor.transpose(-3, -2)]
    flat = tensor[0] if tensor.dim() == 4 else tensor
    bounds = starts.tolist()
    pairs = itertools.pairwise(bounds)
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
    causal = BOTTOM_RIGHT if is_causal else 0
    windows = (-1 if side is None else side for side in (left, right))
    return Options(scale, causal, dropout, known, *windows)


def _given(starts: Any) -> Any:
    return starts if isinstance(starts, Tensor) and starts.numel() else None
