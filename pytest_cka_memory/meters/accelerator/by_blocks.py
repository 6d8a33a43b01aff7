"""Count the blocks of an accelerator's allocator natively: it reports each to torch's profiler.

Beside the device, this meter counts what a region retains on the host, and no peak there: on an
emulated device, computing values allocates temporaries on the host that the user's code would not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress, count

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup, RawFrames
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import blocks, torch_keepers, torch_private
from pytest_cka_memory.meters.accelerator import (
    AllocatorStats,
    Levels,
    RequestedAllocations,
)
from pytest_cka_memory.meters.accelerator.meter import (
    AcceleratorMeter,
    run_empty_pass,
    wait_for_backward,
)
from pytest_cka_memory.meters.base import Peaks, Reading
from pytest_cka_memory.meters.blocks import SWITCH, UNKNOWN
from pytest_cka_memory.meters.blocks import counter as block_counter
from pytest_cka_memory.meters.blocks.counter import (
    Counter,
    State,
    counts_cpu,
    counts_pinned,
    is_intact,
    repair,
)
from pytest_cka_memory.meters.blocks.other_memory import (
    BlockPeaks,
    CollectedBlocks,
    EmptiedStorages,
    LentMemory,
)
from pytest_cka_memory.meters.blocks.written import (
    LazySequence,
    note_own_pass,
    threads_in_backward,
)
from pytest_cka_memory.meters.collector import Garbage
from pytest_cka_memory.meters.patching import JoinedPatches, SharedPatches

_DEVICE_TYPES = {"cuda": 1, "xpu": 12}
"""Of ``c10::DeviceType``; ROCm's devices are ``cuda`` too."""
_WITHOUT_FRAMES = "allocated outside Python code, such as in a backward pass"


@dataclass(frozen=True)
class _Mark:
    serial: int
    allocated_bytes: int
    requested_bytes: int


class LastLevels:
    """Reads an allocator's statistics only if a block was allocated or freed since the last time.

    To read them takes longer than all else that an empty region does.
    """

    def __init__(self, stats: AllocatorStats, counter: Counter) -> None:
        self._stats, self._counter = stats, counter
        self._last: tuple[Levels, tuple[int, int]] | None = None

    def read(self) -> Levels:
        """Return the levels now, with the reserve, which falls if the cache is emptied."""
        before = self._counter.figures()
        levels = self._stats.levels()
        is_one_moment = before == self._counter.figures()  # no other thread has allocated meanwhile
        self._last = (levels, _moment(before)) if is_one_moment else None
        return levels

    def known(self) -> Levels:
        """Return the levels now; the reserve may be that of the last reading."""
        last = self._last  # another thread may read meanwhile
        if last is not None and last[1] == _moment(self._counter.figures()):
            return last[0]
        return self.read()


def _moment(state: State) -> tuple[int, int]:
    """Return what differs if a block came or went: while none comes, the level only falls."""
    return state.serial, state.level


class HostMemory:
    """Blocks of torch's CPU allocator, pinned memory, and what other libraries lend to tensors.

    Serial numbers are those of the native counter, which numbers the allocations of all devices
    together. So a region needs no mark of its own here.
    """

    def __init__(self) -> None:
        self._counter = Counter()
        self._garbage = Garbage(
            lambda: self._counter.figures().level, self._counter.retained_between
        )
        self.lent_memory = LentMemory(self._counter)
        """Counts memory that is lent to tensors, while it is started."""

    def collect_after(self, serial: int, *, thorough: bool) -> bool:
        """Free what is garbage if anything on the host that is newer than `serial` is live.

        Returns:
            False if there may still be garbage: only without `thorough`, to save time.
        """
        return self._garbage.collect_after(
            lambda: self._counter.retained_since(serial), thorough=thorough
        )

    def retained_since(self, serial: int) -> int | None:
        """Return the bytes that were allocated after the allocation `serial` and are live.

        None if allocations are no longer counted, because another tool has replaced the functions
        that count them: the device is still measured.
        """
        return self._counter.retained_since(serial) if is_intact() else None

    def allocations_since(self, serial: int) -> Sequence[Allocation]:
        """Return these allocations, newest first."""
        return self._counter.allocations_since(serial)


