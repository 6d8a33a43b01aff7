"""Count the blocks of an accelerator's allocator natively: it reports each to torch's profiler."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.recordings import Recording
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import cpp_counts
from pytest_cka_memory.meters.accelerator import backward_threads, blocks_in_use
from pytest_cka_memory.meters.accelerator.collected import CollectedRequests
from pytest_cka_memory.meters.accelerator.counting import Counting
from pytest_cka_memory.meters.accelerator.host_memory import host_memory
from pytest_cka_memory.meters.accelerator.last_levels import LastLevels
from pytest_cka_memory.meters.accelerator.stats import AllocatorStats, Levels
from pytest_cka_memory.meters.base import Peaks, Reading
from pytest_cka_memory.meters.blocks import library
from pytest_cka_memory.meters.blocks.counter import Counter, counts_collected, counts_pinned, repair
from pytest_cka_memory.meters.blocks.emptied import EmptiedStorages
from pytest_cka_memory.meters.blocks.library import UNKNOWN
from pytest_cka_memory.meters.cpu.choice import SWITCH
from pytest_cka_memory.meters.garbage import Garbage
from pytest_cka_memory.meters.lazy_sequence import LazySequence
from pytest_cka_memory.meters.patching import JoinedPatches, SharedPatches

_DEVICE_TYPES = {"cuda": 1, "xpu": 12}
"""Of ``c10::DeviceType``; ROCm's devices are ``cuda`` too."""
_WITHOUT_FRAMES = "allocated outside Python code, such as in a backward pass"


@dataclass(frozen=True)
class _Mark:
    serial: int
    allocated_bytes: int
    requested_bytes: int


class BlockCounting(Counting):
    """Every block by its address, and the peaks of each region, without a dispatch mode.

    Only for a device for which :func:`native_counting` has proved that it works.
    """

    knows_blocks = True

    def __init__(self, device: torch.device, stats: AllocatorStats, counter: Counter) -> None:
        self._device, self._counter = device, counter
        self._levels = LastLevels(stats, counter)
        self._garbage = Garbage(self._level, counter.retained_between)
        cpp_counts.prepare()
        self._host = host_memory()
        self._patches: SharedPatches = EmptiedStorages(counter, device)
        if self._host is not None:
            self._patches = JoinedPatches(self._patches, self._host.lent_memory)
            if not counts_pinned():
                self.notes = ("pinned memory of the host is not counted",)

    def levels(self) -> Levels:
        return self._levels.known()

    def collect_before(self, *, thorough: bool) -> bool:
        if self._garbage.is_possible():
            backward_threads.wait_until_ended(self._device)
        return self._garbage.collect_before(thorough=thorough)

    def collect_after(self, mark: _Mark, *, thorough: bool) -> bool:
        if not (self._counter.retained_since(mark.serial) or self.host_retained_since(mark)):
            return True
        backward_threads.wait_until_ended(self._device)
        is_clean = self._garbage.collect_after(
            lambda: self._counter.retained_since(mark.serial), thorough=thorough
        )
        # If the device retains something, all garbage may just have been freed, also the host's.
        all_freed = thorough and self._counter.retained_since(mark.serial)
        if self._host is not None and not all_freed:
            is_clean &= self._host.collect_after(mark.serial, thorough=thorough)
        return is_clean

    def dropping_workspaces(self) -> AbstractContextManager[None]:
        return self._counter.dropping_workspaces()

    def note_empty_cache(self) -> None:
        """Read the levels: the only time in cleaning that it is always done, as it takes long.

        Raises:
            DeviceError: if blocks are no longer counted, because every limit would pass.
        """
        before = self._counter.figures()
        levels = self._levels.read()
        # If another thread has allocated meanwhile, blocks are counted.
        if levels.allocated != before.level and before == self._counter.figures():
            raise DeviceError(
                f"{self._device} can no longer be measured: something, perhaps a profiler, has "
                "replaced the function by which torch's allocator reports its blocks; run without "
                f"it, or set {SWITCH}=0 to count tensors instead"
            )
        self._counter.set_level(UNKNOWN, levels.reserved)

    def between_regions(self, *, objects_dropped: bool, since: int) -> None:
        if objects_dropped:
            self._garbage.suspect(since, self.serial())
        else:
            self._garbage.note_quiet_moment()

    def peaks(self) -> tuple[int, int]:
        figures = self._counter.figures()
        return figures.peak, figures.peak_reserved

    def reset_peak(self) -> None:
        self._counter.reset_peak()

    def mark(self) -> _Mark:
        levels = self._levels.known()
        return _Mark(self._counter.figures().serial, levels.allocated, levels.requested)

    def open_peaks(self) -> Peaks:
        return _RegionPeaks(self._counter, self._patches, self._levels)

    def retained_since(self, mark: _Mark) -> int:
        """Return what was requested, which the allocator's reports do not contain."""
        block_bytes = self._counter.retained_since(mark.serial)
        if not block_bytes:
            return 0
        levels = self._levels.known()
        if levels.allocated - block_bytes == mark.allocated_bytes:  # all older blocks are live
            return max(0, levels.requested - mark.requested_bytes)
        return self.allocations_since(mark).requested_bytes()

    def host_retained_since(self, mark: _Mark) -> int | None:
        return None if self._host is None else self._host.retained_since(mark.serial)

    def host_allocations_since(self, mark: _Mark) -> Sequence[Allocation]:
        return [] if self._host is None else self._host.allocations_since(mark.serial)

    def serial(self) -> int:
        return self._counter.figures().serial

    def allocations_since(self, mark: _Mark) -> blocks_in_use.RequestedAllocations:
        return blocks_in_use.RequestedAllocations(
            self._counter.allocations_since(mark.serial), self._device
        )

    def block_at(self, address: int) -> tuple[int, int] | None:
        return self._counter.block_at(address)

    def _level(self) -> int:
        return self._counter.figures().level


