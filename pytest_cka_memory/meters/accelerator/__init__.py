"""The meters for devices whose allocator keeps counters.

This module itself reads the allocator: its counters, and its snapshot of the blocks in use. What it
reports at each allocation contains only the size of the block, which is rounded; the snapshot has
the size that was requested. If the allocator's history is recorded, the snapshot also has the
frames of allocations.
"""

import ctypes
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import (
    Allocation,
    AllocationSite,
    RawFrames,
    format_frame,
    format_frames,
    user_frames,
    users_first,
)
from pytest_cka_memory.core.places import is_foreign
from pytest_cka_memory.core.reserve import POOLS_ADVICE
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.blocks.counter import BlockAllocations
from pytest_cka_memory.meters.blocks.written import LazySequence
from pytest_cka_memory.meters.collector import without_collections
from pytest_cka_memory.meters.patching import Patch, SharedPatches

PoolId = tuple[int, ...]
"""Of one of the allocator's pools, as ``torch.cuda.CUDAGraph.pool`` returns it."""
NO_POOL: PoolId = (0, 0)
"""What is taken from the pool of no graph."""
_captured_at: dict[PoolId, RawFrames] = {}
"""Of each pool, the user's frames of its first capture. The allocator uses no number again."""
_made_at: dict[PoolId, RawFrames] = {}
"""Of each ``MemPool``, the frames that have made it."""
_after_captures: list[Callable[[], object]] = []


def after_captures(call: Callable[[], object]) -> Callable[[], None]:
    """Call `call` after each capture of a graph; return a function that ends this."""
    _after_captures.append(call)
    return lambda: _after_captures.remove(call)


class Captures(SharedPatches):
    """Notes where graphs are captured and pools are made, while started, but none from before."""

    def make_patches(self) -> Iterator[Patch]:
        yield self.patch(torch.cuda.CUDAGraph, "capture_end", _noting_capture)
        if isinstance(getattr(torch.cuda, "MemPool", None), type):
            yield self.patch(torch.cuda.MemPool, "__init__", _noting_pool)


def _noting_capture(capture_end: Callable[..., Any]) -> Callable[..., Any]:
    def end_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = capture_end(self, *args, **kwargs)
        _captured_at.setdefault(tuple(self.pool()), user_frames())
        for call in list(_after_captures):
            call()
        return result

    return end_and_note


def _noting_pool(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _made_at[tuple(self.id)] = user_frames()

    return make_and_note


_numbers = count()
_before_releases: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}


def before_releases(call: Callable[[], object]) -> Callable[[], object]:
    """Call `call`, a method, before the program empties the cache; return what ends this.

    Its object is not kept for it. The allocator itself empties the cache when the card is full;
    nobody is called before that.
    """
    number = next(_numbers)
    _before_releases[number] = weakref.WeakMethod(
        call, lambda _: _before_releases.pop(number, None)
    )
    return lambda: _before_releases.pop(number, None)


class Releases(SharedPatches):
    """Makes the calls of :func:`before_releases` for one type of device, while started."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        module = getattr(torch, device_type, None)
        owners = (torch.accelerator, module, getattr(module, "memory", None))
        self._owners = [owner for owner in owners if hasattr(owner, "empty_cache")]

    def make_patches(self) -> Iterator[Patch]:
        for owner in self._owners:
            yield self.patch(owner, "empty_cache", _looking_first)


def _looking_first(empty_cache: Callable[..., Any]) -> Callable[..., Any]:
    def look_and_empty(*args: Any, **kwargs: Any) -> Any:
        for method in list(_before_releases.values()):
            call = method()
            if call is not None:
                call()
        return empty_cache(*args, **kwargs)

    return look_and_empty


def owner_of(pool: PoolId) -> str | None:
    """Return what holds the memory of a pool, in words; None for that of no graph."""
    if pool == NO_POOL:
        return None
    if made_at := format_frames(_made_at.get(pool, ())):
        return f"the MemPool made at {made_at[0]}"
    frames = format_frames(_captured_at.get(pool, ()))
    if frames:
        return f"the pool of the graph captured at {frames[0]}"
    return "the pool of a CUDA graph or a MemPool"


_MAX_FRAMES = 6


class HistorySite(NamedTuple):
    """The frames of an allocation as the allocator's history has them."""

    frames: tuple[str, ...]

    def readable(self) -> AllocationSite:
        """Return the frames of the user's code."""
        return AllocationSite(self.frames)


