"""Where the memory was allocated that the garbage collector frees while a region runs."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.meters.base import Meter, Peaks

_MOST_LISTED = 20_000
"""If more allocations are live, listing them before every collection would take too long."""


class FreedByCollections:
    """Lists the live allocations before each collection, to see which of them it frees.

    The list is read only after a collection that has freed memory of the region.

    Args:
        peaks: those of the region; they count what collections free.
        meter: lists the allocations.
    """

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        self._live: Sequence[Allocation] = ()
        self._bytes_before = 0
        self._is_listing = True
        self.found: list[Allocation] = []
        self._callback = _callback_of(self)
        gc.callbacks.append(self._callback)

    def note(self, phase: str) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""
        if phase == "start" and self._is_listing:
            self._bytes_before = self._peaks.collected()
            self._live = self._meter.allocations_since(self._peaks.mark)
            self._is_listing = len(self._live) <= _MOST_LISTED
            return
        live, self._live = self._live, ()
        if live and self._peaks.collected() > self._bytes_before:
            self.found += (allocation for allocation in live if not allocation.is_live())

    def stop(self) -> None:
        """Stop listening."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)


def _callback_of(listener: FreedByCollections) -> Callable[[str, Mapping[str, int]], None]:
    weak = weakref.ref(listener)

    def callback(phase: str, info: Mapping[str, int]) -> None:
        found = weak()
        if found is not None:
            found.note(phase)
        elif callback in gc.callbacks:  # an exception has ended the region
            gc.callbacks.remove(callback)

    return callback
