"""Sums of every rank, added up: the only place that talks to other processes."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def active() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(own: T) -> list[T]:
    """What every rank has to say (picklable), in the order of ranks."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [one for one in found if one is not None]


def add_up(vector: Tensor) -> Tensor:
    """Sum of a vector over the ranks, on every rank."""
    total = vector.to(_exchange_device(vector.device), copy=True)
    dist.all_reduce(total)
    return total.to(vector.device)


def _exchange_device(device: torch.device) -> torch.device:
    # NCCL adds on accelerators only.
    if device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