class _Block(NamedTuple):
    unused_bytes: int
    """By how many bytes it is larger than requested."""
    site: HistorySite | None
    pool: PoolId
    """That it was taken from."""


class RequestedAllocations(LazySequence[Allocation, Allocation]):
    """Allocations with their requested bytes; the snapshot is taken when one is first read."""

    def __init__(self, allocations: BlockAllocations, device: torch.device) -> None:
        super().__init__(allocations)
        self._counted, self._device = allocations.blocks, device

    def requested_bytes(self) -> int:
        """Return the sum of their bytes, without describing each."""
        counted = dict(zip(self._counted.addresses, self._counted.sizes, strict=True))
        unused_bytes = without_collections(
            lambda: sum(
                min(counted[address], _unused_bytes(block))
                for address, block, _ in _blocks_in_use(self._device, counted)
            )
        )
        return sum(counted.values()) - unused_bytes

    @cached_property
    def _blocks(self) -> dict[int, _Block]:
        wanted = set(self._counted.addresses)
        return without_collections(
            lambda: {
                address: _block(block, segment)
                for address, block, segment in _blocks_in_use(self._device, wanted)
            }
        )

    def described(self, allocation: Allocation) -> Allocation:
        block = self._blocks.get(allocation.key)
        if block is None:  # freed meanwhile, or this allocator has no snapshot
            return allocation._replace(may_be_unowned=True)
        return allocation._replace(
            bytes=max(0, allocation.bytes - block.unused_bytes),
            recorded=allocation.recorded or block.site,
            may_be_unowned=True,
            pool=owner_of(block.pool),
        )


def segments_of(device: torch.device) -> Sequence[Mapping[str, Any]]:
    """Return what the allocator has reserved on one device; empty without a snapshot."""
    snapshot = getattr(torch.get_device_module(device), "memory_snapshot", None)
    if snapshot is None:
        return []
    # Without the history of all blocks, which takes seconds to read; torch 2.9 cannot leave it out.
    has_option = "include_traces" in inspect.signature(snapshot).parameters
    try:
        segments = snapshot(include_traces=False) if has_option else snapshot()
    except RuntimeError:  # backend:cudaMallocAsync has the function but no snapshot
        return []
    finally:
        if has_option:
            # torch 2.14 gives back a reference to the option that it was not given. Up to Python
            # 3.11, which counts those of False, some 20,000 calls would end the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(False))
    return [segment for segment in segments if segment["device"] == device.index]


def _blocks_in_use(
    device: torch.device, wanted: Container[int]
) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield address, block and segment of what is in use at the `wanted` addresses of a device.

    There are none without a snapshot. A snapshot has all blocks in use, of which most may be older
    than a region, so little is done with each; and it makes so many objects that the garbage
    collector would run, for which the callers disable it.
    """
    for segment in segments_of(device):
        for block in segment["blocks"]:
            address = block["address"]
            if address in wanted and block["state"] == "active_allocated":
                yield address, block, segment


def _unused_bytes(block: Mapping[str, Any]) -> int:
    size: int = block["size"]
    return size - int(block.get("requested_size", size))


def _block(block: Mapping[str, Any], segment: Mapping[str, Any]) -> _Block:
    frames = _formatted(block.get("frames", ()))
    pool = tuple(segment.get("segment_pool_id", NO_POOL))
    return _Block(_unused_bytes(block), HistorySite(frames) if frames else None, pool)


def _formatted(frames: Collection[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the innermost frames of the user's Python code as text; C++ frames are left out."""
    own = [f for f in frames if f["filename"].endswith(".py") and not is_foreign(f["filename"])]
    shown = users_first(own, lambda frame: str(frame["filename"]))[:_MAX_FRAMES]
    return tuple(format_frame(f["filename"], f["line"], f["name"]) for f in shown)