class _RegionPeaks(Peaks):
    """The peaks that the counter keeps for one region; users' resets of torch's do not matter."""

    def __init__(self, counter: Counter, patches: SharedPatches, levels: LastLevels) -> None:
        patches.start(self)
        self._patches, self._levels = patches, levels
        self._region = counter.open()
        self._collected = CollectedRequests(counter, self._region.collected, levels)
        now = levels.known()
        self.mark = _Mark(self._region.serial, now.allocated, now.requested)

    def start(self) -> Reading:
        level, reserved = self._region.start_level, self._region.start_reserved
        return Reading(
            allocated_bytes=level,
            requested_bytes=self.mark.requested_bytes,
            peak_bytes=level,
            reserved_bytes=reserved,
            peak_reserved_bytes=reserved,
        )

    def read(self) -> Reading:
        levels = self._region.read()
        return _reading(self._levels.read(), levels.peak, levels.peak_reserved)

    def end(self) -> Reading:
        levels = self._region.read()
        return _reading(self._levels.known(), levels.peak, levels.peak_reserved)

    def reserved(self) -> int:
        levels, region = self._region.read(), self._region
        if (levels.serial, levels.level) == (region.serial, region.start_level):
            return region.start_reserved  # no block came or went, and the cache was empty before
        return self._levels.read().reserved

    def sample(self) -> tuple[Reading, int, int]:
        levels = self._region.read(sample=True)
        reading = _reading(self._levels.read(), levels.peak, levels.peak_reserved)
        return reading, levels.sample_peak, levels.serial

    def allocations(self) -> Sequence[AllocationGroup]:
        return _GroupsWithoutFrames(self._region.at_peak())

    def record(self) -> bool:
        return self._region.record()

    def recorded(self) -> Recording | None:
        return self._region.recorded()

    def count_collected(self) -> bool:
        self._collected.start(self)
        return counts_collected()

    def collected(self) -> int:
        return self._collected.bytes

    def close(self) -> None:
        self._collected.stop(self)
        self._region.close()
        self._patches.stop(self)


class _GroupsWithoutFrames(LazySequence[AllocationGroup, AllocationGroup]):
    """What was live at a region's peak; if no frames were noted, with the reason."""

    def described(self, known: AllocationGroup) -> AllocationGroup:
        if known.recorded is None and known.inside is None and not known.before_region:
            return replace(known, inside=_WITHOUT_FRAMES)
        return known


def native_counting(device: torch.device, stats: AllocatorStats) -> BlockCounting | None:
    """Return native counting if it is proved to work: a trial tensor is counted to the byte."""
    number = _DEVICE_TYPES.get(device.type)
    if number is None or os.environ.get(SWITCH) == "0" or library.functions() is None:
        return None
    repair()  # torch may have loaded libraries since counting began
    counter = Counter(number << 8 | device.index)
    before = counter.figures().serial
    trial = torch.empty(1, device=device)
    figures, allocated_bytes = counter.figures(), stats.all().get("allocated_bytes.all.current")
    del trial
    if not figures.serial > before or figures.level != allocated_bytes or not figures.level:
        return None
    stats.read_fast()
    return BlockCounting(device, stats, counter)


def _reading(levels: Levels, peak: int, peak_reserved: int) -> Reading:
    return Reading(
        allocated_bytes=levels.allocated,
        requested_bytes=levels.requested,
        peak_bytes=max(peak, levels.allocated),
        reserved_bytes=levels.reserved,
        peak_reserved_bytes=max(peak_reserved, levels.reserved),
    )
