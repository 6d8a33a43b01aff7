"""Write what was computed on the CPU into the tensors that torch's CUDA operator returned.

Also which errors of the CPU a card would report later, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from emulated_cuda.errors import DeviceAssertError
from emulated_cuda.torch_private import (
    compressed_parts,
    nested_from_parts,
    nested_parts,
    sparse_parts,
)
from emulated_cuda.torch_versions import ABOUT_VALUES, UNSUPPORTED
from emulated_cuda.values.aliases import alias, nested_alias


def is_unsupported(error: Exception) -> bool:
    """Whether the CPU has no such operator for these types, though a card has."""
    if isinstance(error, NotImplementedError):
        return True
    return not isinstance(error, IndexError) and bool(UNSUPPORTED.value.search(str(error)))


def is_assert(error: Exception) -> bool:
    """Whether an error is about a value, which a kernel would have refused."""
    return isinstance(error, IndexError) or bool(ABOUT_VALUES.value.search(str(error)))


def device_assert(operator: str, error: Exception) -> DeviceAssertError:
    """Return the error for a value that a kernel would have refused."""
    why = str(error).rstrip(".")
    return DeviceAssertError(
        f"{operator}: {why}. On a card this is a device-side assert: the kernel reports it "
        f"later, at the next synchronization, and every call after that fails"
    )


@dataclass(frozen=True)
class Everywhere:
    """A number that every element of a result gets, whatever its shape."""

    number: int


@dataclass(frozen=True)
class Fitted:
    """A result that the device may return in a padded, flattened or empty form."""

    tensor: torch.Tensor | None


class FormError(RuntimeError):
    """The form of the result depends on values: how many elements a sparse one has, for example."""


class ShapeError(RuntimeError):
    """The CPU's result has another shape than that of the operator on the device."""


def write(results: Any, computed: Any) -> list[torch.Tensor]:
    """Copy computed tensors into results of the same structure; return those without a value.

    Raises:
        ShapeError: if their shapes differ.
        FormError: if they are sparse, or quantized with a scale that depends on values.
    """
    if isinstance(results, torch.Tensor):
        return [] if _is_written(results, computed) or not results.numel() else [results]
    unwritten = []
    if isinstance(results, (list, tuple)):
        values = computed if isinstance(computed, (list, tuple)) else [computed]
        for index, result in enumerate(results):
            unwritten += write(result, values[index] if index < len(values) else None)
    return unwritten


def _is_written(result: torch.Tensor, computed: Any) -> bool:
    """Write one result; return whether there was a value for it."""
    if isinstance(computed, torch.Tensor):
        return _write_tensor(result, computed)
    if isinstance(computed, Everywhere):
        alias(result).fill_(computed.number)
        return True
    if isinstance(computed, Fitted) and computed.tensor is not None:
        _write_fitted(alias(result), computed.tensor)
        return True
    return False


def plain(computed: Any) -> Any:
    """Return what was computed as tensors, where the device has returned no form to fit."""
    if isinstance(computed, Everywhere):
        return torch.tensor(computed.number)
    if isinstance(computed, Fitted):
        return computed.tensor
    if isinstance(computed, (list, tuple)):
        return type(computed)([plain(value) for value in computed])
    return computed


def _write_fitted(target: torch.Tensor, computed: torch.Tensor) -> None:
    if target.numel() == computed.numel():
        target.copy_(computed.reshape(target.shape))
    elif target.numel() and target.dim() == computed.dim():
        for axis, length in enumerate(computed.shape):
            target = target.narrow(axis, 0, min(length, target.shape[axis]))
        target.copy_(computed[tuple(slice(length) for length in target.shape)])


def _write_tensor(result: torch.Tensor, computed: torch.Tensor) -> bool:
    if result.layout is not torch.strided:
        raise FormError
    if result.is_nested:
        return _write_nested(result, computed)
    if result.shape != computed.shape:
        if result.numel() == 0 or computed.numel() == 0:
            return result.numel() == 0  # only one of the two returns it
        raise ShapeError(f"{tuple(computed.shape)} computed for {tuple(result.shape)}")
    if result.is_quantized:
        return _write_quantized(result, computed)
    target = alias(result)
    if target.data_ptr() != computed.data_ptr() or target.stride() != computed.stride():
        target.copy_(computed)
    return True


def _write_quantized(result: torch.Tensor, computed: torch.Tensor) -> bool:
    if result.qscheme() is torch.per_channel_affine:
        alias(result.q_per_channel_scales()).copy_(computed.q_per_channel_scales())
        alias(result.q_per_channel_zero_points()).copy_(computed.q_per_channel_zero_points())
    elif (result.q_scale(), result.q_zero_point()) != (computed.q_scale(), computed.q_zero_point()):
        raise FormError
    alias(result).copy_(computed)
    return True


def _write_nested(result: torch.Tensor, computed: torch.Tensor) -> bool:
    parts = nested_alias(result).unbind(), computed.unbind()
    if [part.shape for part in parts[0]] != [part.shape for part in parts[1]]:
        raise ShapeError("its parts have other shapes on the CPU")
    for target, part in zip(*parts, strict=True):
        target.copy_(part)
    return True


def upload(value: Any, device: torch.device) -> Any:
    """Return a computed result in memory that torch's allocator gives on the device."""
    value = plain(value)
    if isinstance(value, torch.Tensor):
        return upload_tensor(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)([upload(item, device) for item in value])
    return value


def upload_tensor(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one tensor on the device."""
    if value.is_quantized:
        return value.to(device)
    if value.is_nested:
        values, parts = nested_parts(value)
        return nested_from_parts(upload_tensor(values, device), parts)
    if value.layout is torch.sparse_coo:
        indices, values = (upload_tensor(part, device) for part in sparse_parts(value))
        return torch.sparse_coo_tensor(
            *(indices, values, tuple(value.shape)),
            check_invariants=False,
            is_coalesced=value.is_coalesced(),
        )
    if value.layout is not torch.strided:
        outer, inner = compressed_parts(value)
        return torch.sparse_compressed_tensor(
            upload_tensor(outer, device),
            upload_tensor(inner, device),
            upload_tensor(value.values(), device),
            tuple(value.shape),
            layout=value.layout,
            check_invariants=False,
        )
    shape, stride = value.shape, value.stride()
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
    alias(result).copy_(value)
    return result


def replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give an ``out=`` argument the shape and the values of a computed result."""
    if target.shape != value.shape:
        target.resize_(value.shape)
    alias(target).copy_(value)
