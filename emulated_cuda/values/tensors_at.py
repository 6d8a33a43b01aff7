"""Finds the tensors of a program by their addresses on the device."""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch


def tensors_at(addresses: Collection[int]) -> list[torch.Tensor] | None:
    """Return live tensors in whose storages the addresses lie; None if one is of no tensor.

    It looks at every object of the program, so it is slow.
    """
    missing, found = set(addresses) - {0}, []
    for value in gc.get_objects():
        if not missing:
            break
        if not issubclass(type(value), torch.Tensor):
            continue
        for address in list(missing):
            if _contains(value, address):
                missing.discard(address)
                found.append(value)
    return None if missing else found


def _contains(tensor: torch.Tensor, address: int) -> bool:
    try:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        return start <= address < start + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # it has no memory, such as a fake one
        return False
