"""The process that reads the file of a stranger.

A pickle can call any function and can ask for any amount of memory. This process admits only
builtin types, and has limits on memory and time that its parent sets; a file that exceeds them ends
this process and nothing else. What it found is written to its standard output by
:mod:`emulated_cuda.packing`, as arrays: a million events take 70 MB in this form, and a gigabyte as
the objects of the pickle.
"""

from __future__ import annotations

import gc
import pickle
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from emulated_cuda.packing import packed

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "oom", "snapshot"),
)
"""What torch records; the number of an action is its index here."""
STATES = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")
"""States of a block; the last is the name of the third in older versions of torch."""
IN_OPTIMIZER, IN_BACKWARD, IN_MODULE, IN_CONVERSION, IN_EMPTY_CACHE, IN_GRAPH = 1, 2, 4, 8, 16, 32
IN_TORCH_NPU = 64
"""Flags of a site: which functions of torch its stack has."""
MOST_EVENTS = 20_000_000
MOST_BLOCKS = 20_000_000
MOST_DEVICES = 1024
_MOST_USER_FRAMES = 4
_MOST_FRAMES_SEARCHED = 512
_MOST_TEXT = 1000
"""Characters of a file name or the name of a function that are kept."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "\\site-packages\\", "<frozen")
_SKIP_DEVICE_KEYS = frozenset({"frames", "blocks"})


class WrongContentError(Exception):
    """A file that is not a snapshot; the text says what was found."""


class _BuiltinsOnly(pickle.Unpickler):
    """Unpickles dicts, lists, tuples, strings and numbers: a snapshot has nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise WrongContentError(
            f"the file asks for {module}.{name}"[:200] + ", but a snapshot has only builtin types"
        )

    def persistent_load(self, _: Any) -> NoReturn:
        raise WrongContentError("the file refers to objects that it does not contain")


