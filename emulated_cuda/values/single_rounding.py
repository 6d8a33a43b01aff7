"""Operators of half precision that a card computes in single precision and rounds once.

The CPU's kernels for them round a product, or a logarithm's argument, before they go on.
"""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values.operators import Kernel

_HALF = (torch.float16, torch.bfloat16)
_SUMS = "aten/src/ATen/native/ufunc/add.h and cuda/CUDALoops.cuh: opmath_t"
_LISTS = "aten/src/ATen/native/cuda/ForeachBinaryOp*.cu: opmath_t"
_LOGIT = "aten/src/ATen/native/cuda/UnarySpecialOpsKernel.cu: logit_kernel_cuda, T_ACC"
_UNIFORM = "aten/src/ATen/native/cuda/DistributionTemplates.h: uniform_kernel, which draws floats"
ROUNDED_ONCE = {
    **{
        f"aten::{base}{overload}": _SUMS
        for base in ("add", "sub", "rsub")
        for overload in (".Tensor", "_.Tensor", ".out", ".Scalar", "_.Scalar")
    },
    **{
        f"aten::_foreach_{base}{end}.{overload}": _LISTS
        for base in ("add", "sub")
        for end in ("", "_")
        for overload in ("List", "Scalar", "ScalarList", "Tensor")
    },
    **dict.fromkeys(("aten::logit", "aten::logit_", "aten::logit.out"), _LOGIT),
    "aten::uniform_": _UNIFORM,
}
"""Operator -> where torch's kernel for CUDA computes it in single precision."""


def rounded_once(name: str, compute: Kernel) -> Kernel:
    """Return a function for the CPU that computes an operator in single precision if it is one."""
    if name not in ROUNDED_ONCE:
        return compute
    is_in_place = name.partition(".")[0].endswith("_")
    is_uniform = name == "aten::uniform_"

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_half(value) for value in args[:2]):
            return compute(*args, **kwargs)
        wide = [_widened(value) for value in args]
        out = kwargs.get("out")
        if out is not None:
            computed = compute(*wide, **{**kwargs, "out": torch.empty(0)})
            return out.resize_(computed.shape).copy_(computed)
        computed = compute(*wide, **kwargs)
        if not is_in_place:
            return computed  # it is rounded when it is written into the result
        targets, values = (x if isinstance(x, list) else [x] for x in (args[0], wide[0]))
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        if is_uniform:
            start, end = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
            args[0].masked_fill_(args[0] == end, start)  # a card draws no number that is the end
        return args[0]

    return call


def _is_half(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_half(item) for item in value)
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(item) for item in value]
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value
