"""Operators of half precision that CUDA computes in single precision and rounds once.

The CPU's kernels round before the last step, or after each factor. What is returned here in single
precision is rounded when it is written into the operator's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_cuda.torch_private import operator_of
from emulated_cuda.values.equivalents.table import equivalent

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
