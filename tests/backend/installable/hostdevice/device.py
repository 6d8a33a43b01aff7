"""The module that torch makes available as ``torch.privateuseone``."""

import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_native: Any = None


def take(native: ModuleType) -> None:
    """Answer from this compiled library."""
    global _native
    _native = native


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return _native.device_count()


def current_device() -> int:
    return _native.current_device()


def set_device(index: int) -> None:
    _native.set_device(index)


@contextmanager
def device(wanted: Any) -> Iterator[None]:
    """Make a device, or its index, the current one for a while."""
    before = current_device()
    set_device(wanted if isinstance(wanted, int) else wanted.index or 0)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(index: int = 0) -> str:
    return f"Host Device {index}"


def manual_seed_all(seed: int) -> None:
    """Nothing to seed: random numbers are the CPU's."""


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def reset_peak_memory_stats(index: int | None = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index)


def set_capacity(size: int, index: int = 0) -> None:
    """Run out of memory above so many bytes reserved."""
    _native.set_capacity(index, size)


def hold(size: int, index: int = 0) -> int:
    """Allocate as a library does for its workspace, without a tensor; returns the address."""
    return _native.hold(size, index)


def let_go(address: int) -> None:
    """Free what :func:`hold` allocated."""
    _native.let_go(address)


_notes: list[list[dict[str, Any]]] = []


def _note() -> int:
    frames = traceback.extract_stack(sys._getframe(1))[::-1]
    _notes.append([{"filename": f.filename, "line": f.lineno, "name": f.name} for f in frames])
    return len(_notes) - 1


def _record_memory_history(enabled: str | None = "all", max_entries: int = 0) -> None:
    _native.set_recorder(None if enabled is None else _note)


def _snapshot() -> dict[str, Any]:
    """Every block in use, each a segment of its own."""
    segments = []
    for device, address, size, requested, note in _native.blocks():
        block = {"address": address, "size": size, "requested_size": requested}
        frames = _notes[note] if note >= 0 else []
        block |= {"state": "active_allocated", "frames": frames}
        segments.append({"device": device, "address": address, "blocks": [block]})
    return {"segments": segments}


def _dump_snapshot(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(_snapshot(), file)


memory = SimpleNamespace(
    _record_memory_history=_record_memory_history,
    _snapshot=_snapshot,
    _dump_snapshot=_dump_snapshot,
)
