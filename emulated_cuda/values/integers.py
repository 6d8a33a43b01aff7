"""Division of integers by zero, for which a card raises no error.

The CPU does. On a card a quotient that is rounded down is 0 then (`div_floor_integer` of PyTorch;
before torch 2.12 it was not defined). Other roundings and remainders by zero are not defined there.
"""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values.operators import Kernel

ROUNDED_DOWN = (
    *("floor_divide", "floor_divide.out", "floor_divide_.Tensor"),
    *("div.Tensor_mode", "div.out_mode", "div_.Tensor_mode"),
)
"""Operators that divide, with rounding down as the only or one possible mode."""


def zero_by_zero(divide: Kernel) -> Kernel:
    """Return a kernel for the CPU that divides; quotients of integers by 0 are 0."""

    def call(self: Any, other: Any, **kwargs: Any) -> Any:
        is_down = kwargs.get("rounding_mode", "floor") == "floor"
        if not is_down or torch.result_type(self, other).is_floating_point:
            return divide(self, other, **kwargs)
        if not isinstance(other, torch.Tensor):
            quotient = divide(self, other or 1, **kwargs)
            return quotient if other else quotient.zero_()
        zero = other == 0
        if not zero.any():
            return divide(self, other, **kwargs)
        return divide(self, torch.where(zero, 1, other), **kwargs).masked_fill_(zero, 0)

    return call
