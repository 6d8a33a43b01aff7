"""Operators that belong to no family.

Fused dropout, log sigmoid, softmax and its gradient, bags of embeddings and the CTC loss; operators
of half precision that CUDA computes in single precision and rounds once; parts of attention on
strided nested tensors, whose results CUDA pads and the CPU does not; grid samplers of cuDNN; LU
decompositions without pivots, which the CPU refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values import Fitted
from emulated_cuda.values.equivalents import equivalent

HALF = (torch.bfloat16, torch.float16)
_PRODUCT = "aten/src/ATen/native/cuda/ReduceSumProdKernel.cu: reduce_dispatch"
_log_softmax = operator_of("aten::_log_softmax")


@equivalent(
    "aten::_log_softmax",
    source="aten/src/ATen/native/cuda/SoftMax.cu: accscalar_t; half_to_float asks for a float",
)
def log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Any:
    return _log_softmax(_widened(self), dim, False)


@equivalent("aten::prod", source=_PRODUCT)
def product(self: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    factors, options = _factors(self, dtype)
    return torch.prod(factors, **options)


@equivalent("aten::prod.dim_int", source=_PRODUCT)
def product_along(self: Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    factors, options = _factors(self, dtype)
    return torch.prod(factors, dim, keepdim, **options)


@equivalent("aten::prod.int_out", source=_PRODUCT)
def product_into(
    self: Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None, out: Tensor
) -> Tensor:
    return out.copy_(product_along(self, dim, keepdim, dtype or out.dtype))


def _factors(self: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Any]]:
    """Return what is multiplied, and options for it: a card first converts to `dtype`."""
    if dtype in HALF:
        return self.to(dtype).float(), {}
    return (_widened(self), {}) if dtype is None else (self, {"dtype": dtype})


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in HALF else value


_split_heads = operator_of("aten::_transform_bias_rescale_qkv")
_MULTIPLE = 8  # of positions, so that products can use tensor cores


@equivalent(
    "aten::_transform_bias_rescale_qkv",
    source="aten/src/ATen/native/transformers/cuda/attention.cu: transform_bias_rescale_qkv_cuda",
)
def split_heads(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, (batch, heads, positions, size); positions beyond a sequence are 0.

    If `qkv` is nested, the number of positions is a multiple of 8.
    """
    if not qkv.is_nested:
        return tuple(_split_heads(qkv, qkv_bias, num_heads))
    sequences = qkv.unbind()
    longest = max((sequence.shape[0] for sequence in sequences), default=0)
    positions = -(-longest // _MULTIPLE) * _MULTIPLE
    parts = [_split_heads(sequence[None], qkv_bias, num_heads) for sequence in sequences]
    return (
        *(
            torch.cat([pad(part, (0, 0, 0, positions - part.shape[2])) for part in kind])
            for kind in zip(*parts, strict=True)
        ),
    )


_BILINEAR, _ZEROS = 0, 0
_SAMPLER = (
    "aten/src/ATen/native/cudnn/GridSampler.cpp: bilinear interpolation, padding with zeros, "
    "align_corners=True"
)
_AFFINE = "aten/src/ATen/native/cudnn/AffineGridGenerator.cpp: aligned corners"
_sampler = operator_of("aten::grid_sampler_2d")
_sampler_backward = operator_of("aten::grid_sampler_2d_backward")
_affine = operator_of("aten::affine_grid_generator")
_affine_backward = operator_of("aten::affine_grid_generator_backward")


@equivalent("aten::cudnn_grid_sampler", source=_SAMPLER)
def grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    result: Tensor = _sampler(self, grid, _BILINEAR, _ZEROS, True)
    return result


@equivalent("aten::cudnn_grid_sampler_backward", source=_SAMPLER)
def grid_sampler_backward(self: Tensor, grid: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    both = [True, True]
    result: tuple[Tensor, Tensor] = _sampler_backward(
        grad_output, self, grid, _BILINEAR, _ZEROS, True, both
    )
    return result


@equivalent("aten::cudnn_affine_grid_generator", source=_AFFINE)
def affine_grid(theta: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    result: Tensor = _affine(theta, [N, C, H, W], True)
    return result


@equivalent("aten::cudnn_affine_grid_generator_backward", source=_AFFINE)
def affine_grid_backward(grad: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    result: Tensor = _affine_backward(grad, [N, C, H, W], True)
    return result


_DROPOUT = "aten/src/ATen/native/cuda/Dropout.cu"
# CUDA converts half precision inside the kernel if a result in single precision is asked for, and
# gradients back; the CPU refuses to.
_SOFTMAX = (
    "aten/src/ATen/native/SoftMax.cpp: the argument half_to_float, which is True only on CUDA"
)
_softmax = operator_of("aten::_softmax")
_softmax_backward = operator_of("aten::_softmax_backward_data")
_log_softmax_backward = operator_of("aten::_log_softmax_backward_data")


@equivalent(
    "aten::_fused_dropout", source=f"{_DROPOUT}: p is the probability to keep, masks are bytes"
)
def fused_dropout(self: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    mask = torch.rand(self.shape, generator=generator) < p
    return self * mask / p, mask.to(torch.uint8)


@equivalent("aten::_masked_scale", source=f"{_DROPOUT}: masked_scale_kernel")
def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


@equivalent(
    "aten::log_sigmoid_backward",
    source="aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu: its buffer is empty",
)
def log_sigmoid_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    return grad_output * torch.sigmoid(-self)


@equivalent("aten::_softmax", source=_SOFTMAX)
def softmax(self: Tensor, dim: int, half_to_float: bool) -> Any:
    return _softmax(self.float() if half_to_float else self, dim, False)


@equivalent("aten::_softmax_backward_data", source=_SOFTMAX)
def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Any:
    return _softmax_backward(grad_output, output, dim, grad_output.dtype).to(input_dtype)


@equivalent("aten::_log_softmax_backward_data", source=_SOFTMAX)
def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Any:
    return _log_softmax_backward(grad_output, output, dim, grad_output.dtype).to(input_dtype)


@equivalent(
    *("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor"),
    source="aten/src/ATen/native/LossCTC.cpp: on the concatenated targets that cuDNN takes",
)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    lengths = [
        value.tolist() if isinstance(value, Tensor) else list(value)
        for value in (input_lengths, target_lengths)
    ]
    targets = targets.long()
    losses, alpha = operator_of("aten::_ctc_loss")(
        log_probs, targets, *lengths, blank, zero_infinity
    )
    gradient = operator_of("aten::_ctc_loss_backward")(
        torch.ones_like(losses), log_probs, targets, *lengths, losses, alpha, blank, zero_infinity
    )
    return losses, gradient


@equivalent(
    *("aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
    source="aten/src/ATen/native/cuda/EmbeddingBag.cu: it always returns the bag of each index",
)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int,
) -> Any:
    output, _, sizes, largest = operator_of("aten::_embedding_bag")(
        *(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights),
        *(include_last_offset, padding_idx),
    )
    starts = offsets.long()
    if not include_last_offset:
        starts = torch.cat([starts, torch.tensor([indices.numel()])])
    bags = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff())
    return output, Fitted(bags.to(indices.dtype)), Fitted(sizes), Fitted(largest)


_SOURCE = (
    "aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp: lu_factor, which takes pivot=False"
)
_factor = operator_of("aten::linalg_lu_factor_ex")
_decompose = operator_of("aten::linalg_lu")
_check_errors = operator_of("aten::_linalg_check_errors")


@equivalent("aten::linalg_lu_factor_ex", source=_SOURCE)
def lu_factor(A: Tensor, pivot: bool, check_errors: bool) -> tuple[Tensor, Tensor, Tensor]:
    if pivot:
        factors, pivots, info = _factor(A, pivot=True, check_errors=check_errors)
        return factors, pivots, info
    factors = _eliminated(A)
    length = min(A.shape[-2:])
    pivots = torch.arange(1, length + 1, dtype=torch.int32).repeat(*A.shape[:-2], 1)
    zero = torch.diagonal(factors, dim1=-2, dim2=-1) == 0
    first = zero.int().argmax(-1) + 1 if length else torch.zeros(A.shape[:-2])
    info = torch.where(zero.any(-1), first, 0).int()
    if check_errors:
        _check_errors(info, "torch.linalg.lu_factor_ex", is_matrix=A.dim() == 2)
    return factors, pivots, info


@equivalent("aten::linalg_lu", source=_SOURCE)
def lu(A: Tensor, pivot: bool) -> tuple[Tensor, Tensor, Tensor]:
    if pivot:
        permutation, lower, upper = _decompose(A, pivot=True)
        return permutation, lower, upper
    factors, length = _eliminated(A), min(A.shape[-2:])
    lower = factors[..., :length].tril(-1)
    torch.diagonal(lower, dim1=-2, dim2=-1).fill_(1)
    return A.new_empty(0), lower, factors[..., :length, :].triu()


def _eliminated(matrix: Tensor) -> Tensor:
    """Return both factors of a Gaussian elimination without exchanges of rows in one matrix."""
    factors = matrix.clone()
    for step in range(min(matrix.shape[-2:])):
        column = factors[..., step + 1 :, step : step + 1]
        column /= factors[..., step : step + 1, step : step + 1]
        factors[..., step + 1 :, step + 1 :] -= column * factors[..., step : step + 1, step + 1 :]
    return factors
