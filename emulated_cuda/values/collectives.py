"""Collectives: NCCL moves bytes itself, so only what is known may be sent.

The library asks here before each call. What a rank receives is known, because no rank sends a value
that was not computed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from emulated_cuda.values import staleness

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