def host_memory() -> HostMemory | None:
    """Return the meter; None if torch's CPU allocator cannot be counted in this process."""
    return HostMemory() if counts_cpu() else None


class CollectedRequests(CollectedBlocks):
    """Counts for one region. The counter knows blocks; how much was requested, only torch knows.

    Args:
        counter: the counter of the device.
        collected_blocks: returns the bytes of the region's blocks that collections have freed.
        levels: the allocator's levels.
    """

    def __init__(
        self, counter: Counter, collected_blocks: Callable[[], int], levels: LastLevels
    ) -> None:
        super().__init__(counter)
        self._collected_blocks, self._levels = collected_blocks, levels
        self._before: tuple[int, Levels] | None = None
        self.bytes = 0
        """Requested bytes of the region that collections have freed."""

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        super().note_collection(phase, info)
        if phase == "start":
            self._before = self._collected_blocks(), self._levels.known()
            return
        before, self._before = self._before, None
        if before is None:  # counting began in this collection
            return
        block_bytes = self._collected_blocks() - before[0]
        if block_bytes:
            now = self._levels.known()
            is_all = before[1].allocated - now.allocated == block_bytes
            # If older blocks were freed too, it is unknown how much was requested of which.
            self.bytes += before[1].requested - now.requested if is_all else block_bytes


class AcceleratorBlockMeter(AcceleratorMeter):
    """Knows every block by its address, and the peaks of each region, without a dispatch mode.

    Only for a device for which :func:`block_meter` has proved that it works.
    """

    knows_blocks = True

    def __init__(self, device: torch.device, stats: AllocatorStats, counter: Counter) -> None:
        self._host = host_memory()
        misses_pinned = self._host is not None and not counts_pinned()
        super().__init__(
            device,
            stats,
            ("pinned memory of the host is not counted",) if misses_pinned else (),
        )
        self._counter = counter
        self._levels = LastLevels(stats, counter)
        self._garbage = Garbage(self._level, counter.retained_between)
        torch_keepers.prepare_counts()
        note_own_pass(run_empty_pass.__code__)
        self._patches: SharedPatches = EmptiedStorages(counter, device)
        if self._host is not None:
            self._patches = JoinedPatches(self._patches, self._host.lent_memory)

    def levels(self) -> Levels:
        return self._levels.known()

    def collect_before(self, *, thorough: bool) -> bool:
        return self._garbage.collect_before(thorough=thorough)

    def collect_after(self, mark: _Mark, *, thorough: bool) -> bool:
        if not (self._counter.retained_since(mark.serial) or self.host_retained_since(mark)):
            return True
        is_clean = self._garbage.collect_after(
            lambda: self._counter.retained_since(mark.serial), thorough=thorough
        )
        # If the device retains something, all garbage may just have been freed, also the host's.
        all_freed = thorough and self._counter.retained_since(mark.serial)
        if self._host is not None and not all_freed:
            is_clean &= self._host.collect_after(mark.serial, thorough=thorough)
        return is_clean

    def wait_for_threads(self, *, briefly: bool = False) -> None:
        used = {self._device.index, *threads_in_backward().devices}
        devices = [torch.device(self._device.type, index) for index in used]
        wait_for_backward(*devices, briefly=briefly)

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
                f"{self._device} can no longer be measured: something, perhaps a profiler, "
                "has replaced the function by which torch's allocator reports its blocks; "
                f"run without that tool, or set {SWITCH}=0 to count tensors instead"
            )
        self._counter.set_level(UNKNOWN, levels.reserved)

    def between_regions(self, *, objects_dropped: bool = False, since: int = 0) -> None:
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
        return _RegionPeaks(self._counter, self._patches, self._levels, self)

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

    def allocations_since(self, mark: _Mark) -> RequestedAllocations:
        return RequestedAllocations(self._counter.allocations_since(mark.serial), self._device)

    def allocations_at(self, addresses: Collection[int]) -> Sequence[Allocation]:
        everything = self._counter.allocations_since(0)
        requested = RequestedAllocations(everything, self._device)
        wanted = map(set(addresses).__contains__, everything.blocks.addresses)
        return [requested[place] for place in compress(count(), wanted)]

    def frames_of_blocks(self) -> Mapping[int, RawFrames]:
        return self._counter.allocations_since(0).frames()

    def block_at(self, address: int) -> tuple[int, int] | None:
        return self._counter.block_at(address)

    def _level(self) -> int:
        return self._counter.figures().level