def unpickled(file: BinaryIO) -> Any:
    """Return the object in a file, made of builtin types only.

    Raises:
        WrongContentError: if the file has anything else.
    """
    try:
        return _BuiltinsOnly(file).load()
    except (WrongContentError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged pickle does to the unpickler
        raise WrongContentError(
            f"the file cannot be unpickled: {type(error).__name__}: {error}"
        ) from None


def compacted(data: Any) -> dict[str, Any]:
    """Return a snapshot as arrays and tables, after a check of each value.

    Args:
        data: what the file has.

    Raises:
        WrongContentError: if it is not what ``torch.cuda.memory._snapshot()`` returns.
    """
    if type(data) is not dict or not {"segments", "device_traces"} & data.keys():
        raise WrongContentError(
            "the file has neither 'segments' nor 'device_traces'; write the file with "
            "torch.cuda.memory._dump_snapshot of torch 2.1 or later"
        )
    traces, segments = data.get("device_traces", []), data.get("segments", [])
    _require(
        type(traces) is list and type(segments) is list,
        "'segments' or 'device_traces' is not a list",
    )
    _require(
        len(traces) <= MOST_DEVICES,
        f"it has traces of {len(traces):,} devices, more than {MOST_DEVICES:,}",
    )
    sites = _Sites()
    devices = [_Events(sites).read(trace, number) for number, trace in enumerate(traces)]
    blocks = _segments(segments, sites)
    return {
        "devices": devices,
        "segments": blocks,
        "frames": sites.frames,
        "sites": list(sites.numbers),
        "settings": _settings(data.get("allocator_settings")),
        "origin": _settings(data.get("emulated_cuda")),
        "keys": sorted(key[:100] for key in data if type(key) is str)[:50],
        "host_events": sum(
            len(trace) for trace in _list(data.get("host_traces")) if type(trace) is list
        ),
    }


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise WrongContentError(text)


def _list(value: Any) -> list[Any]:
    return value if type(value) is list else []


class _Sites:
    """Numbers of the places in code that the stacks of events lead to; 0 for an empty stack."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, int, str]] = []
        self.numbers: dict[tuple[int, ...], int] = {(0,): 0}
        """``(flags, frame, its caller, ...)`` -> number of the site."""
        self._known: dict[int, tuple[int, int, bool]] = {}
        """Identity of a frame -> its number, its flags and whether it is a user's."""
        self._same: dict[tuple[str, int, str], int] = {}

    def of(self, stack: Any) -> int:
        """Return the number of a stack's site. The innermost frame comes first."""
        if not stack:
            return 0
        _require(type(stack) is list, "a stack is not a list")
        flags = 0
        frames: list[int] = []
        first = -1
        known = self._known
        for frame in (
            stack if len(stack) <= _MOST_FRAMES_SEARCHED else stack[:_MOST_FRAMES_SEARCHED]
        ):
            entry = known.get(id(frame))
            if entry is None:
                entry = known[id(frame)] = self._new(frame)
            number, flag, is_user = entry
            flags |= flag
            if is_user:
                frames.append(number)
                if len(frames) == _MOST_USER_FRAMES:
                    break
            elif first < 0 and number >= 0:
                first = number
        if not frames and first >= 0:
            frames.append(first)
        return self.numbers.setdefault((flags, *frames), len(self.numbers))

    def _new(self, frame: Any) -> tuple[int, int, bool]:
        """Return number, flags and whether it is code of the user."""
        _require(type(frame) is dict, "a frame is not a dict")
        name, file, line = frame.get("name", ""), frame.get("filename", ""), frame.get("line", 0)
        _require(type(name) is type(file) is str and type(line) is int, "a frame has wrong types")
        key = (file[-_MOST_TEXT:], line, name[:_MOST_TEXT])
        number = self._same.get(key)
        if number is None:
            number = self._same[key] = len(self.frames)
            self.frames.append(key)
        is_python = file.endswith(".py") or file.startswith("<") or "ipykernel" in file
        library = any(part in file for part in _LIBRARIES) or "/torch/" in file
        return number if is_python else -1, _flags(file, name), is_python and not library


def _flags(file: str, name: str) -> int:
    if "/torch_npu/" in file:
        return IN_TORCH_NPU
    if "torch/optim/" in file:
        return IN_OPTIMIZER
    if "torch/autograd/" in file and "function.py" not in file:
        return IN_BACKWARD
    if "torch/nn/modules/module.py" in file:
        return IN_MODULE if name.endswith("call_impl") else IN_CONVERSION
    if "torch/nn/init.py" in file or (
        "torch/nn/modules/" in file and name in ("__init__", "reset_parameters")
    ):
        return IN_CONVERSION
    if name == "empty_cache":
        return IN_EMPTY_CACHE
    return IN_GRAPH if "torch/cuda/graphs.py" in file else 0


class _Events:
    """The events of one device in arrays."""

    def __init__(self, sites: _Sites) -> None:
        self._sites = sites
        self.actions = bytearray()
        self.addresses, self.sizes, self.times = array("Q"), array("Q"), array("Q")
        self.streams, self.pools, self.places = array("I"), array("I"), array("I")
        self._streams: dict[int, int] = {}
        self._pools: dict[Any, int] = {(0, 0): 0}
        self._names_pools = False

    def read(self, trace: Any, number: int) -> dict[str, Any]:
        """Return the arrays of a trace."""
        _require(type(trace) is list, f"device_traces[{number}] is not a list")
        _require(
            len(trace) <= MOST_EVENTS, f"it has {len(trace):,} events, more than {MOST_EVENTS:,}"
        )
        for position, event in enumerate(trace):
            try:
                self._add(event)
            except (TypeError, OverflowError, KeyError, ValueError, AttributeError) as error:
                raise WrongContentError(
                    f"device_traces[{number}][{position}] is not an event of torch: "
                    f"{type(error).__name__} {error}"
                ) from None
        return {
            "actions": bytes(self.actions),
            "addresses": self.addresses.tobytes(),
            "sizes": self.sizes.tobytes(),
            "times": self.times.tobytes(),
            "streams": self.streams.tobytes(),
            "pools": self.pools.tobytes(),
            "places": self.places.tobytes(),
            "stream_names": list(self._streams),
            "pool_names": list(self._pools),
            "names_pools": self._names_pools,
        }

    def _add(self, event: Any) -> None:
        if type(event) is not dict:
            raise TypeError("it is not a dict")
        action = _NUMBERS.get(event["action"], -1)
        if action < 0:  # of a newer torch version: it changes no memory that is known
            return
        stream = event.get("stream", 0)
        pool = event.get("pool_id")
        address = event["device_free"] if action == _OOM else event["addr"]
        self.addresses.append(address)
        self.sizes.append(event["size"])
        self.times.append(event.get("time_us", 0))
        number = self._streams.get(stream)
        if number is None:
            _require(type(stream) is int and len(self._streams) < 2**20, "a stream is not a number")
            number = self._streams[stream] = len(self._streams)
        self.streams.append(number)
        if pool is None:
            self.pools.append(0)
        else:
            self._names_pools = True
            if pool not in self._pools:
                self._pools[_pool(pool)] = len(self._pools)
            self.pools.append(self._pools[pool])
        self.places.append(self._sites.of(event.get("frames")) if action in _WITH_SITE else 0)
        self.actions.append(action)


_NUMBERS = {name: number for number, name in enumerate(ACTIONS)}
_OOM = _NUMBERS["oom"]
_WITH_SITE = {_NUMBERS[name] for name in ("alloc", "segment_free", "segment_unmap", "oom")}


def _pool(value: Any) -> tuple[int, int]:
    ok = type(value) is tuple and len(value) == 2 and all(type(part) is int for part in value)
    _require(ok, "the identity of a pool is not two numbers")
    pool: tuple[int, int] = value
    return pool


def _segments(segments: Sequence[Any], sites: _Sites) -> list[tuple[Any, ...]]:
    """Return ``(device, address, bytes, stream, pool, is small, is expandable, blocks)`` of each.

    A block is ``(address, bytes, requested bytes, state, site)``.
    """
    rows = []
    left = MOST_BLOCKS
    for position, segment in enumerate(segments):
        try:
            left -= len(segment["blocks"])
            _require(left >= 0, f"it has more than {MOST_BLOCKS:,} blocks")
            rows.append(_segment(segment, sites))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise WrongContentError(
                f"segments[{position}] is not a segment as torch writes it "
                f"({type(error).__name__}: {error})"
            ) from None
    return rows


def _segment(segment: Any, sites: _Sites) -> tuple[Any, ...]:
    address = _size(segment["address"])
    blocks = []
    at = address
    for block in segment["blocks"]:
        size = _size(block["size"])
        own = _size(block.get("address", at))
        state = STATES.index(block["state"])
        requested = _size(block.get("requested_size", size))
        blocks.append((own, size, requested, min(state, 2), sites.of(block.get("frames"))))
        at = own + size
    pool = segment.get("segment_pool_id")
    device = _size(segment.get("device", 0))
    _require(device < MOST_DEVICES, f"it has a segment of device {device:,}")
    return (
        device,
        address,
        _size(segment["total_size"]),
        _size(segment.get("stream", 0)),
        None if pool is None else _pool(pool),
        segment.get("segment_type") == "small",
        segment.get("is_expandable") is True,
        blocks,
    )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.50} is not a size")
    return value


