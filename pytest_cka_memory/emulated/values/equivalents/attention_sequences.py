"""Attention of sequences of different lengths, one behind the other, or without a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_cka_memory.emulated.values.equivalents.softmax_attention import (
    BOTTOM_RIGHT,
    Options,
    backward,
    forward,
    new_seed,
    refuse,
    seed_in,
)
from pytest_cka_memory.emulated.values.results import Everywhere, Fitted

# aten/src/ATen/native/transformers/cuda/attention.cu: (batch, positions, heads, size), or
# (positions of all, heads, size) with cumulated lengths


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
    refuse(others)
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
        scale, is_causal, dropout_p, window_size_left, window_size_right, seed_in(rng_state)
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
    refuse({**others, "window_size": window_size or None})
    options = Options(scale, custom_mask_type, dropout_p, new_seed(dropout_p))
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
    refuse({"window_size": window_size or None})
    options = Options(scale, custom_mask_type, dropout_p, seed_in(philox_seed))
    tensors = grad_out, query, key, value
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
    found = [backward(*part, bias, options) for part in split]
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
) -> Options:
    known = new_seed(dropout) if seed is None else seed
    causal = BOTTOM_RIGHT if is_causal else 0
    windows = (-1 if side is None else side for side in (left, right))
    return Options(scale, causal, dropout, known, *windows)


def _given(starts: Any) -> Any:
    return starts if isinstance(starts, Tensor) and starts.numel() else None


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward": flash_sequences,
    "aten::_flash_attention_backward": flash_sequences_backward,
    "aten::_efficient_attention_forward": efficient_sequences,
    "aten::_efficient_attention_backward": efficient_sequences_backward,
}