def reserved_by_graphs(device: torch.device) -> tuple[Holding, ...]:
    """Return what the pools of CUDA graphs have reserved on one device, the largest first."""
    reserved: Counter[str | None] = Counter()
    for segment in segments_of(device):
        owner = owner_of(tuple(segment.get("segment_pool_id", NO_POOL)))
        reserved[owner] += segment["total_size"]
    reserved.pop(None, None)
    return tuple(
        Holding(bytes=size, count=0, inside="reserved", held_by=owner, hint=POOLS_ADVICE)
        for owner, size in reserved.most_common()
    )


def addresses_in_pools(device: torch.device) -> frozenset[int]:
    """Return the addresses of live blocks in private pools of one device."""
    if not (_captured_at or _made_at):
        return frozenset()
    segments = without_collections(lambda: segments_of(device))
    return frozenset(
        block["address"]
        for segment in segments
        if tuple(segment.get("segment_pool_id", NO_POOL)) != NO_POOL
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_CANNOT = (RuntimeError, AssertionError, ValueError)  # what torch raises about devices


class NoCountersError(DeviceError):
    """The device's allocator has no counters; the message says so."""


class Levels(NamedTuple):
    """What is live and reserved now, in bytes."""

    allocated: int
    """Of whole blocks."""
    requested: int
    """Of what was asked for; that of blocks if the allocator does not count it."""
    reserved: int


class AllocatorStats:
    """Reads the counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested: Callable[[int], Mapping[str, Any]] | None = None

    def all(self) -> dict[str, int]:
        """Return all counters, as ``torch.accelerator.memory_stats`` does."""
        return torch.accelerator.memory_stats(self._device)

    def check(self) -> None:
        """Find out whether the device can be used, and what it allocates can be counted.

        Raises:
            DeviceError: if no tensor can be allocated on it.
            NoCountersError: if its allocator counts nothing.
        """
        try:
            torch.empty(1, device=self._device)  # the counters exist after the first allocation
        except _CANNOT as error:
            raise DeviceError(f"{self._device} cannot be measured: {error}") from error
        missing = f"{self._device} has no memory counters in torch {torch.__version__}"
        try:
            peak = self.all().get("allocated_bytes.all.peak")
        except _CANNOT as error:  # NotImplementedError too
            raise NoCountersError(missing) from error
        if peak is None:
            raise NoCountersError(missing)
        if peak:
            return
        if os.environ.get(_NO_CACHING):
            raise DeviceError(
                f"{self._device} cannot be measured: its allocator counts nothing; if "
                f"{_NO_CACHING} is set, unset it"
            )
        raise NoCountersError(f"{missing}: they stay at 0")

    def check_reset(self) -> None:
        """Find out whether the device's peaks can be reset, as its only counters require.

        Raises:
            NoCountersError: if they cannot.
        """
        try:
            torch.accelerator.reset_peak_memory_stats(self._device)
        except _CANNOT as error:
            raise NoCountersError(
                f"torch {torch.__version__} cannot reset the peak memory statistics of "
                f"{self._device}; use another torch version, or measure on the CPU"
            ) from error

    def levels(self) -> Levels:
        """Return the levels now."""
        return self._flat_levels() if self._nested is None else self._nested_levels(self._nested)

    def read_fast(self) -> None:
        """From now on read levels in a tenth of the time, if this torch version allows it."""
        self._nested = torch_private.device_stats()

    def _flat_levels(self) -> Levels:
        stats = self.all()
        allocated = stats["allocated_bytes.all.current"]
        counts_requested = stats.get("requested_bytes.all.allocated")
        requested = stats["requested_bytes.all.current"] if counts_requested else allocated
        return Levels(allocated, requested, stats["reserved_bytes.all.current"])

    def _nested_levels(self, nested: Callable[[int], Mapping[str, Any]]) -> Levels:
        """Return the levels without sorting a hundred other counters."""
        stats = nested(self._device.index)
        allocated: int = stats["allocated_bytes"]["all"]["current"]
        requested = stats["requested_bytes"]["all"]
        return Levels(
            allocated,
            requested["current"] if requested["allocated"] else allocated,
            stats["reserved_bytes"]["all"]["current"],
        )


def device_name(device: torch.device) -> str:
    """Return the model of a device; its type if the backend does not name it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device.index)) if name is not None else device.type
