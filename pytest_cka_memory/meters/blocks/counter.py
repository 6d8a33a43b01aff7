"""The native counter of one device, and its regions."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import compress, repeat
from typing import NamedTuple, NoReturn, cast

import torch

from pytest_cka_memory.core.allocations import (
    INSIDE,
    Allocation,
    AllocationGroup,
    Freed,
    RawFrames,
)
from pytest_cka_memory.core.memory_timeline import RecordedBlock, Recording
from pytest_cka_memory.core.places import foreign_prefixes, runner_folders
from pytest_cka_memory.meters import blocks as library
from pytest_cka_memory.meters.blocks import (
    RECORDED_BLOCK,
    Block,
    Figures,
    Recorded,
    byref,
)
from pytest_cka_memory.meters.blocks.written import (
    LazySequence,
    PeakGroups,
    WrittenBlocks,
    frames_with_context,
    module_path,
    note_contexts,
    notes_contexts,
    notes_modules,
    older_blocks,
    site_of,
)

CPU = 0
MOST_RECORDED = 2**20
"""Blocks of a recorded region, 32 bytes each; beyond, small ones are merged."""


class Levels(NamedTuple):
    """What was read of a region, in bytes."""

    level: int
    reserved: int
    peak: int
    peak_reserved: int
    sample_peak: int
    """Highest level since the region was last sampled."""
    serial: int
    """The number of allocations so far."""


class State(NamedTuple):
    """What was read of a device."""

    level: int
    reserved: int
    peak: int
    """Highest level since a region last began or ended, or since :meth:`Counter.reset_peak`."""
    peak_reserved: int
    serial: int
    """The number of allocations so far."""


class Origin(NamedTuple):
    """The allocation that a block continues: its own, or the older one from which it was moved."""

    serial: int
    """The number of the allocation; 0 if it is older than the counting."""
    bytes: int


class Counter:
    """Counts the blocks that torch's allocator for one device hands out.

    Args:
        number: ``device_type << 8 | index`` as torch numbers device types; 0 is the CPU.
    """

    def __init__(self, number: int = CPU) -> None:
        self._number = number
        self._functions = prepared_functions()
        self._last = Figures()
        """Written at each reading of one figure: if two threads read, both get that of the later.
        """
        self._read_last = partial(self._functions.counter_read, number, None, 0, byref(self._last))
        self._unused_count = byref(ctypes.c_uint64())

    def figures(self) -> State:
        """Return the state of the device.

        Raises:
            MemoryError: if there was no memory left to record an allocation.
        """
        figures = Figures()  # of one moment, whatever other threads read
        self._functions.counter_read(self._number, None, 0, byref(figures))
        if figures.lost:
            _fail_for_lost(figures)
        return State(
            figures.level, figures.reserved, figures.peak, figures.peak_reserved, figures.serial
        )

    def level(self) -> int:
        """Return the level of the device; raises what :meth:`figures` does."""
        self._read_last()
        level: int = self._last.level
        return level if not self._last.lost else _fail_for_lost(self._last)

    def serial(self) -> int:
        """Return the number of allocations so far; raises what :meth:`figures` does."""
        self._read_last()
        serial: int = self._last.serial
        return serial if not self._last.lost else _fail_for_lost(self._last)

    def reset_peak(self) -> None:
        """Start a new peak of the device; those of regions stay."""
        self._functions.counter_read(self._number, None, 1, byref(Figures()))

    def counts(self, allocate: Callable[[], object]) -> bool:
        """Return whether an allocation is counted; `allocate` makes one and returns it."""
        before = self.figures().serial
        kept = allocate()
        counted: bool = self.figures().serial > before
        del kept
        return counted

    def open(self) -> RegionCounter:
        """Start to count the peaks of a region."""
        return RegionCounter(self._number, self._functions)

    def retained_since(self, serial: int) -> int:
        """Return the bytes of live blocks that were allocated after the allocation `serial`."""
        bytes_: int = self._functions.counter_retained(self._number, serial, self._unused_count)
        return bytes_

    def retained_between(self, since: int, until: int) -> int:
        """Return the bytes of live blocks allocated after `since`, but not after `until`."""
        return self.retained_since(since) - self.retained_since(until)

    def allocations_since(self, serial: int) -> BlockAllocations:
        """Return the live blocks allocated after the allocation `serial`, newest first."""
        count = ctypes.c_uint64()
        self._functions.counter_retained(self._number, serial, byref(count))
        # Another thread may allocate more meanwhile; those are left out.
        write = partial(self._functions.counter_blocks, self._number, serial)
        return BlockAllocations(self, serial, WrittenBlocks(count.value, write))

    def is_live(self, address: int, serial: int) -> bool:
        """Whether the block that was allocated at `address` as number `serial` is still live."""
        return bool(self.serial_of(address) == serial)

    def serial_of(self, address: int) -> int:
        """Return the number of the live block at `address`; ``NOT_LIVE`` if there is none."""
        return cast(int, self._functions.counter_serial_of(address, self._number))

    def block_at(self, address: int) -> tuple[int, int] | None:
        """Return bytes and number of the live block at `address`; None if there is none."""
        serial = ctypes.c_uint64()
        size = self._functions.counter_block_at(address, self._number, byref(serial))
        return None if size < 0 else (size, serial.value)

    def origin_of(self, address: int) -> Origin | None:
        """Return which allocation the live block at `address` continues; None if there is none."""
        size = ctypes.c_int64()
        serial = self._functions.counter_origin_of(address, self._number, byref(size))
        return None if serial == library.NOT_LIVE else Origin(serial, size.value)

    def add(self, address: int, size: int, *, is_new: bool) -> bool:
        """Count a block that the allocator's calls do not show; return False if it is known."""
        return bool(self._functions.counter_add(address, size, self._number, is_new))

    def remove(self, address: int) -> None:
        """Count the block at `address` as freed."""
        self._functions.counter_remove(address, self._number)

    def is_shared(self, address: int) -> bool:
        """Whether several storages use the block at `address`, which another library has lent."""
        return self._number == CPU and bool(self._functions.lent_is_shared(address))

    def inherit(self, address: int, origin: Origin) -> None:
        """Treat the first bytes of the block at `address` as those of an older allocation."""
        self._functions.counter_inherit(address, self._number, origin.serial, origin.bytes)

    @contextmanager
    def dropping_workspaces(self) -> Iterator[None]:
        """Count what this thread frees in the block as workspaces of libraries."""
        self._functions.counter_drops_workspaces(1)
        try:
            yield
        finally:
            self._functions.counter_drops_workspaces(0)

    def note_collection(self, *, begins: bool) -> None:
        """Count what this thread frees as collected, until the collection has ended."""
        if counts_collected():
            self._functions.counter_collects(begins)

    def set_level(self, level: int, reserved: int) -> None:
        """Set the level of an accelerator, which its allocator reports only when it changes."""
        self._functions.counter_set_level(self._number, level, reserved)


