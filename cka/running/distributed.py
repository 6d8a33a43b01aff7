"""Exchange between the ranks of ``torch.distributed``; nothing else communicates."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_active() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this process's rank; 0 if it is the only one."""
    return dist.get_rank() if is_active() else 0


def gather(own: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks: builtin types that JSON can write.

    Ranks exchange tensors of bytes. ``torch.distributed`` can exchange any object, but by pickle,
    which runs code that the sender chooses.
    """
    device = _exchange_device(torch.device("cpu"))
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(device)
    sizes = [size.item() for size in _all_gather(torch.tensor([len(data)], device=device))]
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    texts = zip(sizes, _all_gather(padded), strict=True)
    return [json.loads(bytes(text[: int(size)].tolist())) for size, text in texts]


def _all_gather(own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def sum_over_ranks(vector: Tensor) -> Tensor:
    """Return the sum of the vectors of all ranks, on every rank and on the vector's device."""
    total = vector.to(_exchange_device(vector.device), copy=True)
    dist.all_reduce(total)
    return total.to(vector.device)


def _exchange_device(device: torch.device) -> torch.device:
    # NCCL can only exchange tensors on accelerators.
    if device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
