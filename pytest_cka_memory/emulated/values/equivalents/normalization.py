"""Batch normalization of cuDNN, its parts in synchronized form, and fused RMS normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_cka_memory.emulated.torch_private import operator_of
from pytest_cka_memory.emulated.values.results import Fitted

_native = operator_of("aten::native_batch_norm")
_native_backward = operator_of("aten::native_batch_norm_backward")


def _statistics(mean: Tensor | None, variance: Tensor | None, eps: float) -> Any:
    """Return what CUDA saves if it normalizes by the running statistics."""
    if mean is None or variance is None:
        return None, None
    return mean.float(), torch.rsqrt(variance.float() + eps)


# aten/src/ATen/native/cuda/Normalization.cu: in evaluation it returns the running statistics
def native(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    result, saved_mean, saved_std = _native(
        values, weight, bias, mean, variance, training, momentum, eps
    )
    if not training:
        saved_mean, saved_std = _statistics(mean, variance, eps)
    return result, Fitted(saved_mean), Fitted(saved_std)


# torch/_decomp/decompositions.py: _native_batch_norm_legit.no_stats
def without_statistics(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return native(values, weight, bias, None, None, training, momentum, eps)


# aten/src/ATen/native/cuda/Normalization.cu: _batch_norm_with_update_cuda
def with_update(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    return native(values, weight, bias, mean, variance, True, momentum, eps)


# aten/src/ATen/native/cuda/Normalization.cu: batch_norm_backward, whatever library ran forward
def backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    saved_mean: Tensor | None,
    saved_std: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Any,
    reserve: Tensor,
) -> Any:
    saved = _if_any(saved_mean), _if_any(saved_std)
    return _native_backward(
        gradient, values, weight, mean, variance, *saved, update, eps, output_mask
    )


def _if_any(saved: Tensor | None) -> Tensor | None:
    """Return saved statistics; None in place of a tensor without elements."""
    return saved if saved is None or saved.numel() else None


# aten/src/ATen/native/cudnn/BatchNorm.cpp
def cudnn(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    result, saved_mean, saved_std = _native(
        values, weight, bias, mean, variance, training, momentum, eps
    )
    return result, Fitted(saved_mean), Fitted(saved_std), None


# aten/src/ATen/native/cudnn/BatchNorm.cpp
def cudnn_backward(
    values: Tensor,
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    saved_mean: Tensor,
    saved_std: Tensor,
    eps: float,
    reserve: Tensor,
) -> Any:
    return _native_backward(
        *(gradient.contiguous(), values, weight, mean, variance, saved_mean, saved_std),
        *(True, eps, [True, True, True]),
    )


# ---- Synchronized: torch/nn/modules/_functions.py calls these one after the other ----


def _axes(values: Tensor) -> list[int]:
    return [axis for axis in range(values.dim()) if axis != 1]


def _columns(vector: Tensor, values: Tensor) -> Tensor:
    """Return a value for each channel in a shape that broadcasts over `values`."""
    return vector.view(1, -1, *[1] * (values.dim() - 2))


# aten/src/ATen/native/cuda/Normalization.cuh: batch_norm_collect_statistics_kernel
def stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = values.float() if values.dtype in (torch.half, torch.bfloat16) else values
    variance, mean = torch.var_mean(wide, _axes(values), correction=0)
    return mean, torch.rsqrt(variance + eps)


# batch_norm_transform_input_kernel
def elementwise(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    std: Tensor,
    eps: float,
) -> Tensor:
    result = (values - _columns(mean, values)) * _columns(std, values)
    if weight is not None:
        result = result * _columns(weight, values)
    return result if bias is None else result + _columns(bias, values)


# batch_norm_reduce_statistics_kernel: Chan's formula for the statistics of several parts
def gather_with_counts(
    values: Tensor,
    means: Tensor,
    stds: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.to(means.dtype).view(-1, 1)
    total = weights.sum()
    mean = (means * weights).sum(0) / total
    variances = stds.pow(-2) - eps
    variance = ((variances + (means - mean).square()) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_variance is not None:
        unbiased = variance * total / (total - 1)
        running_variance.mul_(1 - momentum)
        running_variance.add_(unbiased.to(running_variance.dtype), alpha=momentum)
    return mean, torch.rsqrt(variance + eps)


def gather(
    values: Tensor,
    means: Tensor,
    stds: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((means.shape[0],), float(count))
    return gather_with_counts(
        values, means, stds, running_mean, running_variance, momentum, eps, counts
    )


# batch_norm_backward_reduce_kernel
def backward_reduce(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    std: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> Any:
    axes = _axes(values)
    gradient = gradient.to(mean.dtype)
    sum_dy = gradient.sum(axes)
    sum_dy_xmu = (gradient * (values.to(mean.dtype) - _columns(mean, values))).sum(axes)
    sums = (sum_dy, sum_dy_xmu) if input_g else (None, None)
    return (*sums, sum_dy_xmu * std if weight_g else None, sum_dy if bias_g else None)


# batch_norm_backward_elemt_kernel
def backward_elementwise(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(mean.dtype)
    centered = values.to(mean.dtype) - _columns(mean, values)
    projected = centered * _columns(sum_dy_xmu / total * std.square(), values)
    result = gradient.to(mean.dtype) - _columns(sum_dy / total, values) - projected
    factor = std if weight is None else std * weight.to(std.dtype)
    return result * _columns(factor, values)


# ---- RMS: torch/_decomp/decompositions.py, _fused_rms_norm and its backward ----


def rms_norm(
    values: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    axes = list(range(-len(normalized_shape), 0))
    wide = values.float() if values.dtype in (torch.half, torch.bfloat16) else values
    epsilon = torch.finfo(wide.dtype).eps if eps is None else eps
    reciprocal = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    result = wide * reciprocal
    return (result if weight is None else result * weight), reciprocal


def rms_norm_backward(
    gradient: Tensor,
    values: Tensor,
    normalized_shape: Any,
    reciprocal: Tensor,
    weight: Tensor | None,
    output_mask: Any,
) -> Any:
    axes = list(range(-len(normalized_shape), 0))
    others = list(range(values.dim() - len(normalized_shape)))
    wide = reciprocal.dtype
    normalized = values.to(wide) * reciprocal
    of_normalized = gradient.to(wide) if weight is None else gradient.to(wide) * weight.to(wide)
    mean = (of_normalized * normalized).mean(axes, keepdim=True)
    of_values = (of_normalized - normalized * mean) * reciprocal if output_mask[0] else None
    of_weight = None
    if output_mask[1] and weight is not None:
        products = gradient.to(wide) * normalized
        of_weight = products.sum(others) if others else products
    return of_values, of_weight


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::native_batch_norm": native,
    "aten::_native_batch_norm_legit": native,
    "aten::_native_batch_norm_legit.no_stats": without_statistics,
    "aten::_batch_norm_with_update": with_update,
    "aten::batch_norm_backward": backward,
    "aten::cudnn_batch_norm": cudnn,
    "aten::cudnn_batch_norm_backward": cudnn_backward,
    "aten::batch_norm_stats": stats,
    "aten::batch_norm_elemt": elementwise,
    "aten::batch_norm_gather_stats": gather,
    "aten::batch_norm_gather_stats_with_counts": gather_with_counts,
    "aten::batch_norm_backward_reduce": backward_reduce,
    "aten::batch_norm_backward_elemt": backward_elementwise,
    "aten::_fused_rms_norm": rms_norm,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
}
