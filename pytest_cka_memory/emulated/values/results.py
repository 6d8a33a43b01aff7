"""Write what was computed on the CPU into the tensors that torch's CUDA operator returned."""

from __future__ import annotations

from typing import Any

import torch

from pytest_cka_memory.emulated.values.aliases import alias


class ShapeError(RuntimeError):
    """The CPU's result has another shape than that of the operator on the device."""


def write(results: Any, computed: Any) -> None:
    """Copy computed tensors into results of the same structure.

    Raises:
        ShapeError: if their shapes differ.
    """
    if isinstance(results, torch.Tensor):
        if isinstance(computed, torch.Tensor):
            _write_tensor(results, computed)
    elif isinstance(results, (list, tuple)) and isinstance(computed, (list, tuple)):
        for result, value in zip(results, computed, strict=False):
            write(result, value)


def _write_tensor(result: torch.Tensor, computed: torch.Tensor) -> None:
    if result.shape != computed.shape:
        if result.numel() == 0 or computed.numel() == 0:
            return  # statistics that only one of the two returns
        raise ShapeError(f"{tuple(computed.shape)} computed for {tuple(result.shape)}")
    target = alias(result)
    if target.data_ptr() != computed.data_ptr() or target.stride() != computed.stride():
        target.copy_(computed)


def upload(value: Any, device: torch.device) -> Any:
    """Return a computed result in memory that torch's allocator gives on the device."""
    if isinstance(value, torch.Tensor):
        return upload_tensor(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)([upload(item, device) for item in value])
    return value


def upload_tensor(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one tensor on the device."""
    if value.layout is not torch.strided:
        return value.to(device)
    shape, stride = value.shape, value.stride()
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
    alias(result).copy_(value)
    return result


def replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give an ``out=`` argument the shape and the values of a computed result."""
    if target.shape != value.shape:
        target.resize_(value.shape)
    alias(target).copy_(value)
