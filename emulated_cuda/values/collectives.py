"""Collectives of ranks: refuse to send values that were not computed; send objects over Gloo.

NCCL moves the bytes itself. What a rank receives is known, because no rank sends a value that was
not computed: the library asks here before each call. ``all_gather_object`` and its like send
pickled bytes in tensors on the device, and read back sizes that operators have compared. Without
values no operator compares, so sizes would be zero.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from emulated_cuda.torch_versions import OBJECT_COLLECTIVES
from emulated_cuda.values import staleness


def send_over_gloo() -> None:
    """Have the collectives of objects use a group of Gloo with the same ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        return
    for name in OBJECT_COLLECTIVES.value:
        function = _over_gloo(getattr(distributed, name))
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, name, function)


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        group = bound.get("group") or torch.distributed.group.WORLD
        if group is not None and "nccl" in torch.distributed.get_backend(group):
            bound["group"] = _twin(group)
            bound.pop("device", None)
        return function(**bound)

    return call


@cache
def _twin(group: Any) -> Any:
    """Return a group of Gloo with the same ranks, which all make it at the same call."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)


_ASKED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
)
_kept: list[Any] = []


def answer_nccl(path: str) -> None:
    """Have the library ask whether values are known before it sends them.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    asked = _ASKED(_asked)
    _kept.append(asked)
    ctypes.PyDLL(path).emulated_ask_before_sending(asked)


def _asked(start: int, size: int, receives: int, text: int, room: int) -> int:
    """Return 1 and write why, if these bytes are sent and not known; note what is received."""
    if not staleness.is_possible():
        return 0
    if receives:
        staleness.note_received(start, size)
        return 0
    reason = staleness.reason_of_bytes(start, size)
    if reason is None:
        return 0
    encoded = reason.encode()[: room - 1] + b"\0"
    ctypes.memmove(text, encoded, len(encoded))
    return 1
