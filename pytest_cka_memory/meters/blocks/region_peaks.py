"""The peaks that the counter keeps for one region, and what the collector frees in it."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from pytest_cka_memory.core.allocations import AllocationGroup
from pytest_cka_memory.core.memory_timeline import Recording
from pytest_cka_memory.meters.base import Peaks, Reading
from pytest_cka_memory.meters.blocks.counter import Counter, Levels, counts_collected
from pytest_cka_memory.meters.patching import SharedPatches, Undoable, collection_callbacks


class CollectedBlocks(SharedPatches):
    """Informs the counter when the garbage collector runs in a thread, while started."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def make_patches(self) -> Iterable[Undoable]:
        yield from collection_callbacks(self.note_collection)

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""
        self._counter.note_collection(begins=phase == "start")

    def stop(self, user: object) -> None:
        super().stop(user)
        self._counter.note_collection(begins=False)  # an exception may have interrupted the last


class BlockPeaks(Peaks):
    """Counts one region of a device; a subclass makes readings of the counter's levels.

    Args:
        counter: the counter of the device.
        patches: what shows the counter memory that its allocator does not report.
    """

    _collected: CollectedBlocks

    def __init__(self, counter: Counter, patches: SharedPatches) -> None:
        patches.start(self)  # before the region, which counts what they show
        self._patches = patches
        self._region = counter.open()

    @abstractmethod
    def sampled(self, levels: Levels) -> Reading:
        """Return the reading of a batch boundary, at which the region had these levels."""

    def sample(self) -> tuple[Reading, int, int]:
        levels = self._region.read(sample=True)
        return self.sampled(levels), levels.sample_peak, levels.serial

    def allocations(self) -> Sequence[AllocationGroup]:
        return self._region.at_peak()

    def record(self) -> bool:
        return self._region.record()

    def recorded(self) -> Recording | None:
        return self._region.recorded()

    def count_collected(self) -> bool:
        self._collected.start(self)
        return counts_collected()

    def close(self) -> None:
        self._collected.stop(self)
        self._region.close()  # before the patches, which show it what is freed until then
        self._patches.stop(self)
