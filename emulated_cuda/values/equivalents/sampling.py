"""Grid samplers of cuDNN."""

from __future__ import annotations

from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent

_BILINEAR, _ZEROS = 0, 0
_SAMPLER = "aten/src/ATen/native/cudnn/GridSampler.cpp: bilinear, zeros around, aligned corners"
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
