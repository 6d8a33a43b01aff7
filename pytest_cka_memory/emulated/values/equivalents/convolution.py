"""Convolutions of cuDNN and depthwise convolutions, and products with another result type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_cka_memory.emulated.torch_private import operator_of

_convolution = operator_of("aten::convolution")


def _convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    no_output_padding = [0] * len(padding)
    result: Tensor = _convolution(
        image, weight, bias, stride, padding, dilation, False, no_output_padding, groups
    )
    return result


# aten/src/ATen/native/cudnn/ConvShared.cpp: convolution without a bias
def convolution(
    image: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any
) -> Tensor:
    return _convolve(image, weight, None, stride, padding, dilation, groups)


# aten/src/ATen/native/cudnn/ConvShared.cpp: the data gradient of a convolution
def transposed(
    image: Tensor,
    weight: Tensor,
    padding: Any,
    output_padding: Any,
    stride: Any,
    dilation: Any,
    groups: int,
    *_: Any,
) -> Tensor:
    result: Tensor = _convolution(
        image, weight, None, stride, padding, dilation, True, output_padding, groups
    )
    return result


# aten/src/ATen/native/cudnn/ConvShared.cpp: relu(conv(x) + bias)
def with_relu(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    return _convolve(image, weight, bias, stride, padding, dilation, groups).relu()


# aten/src/ATen/native/cudnn/ConvShared.cpp: relu(conv(x) + alpha * z + bias)
def with_sum_and_relu(
    image: Tensor,
    weight: Tensor,
    other: Tensor,
    alpha: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    result = _convolve(image, weight, bias, stride, padding, dilation, groups)
    return result.add(other, alpha=1 if alpha is None else alpha).relu()


# aten/src/ATen/native/cuda/DepthwiseConv2d.cu: one group for each input channel
def depthwise(
    image: Tensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Tensor:
    return _convolve(image, weight, bias, stride, padding, dilation, image.shape[1])


# aten/src/ATen/native/cuda/Blas.cpp: products of half types that accumulate in the result's type
def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(left.to(out_dtype), right.to(out_dtype))


def addmm(
    term: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    wide = (value.to(out_dtype) for value in (term, left, right))
    return torch.addmm(*wide, beta=beta, alpha=alpha)


def baddbmm(
    term: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    wide = (value.to(out_dtype) for value in (term, left, right))
    return torch.baddbmm(*wide, beta=beta, alpha=alpha)


# aten/src/ATen/native/cuda/ScaledBlas.cpp: (a * scale_a) @ (b * scale_b) + bias
def scaled_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    result = torch.mm(left.float() * scale_left, right.float() * scale_right)
    if bias is not None:
        result = result + bias
    if scale_result is not None:
        result = result * scale_result
    return result.to(left.dtype if out_dtype is None else out_dtype)


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::cudnn_convolution": convolution,
    "aten::cudnn_convolution_transpose": transposed,
    "aten::cudnn_convolution_relu": with_relu,
    "aten::cudnn_convolution_add_relu": with_sum_and_relu,
    "aten::_conv_depthwise2d": depthwise,
    "aten::conv_depthwise3d": depthwise,
    "aten::mm.dtype": mm,
    "aten::bmm.dtype": bmm,
    "aten::addmm.dtype": addmm,
    "aten::baddbmm.dtype": baddbmm,
    "aten::_scaled_mm": scaled_mm,
}
