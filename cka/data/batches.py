"""Batches of any shape: how many samples, where to, what goes into the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cka.errors import InputError
from cka.capture.outputs import tensors_in


def samples_in(batch: Any) -> int | None:
    """Number n of samples: the first dimension of the first tensor of the batch that has one."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), None)


def model_input(batch: Any) -> Any:
    """What of a batch the model gets.

    The first element of a tuple or list, as in ``(images, labels)``; of a dataclass its first
    field; a tensor or a mapping whole.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise InputError("got an empty batch; a batch is a tensor, (inputs, ...) or a dict")
        return model_input(batch[0])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return model_input(getattr(batch, dataclasses.fields(batch)[0].name))
    return batch


def call(model: nn.Module, inputs: Any) -> Any:
    """Run the model: mappings as keyword arguments, all of them, anything else as the only one."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on a device; floating-point tensors in the given dtype, if any."""
    # Copies to the host are not ordered with its own work, so only copies away from it may lag.
    lag = device.type != "cpu"

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wanted, non_blocking=lag)

    return map_tensors(batch, move)


def first_samples(batch: Any, count: int) -> Any:
    """The first samples of a batch only."""
    return map_tensors(batch, lambda tensor: tensor[:count] if tensor.ndim else tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested structure with every tensor changed; anything unknown is left alone.

    Mappings come back as plain dicts. Objects that can move themselves (``.to``) are no
    exception: a batch type of one's own needs ``feed=``.
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
            # Frozen ones too: the copy is ours.
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), change))
        return changed
    return value


def joined(first: Any, second: Any) -> Any:
    """Both batches as one of n1 + n2 samples.

    Raises:
        InputError: if they are not built alike, or a sample's shape differs between them.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.ndim == 0 or first.shape[1:] != second.shape[1:]:
            raise InputError(f"{tuple(first.shape)} and {tuple(second.shape)} cannot be joined")
        return torch.cat([first, second])
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {key: joined(first[key], second[key]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields") and type(first) is type(second):
        return type(first)(*map(joined, first, second))
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        if any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in (*first, *second)):
            return type(first)(joined(a, b) for a, b in zip(first, second, strict=True))
        return type(first)([*first, *second])  # one entry per sample, such as a list of texts
    raise InputError(f"cannot join a {type(first).__name__} and a {type(second).__name__}")
