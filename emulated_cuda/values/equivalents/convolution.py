"""Convolutions of cuDNN, depthwise convolutions, and transposed ones without cuDNN."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent

_SHARED = "aten/src/ATen/native/cudnn/ConvShared.cpp"
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


@equivalent(
    "aten::cudnn_convolution", source=f"{_SHARED}: cudnn_convolution_forward, without a bias"
)
def convolution(
    self: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int
) -> Tensor:
    return _convolve(self, weight, None, stride, padding, dilation, groups)


@equivalent(
    "aten::cudnn_convolution_transpose",
    source=f"{_SHARED}: cudnn_convolution_transpose_forward, the data gradient of a convolution",
)
def transposed(
    self: Tensor,
    weight: Tensor,
    padding: Any,
    output_padding: Any,
    stride: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    result: Tensor = _convolution(
        self, weight, None, stride, padding, dilation, True, output_padding, groups
    )
    return result


@equivalent("aten::cudnn_convolution_relu", source=f"{_SHARED}: relu(conv(x) + bias)")
def with_relu(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    return _convolve(self, weight, bias, stride, padding, dilation, groups).relu()


@equivalent(
    "aten::cudnn_convolution_add_relu", source=f"{_SHARED}: relu(conv(x) + alpha * z + bias)"
)
def with_sum_and_relu(
    self: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    result = _convolve(self, weight, bias, stride, padding, dilation, groups)
    return result.add(z, alpha=1 if alpha is None else alpha).relu()


@equivalent(
    "aten::_conv_depthwise2d",
    source="aten/src/ATen/native/cuda/DepthwiseConv2d.cu: one group for each input channel",
)
@equivalent(
    "aten::conv_depthwise3d",
    source="aten/src/ATen/native/cuda/DepthwiseConv3d.cu: one group for each input channel",
)
def depthwise(
    self: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    return _convolve(self, weight, bias, stride, padding, dilation, self.shape[1])


@equivalent(
    "aten::slow_conv_transpose2d",
    source="aten/src/ATen/native/cuda/im2col.cuh: col2im adds half precision in float32",
)
@equivalent(
    "aten::slow_conv_transpose3d",
    source="aten/src/ATen/native/cuda/vol2col.cuh: vol2col adds half precision in float32",
)
def transposed_without_cudnn(
    self: Tensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
) -> Tensor:
    result: Tensor = _convolution(
        self, weight, bias, stride, padding, dilation, True, output_padding, 1
    )
    return result
