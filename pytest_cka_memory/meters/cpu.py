"""The meter for the CPU where torch's allocator can be counted.

Each allocation is counted in C: see ``blocks/csrc/hooks.c`` and ``blocks.c`` beside it.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import torch_keepers, torch_private
from pytest_cka_memory.meters.base import Cleaned, Meter, Peaks, Reading
from pytest_cka_memory.meters.blocks import objects_of_types
from pytest_cka_memory.meters.blocks.counter import (
    Counter,
    Levels,
    counts_pinned,
    is_intact,
    knows_scratch,
    repair,
)
from pytest_cka_memory.meters.blocks.other_memory import (
    BlockPeaks,
    CollectedBlocks,
    OtherMemory,
    add_window,
)
from pytest_cka_memory.meters.collector import Garbage
from pytest_cka_memory.meters.objects import is_pinned, live_storages
from pytest_cka_memory.meters.torch_versions import facts_of_kernels, processor_name


class BlockMeter(Meter):
    """Counts every block that torch's CPU allocator hands out, in all threads.

    Only where :func:`~pytest_cka_memory.meters.blocks.counter.counts_cpu` is true.
    """

    device = "cpu"
    name = "torch's CPU allocator"
    knows_blocks = True

    def __init__(self) -> None:
        self.device_name = processor_name()
        self.notes = (
            "the peak includes temporaries inside operators, which depend on how many threads run",
            "memory of other libraries counts if it is lent to a tensor inside the region",
            _not_counted(),
            *torch_private.LOST,
        )
        self._counter = Counter()
        self._garbage = Garbage(self._counter.level, self._counter.retained_between)
        self._other_memory = OtherMemory(self._counter)
        self._collected = CollectedBlocks(self._counter)
        torch_keepers.prepare_counts()
        knows_scratch()  # runs an operator, now rather than in a region
        self._add_live()

    def conditions(self) -> dict[str, str]:
        return facts_of_kernels()

    def start(self) -> None:
        """Do nothing: counting never stops, and memory of other libraries counts in regions."""

    def stop(self) -> None:
        """Do nothing, as :meth:`start`."""

    def clean(self) -> int | None:
        return self.clean_before(thorough=True).workspace_bytes

    def clean_before(self, *, thorough: bool) -> Cleaned:
        if not (is_intact() or repair()):
            self._fail()
        return _CLEAN if self._garbage.collect_before(thorough=thorough) else _GARBAGE_LEFT

    def clean_after(self, mark: int, *, thorough: bool) -> Cleaned:
        if not is_intact():
            self._fail()
        if not self._counter.retained_since(mark):  # as after most tests
            return _CLEAN
        is_clean = self._garbage.collect_after(lambda: self.retained_since(mark), thorough=thorough)
        return _CLEAN if is_clean else _GARBAGE_LEFT

    def between_regions(self, *, objects_dropped: bool = False, since: int = 0) -> None:
        if objects_dropped:
            self._garbage.suspect(since, self.serial())
        else:
            self._garbage.note_quiet_moment()

    def read(self) -> Reading:
        figures = self._counter.figures()
        return _reading(figures.level, figures.peak)

    def reset_peak(self) -> None:
        self._counter.reset_peak()

    def mark(self) -> int:
        return self.serial()

    def open_peaks(self) -> Peaks:
        return _RegionPeaks(self._counter, self._other_memory, self._collected)

    def retained_since(self, mark: int) -> int:
        return self._counter.retained_since(mark)

    def serial(self) -> int:
        return self._counter.serial()

    def allocations_since(self, mark: int) -> Sequence[Allocation]:
        return self._counter.allocations_since(mark)

    def block_at(self, address: int) -> tuple[int, int] | None:
        return self._counter.block_at(address)

    @staticmethod
    def _fail() -> NoReturn:
        """Raise an error: allocations are no longer counted, so that every limit would pass."""
        raise DeviceError(
            "cpu can no longer be measured: something, perhaps a memory profiler, has "
            "replaced the functions by which torch allocates memory; run without that "
            "tool, or set CKA_MEMORY_NATIVE=0 to count tensors instead"
        )

    def _add_live(self) -> None:
        """Count what was allocated before counting began, as far as Python objects hold it."""
        with torch_private.no_torch_function():  # the user's modes must not see these calls
            lent = []
            for storage in live_storages(torch.device("cpu"), objects_of=objects_of_types):
                # That pinned memory is freed is only seen if its allocation was.
                if not storage.nbytes() or is_pinned(storage):
                    continue
                if storage.resizable():
                    self._counter.add(storage.data_ptr(), storage.nbytes(), is_new=False)
                else:  # not of torch's allocator, unless it is a part of another storage
                    lent.append(storage)
            for storage in lent:
                add_window(storage, is_new=False)


def _not_counted() -> str:
    """Return what is left out; a torch build without accelerators has no pinned memory."""
    if counts_pinned() or torch.accelerator.current_accelerator() is None:
        return "packed weights of quantised layers are not counted"
    return "packed weights of quantised layers and pinned memory are not counted"


_CLEAN, _GARBAGE_LEFT = Cleaned(), Cleaned(garbage_left=True)


class _RegionPeaks(BlockPeaks):
    def __init__(
        self, counter: Counter, other_memory: OtherMemory, collected: CollectedBlocks
    ) -> None:
        super().__init__(counter, other_memory)
        self._other_memory, self._collected = other_memory, collected
        self.mark = self._region.serial

    def start(self) -> Reading:
        level = self._region.start_level
        return Reading(level, level, level)

    def read(self) -> Reading:
        figures = self._region.figures()
        level: int = figures.level
        without_scratch = self._region.peak_without_scratch()
        return Reading(level, level, figures.peak, peak_without_scratch_bytes=without_scratch)

    def sampled(self, levels: Levels) -> Reading:
        return _reading(levels.level, levels.peak, self._other_memory.prefetched_bytes())

    def collected(self) -> int:
        return self._region.collected()


def _reading(level: int, peak: int, prefetched_bytes: int = 0) -> Reading:
    """Return a reading; batches that a loader has not yielded yet are not part of what grows."""
    return Reading(allocated_bytes=level, requested_bytes=level - prefetched_bytes, peak_bytes=peak)