def _fail_for_lost(figures: Figures) -> NoReturn:
    raise MemoryError(f"{figures.lost} allocations could not be recorded")


class BlockAllocations(LazySequence[Block, Allocation]):
    """Blocks as allocations."""

    def __init__(self, counter: Counter, since: int, blocks: WrittenBlocks) -> None:
        super().__init__(blocks)
        self.blocks = blocks
        self._counter, self._since = counter, since
        # At once, because stacks are forgotten when the last region ends.
        self._sites = {stack: site_of(stack) for stack in set(blocks.stacks)}

    def described(self, block: Block) -> Allocation:
        return Allocation(
            key=block.address,
            bytes=block.bytes,
            serial=block.serial,
            source=self._counter,
            recorded=self._sites[block.stack],
            is_at_key=True,
        )

    def __iter__(self) -> Iterator[Allocation]:
        # By columns, which takes a sixth of the time.
        columns = self.blocks.addresses, self.blocks.sizes, self.blocks.serials
        sites = map(self._sites.__getitem__, self.blocks.stacks)
        return map(Allocation, *columns, repeat(self._counter), sites, repeat(True))

    def total_bytes(self) -> int:
        """Return the sum of their bytes."""
        return sum(self.blocks.sizes)

    def frames(self) -> dict[int, RawFrames]:
        """Return the address of each block whose stack is known -> its frames."""
        of_stack = {stack: frames_with_context(stack) for stack in self._sites}
        pairs = zip(self.blocks.addresses, self.blocks.stacks, strict=True)
        return {address: of_stack[stack] for address, stack in pairs if of_stack[stack]}

    def live(self) -> Iterator[Allocation]:
        """Return those that have not been freed."""
        addresses, serials = self.blocks.addresses, self.blocks.serials
        now = self._counter.allocations_since(self._since).blocks
        if serials == now.serials and addresses == now.addresses:
            return iter(self)
        live = set(zip(now.addresses, now.serials, strict=True))
        return compress(self, map(live.__contains__, zip(addresses, serials, strict=True)))


