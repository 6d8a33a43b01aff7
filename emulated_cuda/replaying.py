"""``python -m emulated_cuda.replaying``: makes recorded requests to torch's allocator.

The requests are numbers: this program knows nothing of files that torch writes. It imports torch
once and forks for each run, because a setting of the allocator belongs to a process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from emulated_cuda.cards import DEFAULT_CARD
from emulated_cuda.loading.library import LIBRARY, path_of_compiled
from emulated_cuda.loading.loaded import load
from emulated_cuda.packing import packed, unpacked

ALLOCATE, FREE, EMPTY_CACHE, RELEASE, ATTEMPT, DROP_POOL, BEGIN, SET = range(8)
"""What a request asks for.

``RELEASE`` is an ``empty_cache`` that the allocator made itself, because the card was full. An
``ATTEMPT`` is an allocation that was refused when it was recorded; it is freed at once. ``BEGIN``
ends the part that rebuilds the state in which a recording begins. ``SET`` sets the settings of
which its key is the number in :attr:`texts`.
"""
_ANYWHERE = 2**64 - 1
"""No position."""
_UNIT = 2 * 2**20
"""Positions and what a device gives are multiples of this."""
_MOST_UNITS = 2**30
_STREAMS_OF_TORCH = 32
"""So many streams torch has of one priority; then it hands out the same ones again."""


def main(arguments: Sequence[str]) -> int:
    """Make the requests of one file, once for each run that it has.

    Args:
        arguments: the path of a file of :mod:`.packing`, and that of the file for the results, a
            list of dicts. The first has a dict of ``requests`` (a dict of ``actions``, ``keys``,
            ``sizes``, ``streams`` and ``pools``, arrays as bytes, ``texts``, and of the requests
            for which the recording's card gave memory ``grown``, their numbers, and
            ``positions``, bytes from the device's lowest address, below ``positions_bytes``), of
            ``runs`` (a list of dicts of ``settings``, ``attempts``, ``releases``, ``positioned``,
            whether memory is at these positions, and ``emptied``, the numbers of requests before
            which the cache is emptied) and of ``total_bytes``.
    """
    source, target = map(Path, arguments)
    job = unpacked(source.read_bytes())
    load(DEFAULT_CARD, total_bytes=job["total_bytes"], values=False)
    import torch  # noqa: F401 - imported before the forks

    results = [_in_child(partial(_run, job["requests"], run)) for run in job["runs"]]
    target.write_bytes(packed(results))
    return 0


def _in_child(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a forked process."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            result = function()
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(packed(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(process, 0)
    if not answer:
        return {
            "error": (f"the replay's process ended with status {os.waitstatus_to_exitcode(status)}")
        }
    results: dict[str, Any] = unpacked(answer)
    return results


class _Device:
    """The allocator of the emulated device, and what is on loan from it."""

    def __init__(self) -> None:
        import torch

        from emulated_cuda import torch_private

        self._torch = torch
        self.out_of_memory = torch.cuda.OutOfMemoryError
        torch.cuda.init()
        self.allocate, self.free = torch_private.raw_allocator()
        self.set = torch_private.set_allocator_settings
        self._streams: dict[int, Any] = {0: torch.cuda.default_stream()}
        self._pools: dict[int, Any] = {}
        self._current = ExitStack()
        library = ctypes.CDLL(path_of_compiled(LIBRARY))
        self._memory_info = library.cudaMemGetInfo
        self._free, self._total = ctypes.c_size_t(), ctypes.c_size_t()
        self._references = ctypes.byref(self._free), ctypes.byref(self._total)
        self._leave_positions = library.emulated_leave_positions
        self._leave_positions.argtypes, self._leave_positions.restype = [ctypes.c_size_t], None
        self._set_next_position = library.emulated_set_next_position
        self._set_next_position.argtypes = [ctypes.c_size_t]
        self._set_next_position.restype = ctypes.c_size_t
        self._counter = torch_private.segment_counter()
        self.refused_positions = 0
        self.is_stream_reused = False

    def free_bytes(self) -> int:
        """Return what the device has left."""
        self._memory_info(*self._references)
        return self._free.value

    def leave_positions(self, size: int) -> None:
        """Give no lower addresses than these to allocations without a position."""
        self._leave_positions(size)
        if self._counter is not None:
            self._counter.value += min(size // _UNIT, _MOST_UNITS)

    def allocate_at(self, position: int, size: int, stream: int) -> int:
        """Allocate; if that takes memory from the device, it is at a position, if that is free.

        Torch versions that order segments by a number, in the place of the address, get one that
        gives them the same order.
        """
        self._set_next_position(position)
        counter = self._counter
        number = 0 if counter is None else counter.value
        if counter is not None:
            counter.value = min(position // _UNIT, _MOST_UNITS)
        try:
            address: int = self.allocate(size, stream)
        finally:
            if counter is not None:
                counter.value = number
            self.refused_positions = self._set_next_position(_ANYWHERE)
        return address

    def follows_positions(self) -> bool:
        """Return whether the allocator takes the lower one of two equal blocks."""
        size = 6 * _UNIT  # more than 10 MB have a segment of their own
        try:
            high, low = (self.allocate_at(position, size, 0) for position in (size, 0))
        except self.out_of_memory:
            return False
        self.free(high)
        self.free(low)
        lowest = self.allocate(size, 0)
        self.free(lowest)
        self.empty_cache()
        return lowest == low < high

    def stream(self, number: int) -> int:
        """Return the pointer of a stream."""
        if number not in self._streams:
            priority = 0 if len(self._streams) <= _STREAMS_OF_TORCH else -1
            stream = self._torch.cuda.Stream(priority=priority)
            known = {other.cuda_stream for other in self._streams.values()}
            self.is_stream_reused |= stream.cuda_stream in known
            self._streams[number] = stream
        pointer: int = self._streams[number].cuda_stream
        return pointer

    def use_pool(self, number: int) -> None:
        """Allocate in a pool from now on; 0 is the allocator's own."""
        self._current.close()
        if number:
            if number not in self._pools:
                self._pools[number] = self._torch.cuda.MemPool()
            self._current.enter_context(self._torch.cuda.use_mem_pool(self._pools[number]))

    def drop_pool(self, number: int) -> None:
        """Let the allocator free a pool, as when the last graph that uses it is deleted."""
        self._pools.pop(number, None)

    def empty_cache(self) -> None:
        self._torch.cuda.empty_cache()

    def layout(self) -> list[Any]:
        """Return ``(address, bytes, stream, is small, is expandable, blocks)`` of each segment.

        A block is ``(bytes, whether it is in use)``.
        """
        return [
            (
                *(segment["address"], segment["total_size"], segment["stream"]),
                *(segment["segment_type"] == "small", bool(segment.get("is_expandable"))),
                [(block["size"], block["state"] != "inactive") for block in segment["blocks"]],
            )
            for segment in self._torch.cuda.memory_snapshot()
        ]

    def figures(self) -> dict[str, int]:
        """Return the allocator's own counts of the run."""
        stats = self._torch.cuda.memory_stats()
        return {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "end_allocated_bytes": stats["allocated_bytes.all.current"],
            "end_reserved_bytes": stats["reserved_bytes.all.current"],
            "segments": stats["segment.all.allocated"],
            "device_calls": stats.get("num_device_alloc", 0),
            "device_frees": stats.get("num_device_free", 0),
        }

    def reset(self) -> None:
        self._torch.cuda.reset_peak_memory_stats()
        self._torch.cuda.reset_accumulated_memory_stats()


def _run(request_list: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    device = _Device()
    ignored = run["positioned"] and not device.follows_positions()
    if run["settings"]:
        device.set(run["settings"])
    replay = _Replay(device, request_list, run)
    begun = time.perf_counter()
    replay.make_all()
    results = {**replay.result(), **device.figures(), "seconds": time.perf_counter() - begun}
    return {**results, "ignored_positions": ignored}


class _Replay:
    """Makes the requests, and notes the reserve where it changes."""

    def __init__(
        self, device: _Device, request_list: Mapping[str, Any], run: Mapping[str, Any]
    ) -> None:
        self._device, self._requests, self._settings = device, request_list, run
        self._at, self._levels = array("I"), array("Q")
        """Numbers of requests that have changed the reserve, and the reserve then."""
        self._live: dict[int, int] = {}
        self._refused: dict[str, int] | None = None
        self._layout: list[Any] = []
        self._unknown = 0
        self._positions: dict[int, int] = {}
        """Number of a request -> where the memory is that the device gives for it."""
        if run["positioned"]:
            rows = zip(
                array("I", request_list["grown"]),
                array("Q", request_list["positions"]),
                strict=True,
            )
            self._positions.update(rows)

    def make_all(self) -> None:
        device, live, positions = self._device, self._live, self._positions
        allocate, free, free_bytes = device.allocate, device.free, device.free_bytes
        columns = {name: array("Q", self._requests[name]) for name in ("keys", "sizes")}
        columns |= {name: array("I", self._requests[name]) for name in ("streams", "pools")}
        pointers: dict[int, int] = {}
        in_pool = 0
        all_bytes = level = free_bytes()
        out_of_memory = device.out_of_memory
        rows = zip(self._requests["actions"], *columns.values(), strict=True)
        if positions:
            device.leave_positions(self._requests["positions_bytes"])
        emptied = frozenset(self._settings.get("emptied", ()))
        for number, (action, key, size, stream, pool) in enumerate(rows):
            if number in emptied:
                device.use_pool(0)
                in_pool = 0
                device.empty_cache()
            if action == FREE:
                pointer = live.pop(key, 0)
                if pointer:
                    free(pointer)
                else:
                    self._unknown += 1
                continue
            if action in (ALLOCATE, ATTEMPT):
                if action == ATTEMPT and not self._settings["attempts"]:
                    continue
                if pool != in_pool:
                    device.use_pool(pool)
                    in_pool = pool
                if stream not in pointers:
                    pointers[stream] = device.stream(stream)
                try:
                    if number in positions:
                        address = device.allocate_at(positions[number], size, pointers[stream])
                    else:
                        address = allocate(size, pointers[stream])
                except out_of_memory:
                    self._refused = {"request": number, "bytes": size, "free_bytes": free_bytes()}
                    break
                if action == ALLOCATE:
                    live[key] = address
                else:
                    free(address)
            else:
                device.use_pool(0)
                in_pool = 0
                self._do(action, key)
            now = free_bytes()
            if now != level:
                level = now
                self._at.append(number)
                self._levels.append(all_bytes - now)
        device.use_pool(0)

    def _do(self, action: int, key: int) -> None:
        device = self._device
        if action == EMPTY_CACHE or (action == RELEASE and self._settings["releases"]):
            device.empty_cache()
        elif action == DROP_POOL:
            device.drop_pool(key)
        elif action == SET:
            text = self._requests["texts"][key] or self._settings["settings"]
            if text:
                device.set(text)
        elif action == BEGIN:
            self._layout = device.layout()
            device.reset()

    def result(self) -> dict[str, Any]:
        return {
            "at": self._at.tobytes(),
            "levels": self._levels.tobytes(),
            "layout": self._layout,
            "refused": self._refused,
            "unknown_frees": self._unknown,
            "streams_reused": self._device.is_stream_reused,
            "refused_positions": self._device.refused_positions,
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