def _settings(value: Any) -> dict[str, Any]:
    """Return the allocator's settings: numbers, texts and the table of roundings."""
    admitted: dict[str, Any] = {}
    if type(value) is not dict:
        return admitted
    for name, setting in list(value.items())[:100]:
        if type(name) is not str:
            continue
        if type(setting) in (bool, int, float):
            admitted[name[:100]] = setting
        elif type(setting) is str:
            admitted[name[:100]] = setting[:_MOST_TEXT]
        elif type(setting) is dict and name == "roundup_power2_divisions":
            admitted[name] = {
                key[:20]: number
                for key, number in list(setting.items())[:64]
                if type(key) is str and type(number) is int
            }
    return admitted


def _limit(memory_bytes: int, seconds: int) -> None:
    """Limit what this process may take, where the system can."""
    if sys.platform == "win32":
        return
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def main(
    arguments: Sequence[str], write: Callable[[bytes], object] = sys.stdout.buffer.write
) -> int:
    """Read the file that the arguments name, under the limits that they have.

    Args:
        arguments: a path, the most bytes of memory and the most seconds.
        write: is given the packed bytes of ``("read", data)`` or ``("refused", text)``.
    """
    path, memory_bytes, seconds = arguments
    _limit(int(memory_bytes), int(seconds))
    gc.disable()  # millions of objects, none of which is garbage before this process ends
    try:
        with Path(path).open("rb") as file:
            answer: tuple[str, Any] = ("read", compacted(unpickled(file)))
    except WrongContentError as error:
        answer = ("refused", str(error))
    except OSError as error:
        answer = ("refused", error.strerror or str(error))
    except (MemoryError, RecursionError):
        answer = ("memory", "")
    write(packed(answer))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Without releasing millions of objects one by one.
    import os

    os._exit(status)
