"""Products with an activation, another result type, scales or weights of four bits; convolutions.

Convolutions are those of cuDNN, depthwise ones, and transposed ones without cuDNN. Ordinary
products such as `mm`, `addmm` and `bmm` need no row: the CPU's operator of the same name computes
them (:mod:`emulated_cuda.values.registration`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents import equivalent

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
    return _transpose(self, weight, None, stride, padding, dilation, output_padding, groups)


def _transpose(self: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Return a transposed convolution whose sums are rounded once.

    A processor without AVX-512 rounds each sum of a transposed convolution in half precision.
    """
    *before, output_padding, groups = settings
    factors = (self, weight) if bias is None else (self, weight, bias)
    wide = [factor.float() if factor.itemsize == 2 else factor for factor in factors]
    own_bias = None if bias is None else wide[2]
    result: Tensor = _convolution(wide[0], wide[1], own_bias, *before, True, output_padding, groups)
    return result.to(self.dtype)


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
    return _transpose(self, weight, bias, stride, padding, dilation, output_padding, 1)


_BLAS = (
    "aten/src/ATen/native/cuda/Blas.cpp: half-precision inputs, whose products are accumulated in "
    "the dtype of the result"
)
_EPILOGUE = "aten/src/ATen/native/cuda/Blas.cpp: addmm_activation_out_cuda"
_SCALED = (
    "aten/src/ATen/native/cuda/ScaledBlas.cpp: the result is (a * scale_a) @ (b * scale_b) + bias"
)
_GROUPED = "aten/src/ATen/native/cuda/GroupedBlas.cpp: _scaled_grouped_mm_cuda, scales of rows"
_INT4 = "aten/src/ATen/native/cuda/int4mm.cu"


@equivalent("aten::mm.dtype", source=_BLAS)
def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype))


@equivalent("aten::bmm.dtype", source=_BLAS)
def bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(self.to(out_dtype), mat2.to(out_dtype))


@equivalent("aten::addmm.dtype", source=_BLAS)
def addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, beta: Any, alpha: Any
) -> Tensor:
    wide = (value.to(out_dtype) for value in (self, mat1, mat2))
    return torch.addmm(*wide, beta=beta, alpha=alpha)


@equivalent("aten::baddbmm.dtype", source=_BLAS)
def baddbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, beta: Any, alpha: Any
) -> Tensor:
    wide = (value.to(out_dtype) for value in (self, batch1, batch2))
    return torch.baddbmm(*wide, beta=beta, alpha=alpha)


# ---- Activations ----


@equivalent("aten::_addmm_activation", source=f"{_EPILOGUE}, which approximates GELU by tanh")
def addmm_activation(
    self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any, use_gelu: bool
) -> Tensor:
    product = torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    if not use_gelu:
        return product.relu_()
    return torch.nn.functional.gelu(product, approximate="tanh")


# ---- Scales ----


