"""Batches of any structure: count, move, cut and concatenate their samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cka.capture.outputs import tensors_in
from cka.errors import InputError


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the batch's first tensor; None if there is no tensor."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), None)


def model_input(batch: Any) -> Any:
    """Return the part of a batch that is the model's input.

    This is the first element of a tuple or list, as in ``(images, labels)``, the first field of a
    dataclass, and a whole tensor or mapping.

    Raises:
        InputError: if the batch is an empty tuple or list.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise InputError(
                f"got an empty batch, {batch!r}; yield a tensor, (inputs, ...) or a dict"
            )
        return model_input(batch[0])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return model_input(getattr(batch, dataclasses.fields(batch)[0].name))
    return batch


def run_model(model: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> Any:
    """Call the model with a mapping as keyword arguments, or with anything else as one argument.

    Args:
        model: the model.
        inputs: its input.
        keywords: keyword arguments that are added to an input that is not a mapping.
    """
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs, **keywords)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Copy a batch to a device; convert its floating-point tensors if a dtype is given."""
    # The CPU would not wait for an asynchronous copy to host memory before reading it.
    non_blocking = device.type != "cpu"

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wanted, non_blocking=non_blocking)

    return map_tensors(batch, move)


def first_samples(batch: Any, count: int) -> Any:
    """Return the first ``count`` samples of a batch."""
    return map_tensors(batch, lambda tensor: tensor[:count] if tensor.ndim else tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Mappings become plain dicts. Objects of other types are returned unchanged, even if they have
    a method ``.to``: they need ``CKA(feed=...)``.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(one, change) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(one, change) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            # object.__setattr__ also works on the copy of a frozen dataclass.
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), change))
        return changed
    return value


def concatenate_batches(first: Any, second: Any) -> Any:
    """Return one batch with the n1 + n2 samples of both.

    Raises:
        InputError: if the batches differ in structure, or their samples in shape.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.ndim == 0 or first.shape[1:] != second.shape[1:]:
            raise InputError(
                f"cannot concatenate tensors of shape {tuple(first.shape)} and "
                f"{tuple(second.shape)}; only their first dimension may differ"
            )
        return torch.cat([first, second])
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {key: concatenate_batches(first[key], second[key]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields") and type(first) is type(second):
        return type(first)(*map(concatenate_batches, first, second))
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        if any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in (*first, *second)):
            pairs = zip(first, second, strict=True)
            return type(first)(concatenate_batches(a, b) for a, b in pairs)
        return type(first)([*first, *second])  # one entry per sample, such as a list of texts
    raise InputError(
        f"cannot concatenate batches of type {type(first).__name__} and {type(second).__name__}; "
        "both must be tensors, or the same kind of mapping or sequence"
    )
