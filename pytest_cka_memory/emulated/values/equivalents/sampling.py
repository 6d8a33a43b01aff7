"""Grid samplers of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pytest_cka_memory.emulated.torch_private import operator_of

_BILINEAR, _ZEROS = 0, 0
_sampler = operator_of("aten::grid_sampler_2d")
_sampler_backward = operator_of("aten::grid_sampler_2d_backward")
_affine = operator_of("aten::affine_grid_generator")
_affine_backward = operator_of("aten::affine_grid_generator_backward")


# aten/src/ATen/native/cudnn/GridSampler.cpp: bilinear, padded with zeros, aligned corners
def grid_sampler(image: Tensor, grid: Tensor) -> Tensor:
    result: Tensor = _sampler(image, grid, _BILINEAR, _ZEROS, True)
    return result


def grid_sampler_backward(image: Tensor, grid: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    both = [True, True]
    result: tuple[Tensor, Tensor] = _sampler_backward(
        gradient, image, grid, _BILINEAR, _ZEROS, True, both
    )
    return result


# aten/src/ATen/native/cudnn/AffineGridGenerator.cpp: aligned corners
def affine_grid(theta: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    result: Tensor = _affine(theta, [n, c, h, w], True)
    return result


def affine_grid_backward(gradient: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    result: Tensor = _affine_backward(gradient, [n, c, h, w], True)
    return result


EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten::cudnn_grid_sampler": grid_sampler,
    "aten::cudnn_grid_sampler_backward": grid_sampler_backward,
    "aten::cudnn_affine_grid_generator": affine_grid,
    "aten::cudnn_affine_grid_generator_backward": affine_grid_backward,
}