def _scaled(matrix: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Return a matrix times its scale: one number, or one for each row or column.

    Raises:
        NotImplementedError: for the scales of blocks, which are stored in another order.
    """
    of_each = [1, 1]
    of_each[axis] = matrix.shape[axis]
    if scale.dtype is not torch.float32 or not (scale.numel() == 1 or [*scale.shape] == of_each):
        raise NotImplementedError(
            "the emulated device does not support block-wise scales; use row-wise scales"
        )
    return matrix.float() * scale


@equivalent("aten::_scaled_mm", source=_SCALED)
def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    scale_result: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    result = torch.mm(_scaled(self, scale_a, 0), _scaled(mat2, scale_b, 1))
    if bias is not None:
        result = result + bias
    if scale_result is not None:
        result = result * scale_result
    dtype = self.dtype if out_dtype is None else out_dtype
    if dtype.itemsize == 1:  # cards convert to eight bits with saturation, torch does from 2.13 on
        largest = torch.finfo(dtype).max
        result = result.clamp(-largest, largest)
    return result.to(dtype)


_ONE_FOR_ALL, _OF_ROWS = 0, 1  # torch.nn.functional.ScalingType


@equivalent("aten::_scaled_mm_v2", source=_SCALED)
def scaled_mm_of_recipes(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    recipes = [*recipe_a], [*recipe_b]
    if recipes == ([_OF_ROWS], [_OF_ROWS]):
        scales = scale_a[0].reshape(-1, 1), scale_b[0].reshape(1, -1)
    elif recipes == ([_ONE_FOR_ALL], [_ONE_FOR_ALL]):
        scales = scale_a[0], scale_b[0]
    else:
        raise NotImplementedError(
            "the emulated device does not support block-wise scales; use row-wise scales"
        )
    return scaled_mm(self, mat2, *scales, bias, None, out_dtype)


@equivalent("aten::_scaled_grouped_mm", source=_GROUPED)
def scaled_grouped_mm(
    self: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None
) -> Tensor:
    """Products of groups: of rows of `self`, of columns of `mat2`, of both, or of batches."""
    if scale_a.dtype is not torch.float32:
        raise NotImplementedError(
            "the emulated device does not support block-wise scales; use row-wise scales"
        )
    ends = [] if offs is None else offs.tolist()
    starts = [0, *ends[:-1]]
    if self.dim() == 2 and mat2.dim() == 2:  # the groups share the sum's axis
        rows, columns = scale_a.view(len(ends), -1), scale_b.view(len(ends), -1)
        parts = [
            (self[:, first:last].float() * rows[group, :, None])
            @ (mat2[first:last].float() * columns[group])
            for group, (first, last) in enumerate(zip(starts, ends, strict=True))
        ]
        return torch.stack(parts)
    left = self.float() * scale_a[..., None]
    right = mat2.float() * scale_b.unsqueeze(-2)
    if self.dim() == mat2.dim() == 3:
        return left @ right
    groups = zip(starts, ends, strict=True)
    if self.dim() == 2:
        result = left.new_zeros(self.shape[0], mat2.shape[2])
        for group, (first, last) in enumerate(groups):
            result[first:last] = left[first:last] @ right[group]
    else:
        result = left.new_zeros(self.shape[1], mat2.shape[1])
        for group, (first, last) in enumerate(groups):
            result[:, first:last] = left[group] @ right[:, first:last]
    return result


# ---- Weights of four bits ----


def _positions(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Return the row, and the pair of columns, of each of the four bytes in a packed number.

    Their shape is that of the packed weight, (rows / 8, columns / (16 * inner), 32, inner / 2),
    with the four bytes as last axis.
    """
    tile, outer, lane, part, byte = torch.meshgrid(
        *(torch.arange(rows // 8), torch.arange(columns // (16 * inner)), torch.arange(32)),
        *(torch.arange(inner // 2), torch.arange(4)),
        indexing="ij",
    )
    first = (outer * inner + part * 2) * 8  # two tiles of 16 columns, two columns in a byte
    return tile * 8 + lane // 4, first + byte * 4 + lane % 4


@equivalent("aten::_convert_weight_to_int4pack", source=f"{_INT4}: matrix_to_m16n8k16_Bint4_layout")
def pack_int4(self: Tensor, innerKTiles: int) -> Tensor:
    rows, pairs = _positions(self.shape[0], self.shape[1] * 2, innerKTiles)
    packed_numbers = self[rows, pairs].long()
    place = torch.arange(4) * 4
    packed = ((packed_numbers >> 4 << place) | ((packed_numbers & 15) << place + 16)).sum(-1)
    return (packed - (packed >> 31 << 32)).int()


def unpack_int4(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the numbers from 0 to 15 of a packed weight, as a matrix."""
    row, pair = _positions(rows, columns, packed.shape[3] * 2)
    place = torch.arange(4) * 4
    numbers = packed.long()[..., None]
    result = torch.empty(rows, columns, dtype=torch.long)
    result[row, pair * 2] = numbers >> place & 15
    result[row, pair * 2 + 1] = numbers >> place + 16 & 15
    return result


@equivalent("aten::_weight_int4pack_mm", source=f"{_INT4}: (q - 8) * scale + zero for each group")
def int4_mm(
    self: Tensor,
    mat2: Tensor,
    qGroupSize: int,
    qScaleAndZeros: Tensor,
) -> Tensor:
    rows, columns = mat2.shape[0] * 8, self.shape[1]
    scales, zeros = qScaleAndZeros.float().repeat_interleave(qGroupSize, 0).unbind(-1)
    weight = (unpack_int4(mat2, rows, columns).float() - 8) * scales.T + zeros.T
    return self.float() @ weight.bfloat16().float().T
