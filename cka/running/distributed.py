"""Exchange between the ranks of ``torch.distributed``; nothing else communicates."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def is_active() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(own: T) -> list[T]:
    """Return the (picklable) values of all ranks, in the order of ranks."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [one for one in found if one is not None]


def sum_over_ranks(vector: Tensor) -> Tensor:
    """Return the sum of the vectors of all ranks, on every rank and on the vector's device."""
    total = vector.to(_exchange_device(vector.device), copy=True)
    dist.all_reduce(total)
    return total.to(vector.device)


def _exchange_device(device: torch.device) -> torch.device:
    # NCCL can only add tensors on accelerators.
    if device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
