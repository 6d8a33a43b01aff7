"""Softmax attention and its gradients, which all forms of it compute.

They compute softmax(q kᵀ · scale + bias) v in single precision, with heads before positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
