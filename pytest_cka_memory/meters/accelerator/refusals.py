"""Allocations that a device had no memory for: what was reserved and live then, also as a file."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import RawFrames, line_at
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.reserve import PoolId, ReserveState, explain_reserve
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator import owner_of, segments_of
from pytest_cka_memory.meters.base import RefusalFile, RefusedAllocation
from pytest_cka_memory.meters.collector import without_collections

_Segments = Sequence[Mapping[str, Any]]
_MOST_SECONDS = 10
"""A test that has taken so long to write files gets no further one, until it ends."""
_MOST_BLOCKS = 1_000_000
"""Of more blocks no file is written: it would be larger than 100 MB."""
_MOST_FRAMES = 64


def reserve_of(device: torch.device) -> ReserveState | None:
    """Return what the reserve of a device consists of; None if it has no snapshot of it."""
    if not hasattr(torch.get_device_module(device), "memory_snapshot"):
        return None
    # A snapshot makes an object for each block, so that the collector would run.
    return without_collections(lambda: _explained(device, segments_of(device)))


def _explained(device: torch.device, segments: _Segments) -> ReserveState:
    settings = torch_private.allocator_settings(device.type)
    return explain_reserve(segments, settings, pool_name=_name_of)


def _name_of(pool: PoolId) -> str:
    return owner_of(pool) or "a private pool"


class Lines(NamedTuple):
    """What names the lines of blocks in a file that is written when memory is refused."""

    frames_of_blocks: Callable[[], Mapping[int, RawFrames]]
    """Returns address and frames of each live block of a device whose allocation was seen."""
    device_index: int
    """Of that device."""
    dump_history: Callable[[Path], bool] | None
    """Writes the history that the program itself records; None while this package records it,
    because that is written when the test has ended."""


class Refusals:
    """The last allocation of each device that was refused because memory was missing."""

    def __init__(self, device_type: str) -> None:
        self._last: dict[int, RefusedAllocation] = {}
        self._files: list[tuple[RefusalFile, Callable[[], Lines]]] = []
        """Those that are open; that which was opened last is written."""
        self.is_observed = torch_private.observe_out_of_memory(device_type, self._note)
        self._device_type = device_type

    def last(self, device: torch.device) -> RefusedAllocation | None:
        """Return that of one device; None if none was refused, or nobody knows."""
        return self._last.get(device.index or 0)

    def open(self, file: RefusalFile, lines: Callable[[], Lines]) -> None:
        """Write a file whenever memory is refused, until it is closed: the last time remains."""
        self._files.append((file, lines))

    def close(self, file: RefusalFile) -> None:
        """Write the file no more."""
        self._files = [pair for pair in self._files if pair[0] is not file]

    def _note(self, index: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        device = torch.device(self._device_type, index)
        refusal = Refusal(requested_bytes, free_bytes, total_bytes)
        # An exception here would replace the error that the program gets.
        try:
            if hasattr(torch.get_device_module(device), "memory_snapshot"):
                without_collections(lambda: self._look_at(device, refusal))
        except Exception:
            return

    def _look_at(self, device: torch.device, refusal: Refusal) -> None:
        segments = segments_of(device)
        before = self._last.get(device.index)
        number = 1 if before is None else before.number + 1
        state = _explained(device, segments)
        self._last[device.index] = RefusedAllocation(number, refusal, state)
        if not self._files:
            return
        file, lines = self._files[-1]
        began = time.monotonic()
        if file.seconds < _MOST_SECONDS:
            _write(file, lines(), device, refusal, segments)
            file.seconds += time.monotonic() - began


_refusals: dict[str, Refusals] = {}


def refusals_of(device_type: str) -> Refusals:
    """Return what observes the devices of a type, from now on: the allocator keeps it for ever."""
    if device_type not in _refusals:
        _refusals[device_type] = Refusals(device_type)
    return _refusals[device_type]


def _write(
    file: RefusalFile, lines: Lines, device: torch.device, refusal: Refusal, segments: _Segments
) -> None:
    if lines.dump_history is None:
        return
    # In another file first, so that there is never half of one, also if the process is ended.
    new = file.path.with_name(f"{file.path.name}.{os.getpid()}")
    try:
        file.make_folder()
        file.has_history = lines.dump_history(new)
        if not file.has_history:
            snapshot = _snapshot(lines, device, refusal, segments)
            if snapshot is None:
                file.problem = f"more than {_MOST_BLOCKS:,} blocks were live"
                return
            with new.open("wb") as output:
                pickle.dump(snapshot, output)
        new.replace(file.path)
        file.is_written = True
    except OSError as error:
        file.problem = f"cannot write {file.path}: {error.strerror or error}"
    finally:
        new.unlink(missing_ok=True)


def _snapshot(
    lines: Lines, device: torch.device, refusal: Refusal, segments: _Segments
) -> dict[str, Any] | None:
    """Return what torch's snapshot has, with the frames of this package's counter.

    Without a history torch has no frames, and no event for the refusal: both are added. None if
    there are too many blocks.
    """
    if sum(len(segment["blocks"]) for segment in segments) > _MOST_BLOCKS:
        return None
    frames = lines.frames_of_blocks() if device.index == lines.device_index else {}
    written: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        for block in segment["blocks"]:
            known = frames.get(block["address"])
            if known is not None and not block.get("frames"):
                if id(known) not in written:  # most blocks share a stack, which is written once
                    written[id(known)] = [_frame(code, last) for code, last in known]
                block["frames"] = written[id(known)]
    event = {
        "action": "oom",
        "device_free": refusal.free_bytes,
        "size": refusal.requested_bytes,
        "stream": 0,
        "time_us": time.time_ns() // 1000,
        "frames": _current_frames(),
    }
    return {
        "segments": list(segments),
        "device_traces": [[] for _ in range(device.index)] + [[event]],
        "allocator_settings": dict(torch_private.allocator_settings(device.type)),
    }


def _frame(code: Any, last_instruction: int) -> dict[str, Any]:
    line = line_at(code, last_instruction)
    return {"filename": code.co_filename, "line": line, "name": code.co_name}


def _current_frames() -> list[dict[str, Any]]:
    """Return the frames of the program in this thread, innermost first, as torch writes them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(_frame(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frames


_OWN_FILES = (__file__, without_collections.__code__.co_filename)