class RegionCounter:
    """Counts one region: its level at the opening, and the highest since.

    It ends with :meth:`close`, or if it is freed before, when the next one begins. There is no
    ``__del__``, in which an exception of a signal handler would be lost.
    """

    def __init__(self, number: int, functions: ctypes.PyDLL) -> None:
        if _handles:
            _close_abandoned(functions)
        self._number, self._functions = number, functions
        self._handle = ctypes.c_void_p()
        self._figures = Figures()
        self._to_figures = byref(self._figures)
        _handles[id(self._handle)] = weakref.ref(self), self._handle
        if not functions.counter_open(number, byref(self._handle)):
            raise MemoryError("no memory left to count a region")
        figures = self.figures()
        self.serial: int = figures.start_serial
        """The number of allocations before it."""
        self.start_level: int = figures.start_level
        self.start_reserved: int = figures.start_reserved

    def read(self, *, sample: bool = False) -> Levels:
        """Return its levels; with `sample`, the next sample peak starts from the level now."""
        figures = self.figures(sample=sample)
        return Levels(
            figures.level,
            figures.reserved,
            figures.peak,
            figures.peak_reserved,
            figures.sample_peak,
            figures.serial,
        )

    def collected(self) -> int:
        """Return the bytes that were allocated in it and freed in noted collections."""
        return cast(int, self.figures().collected)

    def peak_without_scratch(self) -> int | None:
        """Return its highest level without what operators have allocated and freed themselves."""
        if not knows_scratch():
            return None
        return cast(int, self._functions.counter_without_scratch(self._handle))

    def at_peak(self) -> Sequence[AllocationGroup]:
        """Return what was live at its peak: by stack, and all that is older as one group."""
        blocks = WrittenBlocks(
            self._functions.counter_at_peak_size(self._handle),
            partial(self._functions.counter_at_peak, self._handle),
        )
        older_bytes = self.read().peak - sum(blocks.sizes)
        older = None
        if older_bytes > 0:
            blocks_then = self._older if notes_contexts() else None
            older = AllocationGroup(
                older_bytes, 0, recorded=None, before_region=True, older=blocks_then
            )
        return PeakGroups(blocks, older)

    @property
    def _older(self) -> Callable[[], Mapping[int, int]]:
        """A function that keeps nothing of this region."""
        return partial(older_blocks, self._number, self.serial, self._functions)

    def record(self, most_blocks: int = MOST_RECORDED) -> bool:
        """Record when blocks are allocated and freed; return False if that is not possible."""
        if not hasattr(self._functions, "counter_record"):
            return False
        return bool(self._functions.counter_record(self._handle, most_blocks))

    def recorded(self) -> Recording | None:
        """Stop recording and return what was recorded; its blocks are valid until :meth:`close`."""
        recording = Recorded()
        if not hasattr(self._functions, "counter_recorded"):
            return None
        if not self._functions.counter_recorded(self._handle, byref(recording)):
            return None
        return Recording(
            blocks=_recorded_blocks(recording),
            events=recording.events,
            peak_event=recording.peak_event,
            peak_bytes=self.read().peak,
            start_bytes=self.start_level,
            host_start_bytes=recording.host_start_level,
            site_of=site_of,
            module_path=module_path,
            insides=tuple(INSIDE.get(way) for way in Freed),
            merged=recording.merged,
            merged_bytes=recording.merged_bytes,
            lost=recording.lost,
        )

    def close(self) -> None:
        """Stop counting; the stacks of all blocks are forgotten with the last region.

        Until then the library references the code objects in them. No figure shows it: code holds
        constants and names, never a tensor, and is in none of torch's allocators. A program can see
        it only through a weak reference to a code object that it has dropped in the region, and as
        at most 65,535 code objects in the memory of the process. A module that is reloaded has new
        ones. Without the reference, another code could get the address and be named in its place.
        """
        _close(self._handle, self._functions)

    def figures(self, *, sample: bool = False) -> Figures:
        """Return what :meth:`read` copies; the next call writes it again."""
        self._functions.counter_read(self._number, self._handle, sample, self._to_figures)
        return self._figures


