"""Decompositions with arguments that only CUDA accepts: LU without pivots."""

from __future__ import annotations

import torch
from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent

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
