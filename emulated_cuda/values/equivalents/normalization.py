"""Batch normalization of cuDNN, its parts in synchronized form, and fused RMS normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values import Fitted
from emulated_cuda.values.equivalents import equivalent

_CUDA = "aten/src/ATen/native/cuda/Normalization.cu"
_KERNELS = "aten/src/ATen/native/cuda/Normalization.cuh"
_CUDNN = "aten/src/ATen/native/cudnn/BatchNorm.cpp"
_DECOMPOSITIONS = "torch/_decomp/decompositions.py"
_on_cpu = operator_of("aten::native_batch_norm")
_on_cpu_backward = operator_of("aten::native_batch_norm_backward")
_HALF = (torch.float16, torch.bfloat16)


def _widened(vector: Tensor | None) -> Tensor | None:
    return vector.float() if vector is not None and vector.dtype in _HALF else vector


def _native(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *others: Any,
) -> Any:
    """Normalize on the CPU; half weights round nothing in between.

    CUDA's kernels compute with accscalar_t, as the CPU's do if only the weights are single.
    """
    running = running_mean, running_var
    wide = [_widened(vector) for vector in running]
    normalized = _on_cpu(input, _widened(weight), _widened(bias), *wide, *others)
    for vector, updated in zip(running, wide, strict=True):
        if vector is not updated and vector is not None and updated is not None:
            vector.copy_(updated)
    return normalized


def _native_backward(grad_out: Tensor, input: Tensor, *rest: Any) -> Any:
    """Return the gradients, with the same widened: weight, statistics, and two saved ones."""
    *vectors, update, eps, mask = rest
    return _on_cpu_backward(grad_out, input, *map(_widened, vectors), update, eps, mask)


def _statistics(mean: Tensor | None, variance: Tensor | None, eps: float) -> Any:
    """Return what CUDA saves if it normalizes by the running statistics."""
    if mean is None or variance is None:
        return None, None
    return mean.float(), torch.rsqrt(variance.float() + eps)


@equivalent(
    *("aten::native_batch_norm", "aten::_native_batch_norm_legit"),
    source=f"{_CUDA}: batch_norm_cuda, which returns the running statistics in evaluation",
)
def native(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    result, saved_mean, saved_std = _native(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if not training:
        saved_mean, saved_std = _statistics(running_mean, running_var, eps)
    return result, Fitted(saved_mean), Fitted(saved_std)


@equivalent(
    "aten::_native_batch_norm_legit.no_stats",
    source=f"{_DECOMPOSITIONS}: _native_batch_norm_legit_no_stats",
)
def without_statistics(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return native(input, weight, bias, None, None, training, momentum, eps)


@equivalent("aten::_batch_norm_with_update", source=f"{_CUDA}: _batch_norm_with_update_cuda")
def with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    return native(input, weight, bias, running_mean, running_var, True, momentum, eps)


@equivalent(
    "aten::batch_norm_backward",
    source=f"{_CUDA}: _new_batch_norm_backward_cuda, whatever library ran forward",
)
def backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Any,
) -> Any:
    running, saved = (running_mean, running_var), (_if_any(save_mean), _if_any(save_var))
    return _native_backward(grad_out, input, weight, *running, *saved, update, eps, output_mask)


def _if_any(saved: Tensor | None) -> Tensor | None:
    """Return saved statistics; None in place of a tensor without elements."""
    return saved if saved is None or saved.numel() else None


@equivalent("aten::cudnn_batch_norm", source=f"{_CUDNN}: cudnn_batch_norm")
def cudnn(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> Any:
    running = running_mean, running_var
    result, saved_mean, saved_std = _native(
        input, weight, bias, *running, training, exponential_average_factor, epsilon
    )
    return result, Fitted(saved_mean), Fitted(saved_std), None


@equivalent("aten::cudnn_batch_norm_backward", source=f"{_CUDNN}: cudnn_batch_norm_backward")
def cudnn_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_var: Tensor,
    epsilon: float,
) -> Any:
    return _native_backward(
        *(grad_output.contiguous(), input, weight, running_mean, running_var),
        *(save_mean, save_var, True, epsilon, [True, True, True]),
    )


# ---- Synchronized: torch/nn/modules/_functions.py calls these one after the other ----


def _axes(values: Tensor) -> list[int]:
    return [axis for axis in range(values.dim()) if axis != 1]


def _columns(vector: Tensor, values: Tensor) -> Tensor:
    """Return a value for each channel in a shape that broadcasts over `values`."""
    return vector.view(1, -1, *[1] * (values.dim() - 2))


@equivalent("aten::batch_norm_stats", source=f"{_KERNELS}: batch_norm_collect_statistics_kernel")
def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = input.float() if input.dtype in (torch.half, torch.bfloat16) else input
    variance, mean = torch.var_mean(wide, _axes(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


@equivalent("aten::batch_norm_elemt", source=f"{_KERNELS}: batch_norm_transform_input_kernel")
def elementwise(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    result = (input - _columns(mean, input)) * _columns(invstd, input)
    if weight is not None:
        result = result * _columns(weight, input)
    return result if bias is None else result + _columns(bias, input)


@equivalent(
    "aten::batch_norm_gather_stats_with_counts",
    source=f"{_KERNELS}: batch_norm_reduce_statistics_kernel, Chan's formula for several parts",
)
def gather_with_counts(
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.to(mean.dtype).view(-1, 1)
    total = weights.sum()
    of_all = (mean * weights).sum(0) / total
    variances = invstd.pow(-2) - eps
    variance = ((variances + (mean - of_all).square()) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(of_all.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1)
        running_var.mul_(1 - momentum)
        running_var.add_(unbiased.to(running_var.dtype), alpha=momentum)
    return of_all, torch.rsqrt(variance + eps)


@equivalent(
    "aten::batch_norm_gather_stats",
    source=f"{_CUDA}: batch_norm_gather_stats_cuda, with equal counts",
)
def gather(
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.shape[0],), float(count))
    return gather_with_counts(mean, invstd, running_mean, running_var, momentum, eps, counts)


@equivalent(
    "aten::batch_norm_backward_reduce", source=f"{_KERNELS}: batch_norm_backward_reduce_kernel"
)
def backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> Any:
    axes = _axes(input)
    gradient = grad_out.to(mean.dtype)
    sum_dy = gradient.sum(axes)
    sum_dy_xmu = (gradient * (input.to(mean.dtype) - _columns(mean, input))).sum(axes)
    sums = (sum_dy, sum_dy_xmu) if input_g else (None, None)
    return (*sums, sum_dy_xmu * invstd if weight_g else None, sum_dy if bias_g else None)


@equivalent(
    "aten::batch_norm_backward_elemt", source=f"{_KERNELS}: batch_norm_backward_elemt_kernel"
)
def backward_elementwise(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(mean.dtype)
    centered = input.to(mean.dtype) - _columns(mean, input)
    projected = centered * _columns(sum_dy_xmu / total * invstd.square(), input)
    result = grad_out.to(mean.dtype) - _columns(sum_dy / total, input) - projected
    factor = invstd if weight is None else invstd * weight.to(invstd.dtype)
    return result * _columns(factor, input)


# ---- RMS ----


@equivalent("aten::_fused_rms_norm", source=f"{_DECOMPOSITIONS}: _fused_rms_norm")
def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    axes = list(range(-len(normalized_shape), 0))
    wide = input.float() if input.dtype in (torch.half, torch.bfloat16) else input
    epsilon = torch.finfo(wide.dtype).eps if eps is None else eps
    reciprocal = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    result = wide * reciprocal
    return (result if weight is None else result * weight), reciprocal


@equivalent("aten::_fused_rms_norm_backward", source=f"{_DECOMPOSITIONS}: _fused_rms_norm_backward")
def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Any,
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Any,
) -> Any:
    axes = list(range(-len(normalized_shape), 0))
    others = list(range(input.dim() - len(normalized_shape)))
    wide = rstd.dtype
    normalized = input.to(wide) * rstd
    of_normalized = grad_out.to(wide) if weight is None else grad_out.to(wide) * weight.to(wide)
    mean = (of_normalized * normalized).mean(axes, keepdim=True)
    of_values = (of_normalized - normalized * mean) * rstd if output_mask[0] else None
    of_weight = None
    if output_mask[1] and weight is not None:
        products = grad_out.to(wide) * normalized
        of_weight = products.sum(others) if others else products
    return of_values, of_weight
