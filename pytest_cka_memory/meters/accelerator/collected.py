"""Count what the garbage collector frees on an accelerator, in requested bytes."""

from collections.abc import Callable, Mapping

from pytest_cka_memory.meters.accelerator.last_levels import LastLevels
from pytest_cka_memory.meters.accelerator.stats import Levels
from pytest_cka_memory.meters.blocks.collected import CollectedBlocks
from pytest_cka_memory.meters.blocks.counter import Counter


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