class _RegionPeaks(BlockPeaks):
    """Users' resets of torch's own peaks do not matter."""

    _collected: CollectedRequests

    def __init__(
        self,
        counter: Counter,
        patches: SharedPatches,
        levels: LastLevels,
        meter: AcceleratorBlockMeter,
    ) -> None:
        super().__init__(counter, patches)
        self._levels = levels
        self._meter = meter
        self._before_passes = _signs_of_passes()
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
        return self.sampled(self._region.read())

    def end(self) -> Reading:
        levels = self._region.read()
        return _reading(self._levels.known(), levels.peak, levels.peak_reserved)

    def reserved(self) -> int:
        levels, region = self._region.read(), self._region
        if (levels.serial, levels.level) == (region.serial, region.start_level):
            return region.start_reserved  # no block came or went, and the cache was empty before
        return self._levels.read().reserved

    def peak_reserved(self) -> int:
        return self._region.read().peak_reserved  # without the allocator's statistics

    def settle(self, *, briefly: bool = False) -> bool:
        # Without a pass in the region, to wait would take longer than all else at a boundary.
        may_have_run = _signs_of_passes() != self._before_passes
        if may_have_run:
            self._meter.wait_for_threads(briefly=briefly)
        return may_have_run

    def sample(self) -> tuple[Reading, int, int]:
        self.settle(briefly=True)
        return super().sample()

    def sampled(self, levels: block_counter.Levels) -> Reading:
        return _reading(self._levels.read(), levels.peak, levels.peak_reserved)

    def allocations(self) -> Sequence[AllocationGroup]:
        return _GroupsWithoutFrames(self._region.at_peak())

    def collected(self) -> int:
        return self._collected.bytes


def _signs_of_passes() -> tuple[int, int]:
    """Return what changes with backward passes: the events in their threads, and new graphs."""
    return threads_in_backward().events, torch_private.sequence_number()


class _GroupsWithoutFrames(LazySequence[AllocationGroup, AllocationGroup]):
    """What was live at a region's peak; if no frames were noted, with the reason."""

    def described(self, known: AllocationGroup) -> AllocationGroup:
        if known.recorded is None and known.inside is None and not known.before_region:
            return replace(known, inside=_WITHOUT_FRAMES)
        return known


def why_not_counted(device: torch.device) -> str | None:
    """Return why blocks are not counted that could be; None if they are, or never can be."""
    return blocks.why_missing() if device.type in _DEVICE_TYPES else None


def block_meter(device: torch.device, stats: AllocatorStats) -> AcceleratorBlockMeter | None:
    """Return the meter if it is proved to work: a trial tensor is counted to the byte.

    Args:
        device: with its index.
        stats: the counters of that device.

    Returns:
        The meter; None if native counting is switched off, not compiled, or wrong for this device.
    """
    number = _DEVICE_TYPES.get(device.type)
    if number is None or blocks.why_missing() is not None:
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
    return AcceleratorBlockMeter(device, stats, counter)


def _reading(levels: Levels, peak: int, peak_reserved: int) -> Reading:
    return Reading(
        allocated_bytes=levels.allocated,
        requested_bytes=levels.requested,
        peak_bytes=max(peak, levels.allocated),
        reserved_bytes=levels.reserved,
        peak_reserved_bytes=max(peak_reserved, levels.reserved),
    )
