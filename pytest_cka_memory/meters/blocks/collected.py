"""Count what the garbage collector frees, for regions that ask for it."""

from collections.abc import Iterable, Mapping

from pytest_cka_memory.meters.blocks.counter import Counter
from pytest_cka_memory.meters.patching import SharedPatches, Undoable
from pytest_cka_memory.meters.storages import patches


class CollectedBlocks(SharedPatches):
    """Informs the counter when the garbage collector runs in a thread, while started."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def make_patches(self) -> Iterable[Undoable]:
        yield from patches.collections(self.note_collection)

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""
        self._counter.note_collection(begins=phase == "start")

    def stop(self, user: object) -> None:
        super().stop(user)
        self._counter.note_collection(begins=False)  # an exception may have interrupted the last