def _recorded_blocks(recording: Recorded) -> Iterator[RecordedBlock]:
    size = recording.count * RECORDED_BLOCK.size
    memory = (ctypes.c_char * size).from_address(recording.blocks) if size else b""
    for block in RECORDED_BLOCK.iter_unpack(memory):
        size, _, begin, end, stack, count, on_host, inside = block
        yield RecordedBlock(size, begin, end, stack, count, bool(on_host), inside)


_handles: dict[int, tuple[weakref.ref[RegionCounter], ctypes.c_void_p]] = {}
"""Regions that are open in C, by the identity of their handles."""


def _close(handle: ctypes.c_void_p, functions: ctypes.PyDLL) -> None:
    functions.counter_close(byref(handle))
    functions.stacks_release()
    _handles.pop(id(handle), None)


def _close_abandoned(functions: ctypes.PyDLL) -> None:
    """Close regions that were freed without being closed, because an exception came in between."""
    for region, handle in list(_handles.values()):
        if region() is None:
            _close(handle, functions)


@cache
def prepared_functions() -> ctypes.PyDLL:
    """Return the library's functions, with counting switched on for as long as the process runs."""
    functions = library.functions()
    for prefix in foreign_prefixes():
        functions.stacks_leave_out(prefix.encode(), False)
    for folder in runner_folders():
        functions.stacks_leave_out(folder.encode(), True)
    notes_modules()
    note_contexts()
    functions.counter_install()
    return cast(ctypes.PyDLL, functions)


def is_intact() -> bool:
    """Whether allocations are still counted; another tool may replace the functions that do it."""
    return bool(prepared_functions().counter_is_intact())


def repair() -> bool:
    """Count again after another tool has replaced functions; return whether that was possible."""
    prepared_functions().counter_install()
    return is_intact()


def counts_pinned() -> bool:
    """Whether pinned memory is counted as the CPU's; uses no accelerator to find out."""
    functions = prepared_functions()
    return hasattr(functions, "counter_counts_pinned") and bool(functions.counter_counts_pinned())


def counts_collected() -> bool:
    """Whether what the garbage collector frees can be counted."""
    return hasattr(prepared_functions(), "counter_collects")


@cache
def knows_scratch() -> bool:
    """Whether what operators allocate and free themselves is told apart: tried, not assumed."""
    functions = prepared_functions()
    if not hasattr(functions, "counter_knows_scratch"):
        return False
    region = Counter().open()
    torch.empty(0, device="cpu").sum()
    region.close()
    return bool(functions.counter_knows_scratch())


def counts_cpu() -> bool:
    """Whether torch's allocator for the CPU can be counted in this process: tried, not assumed."""
    if library.functions() is None:
        return False
    return is_intact() and Counter().counts(lambda: torch.UntypedStorage(64))
