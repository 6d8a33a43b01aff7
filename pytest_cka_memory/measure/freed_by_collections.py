"""Where the memory was allocated that the garbage collector frees while a region runs."""

from collections.abc import Sequence

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.measure.collection_listeners import (
    listen_no_longer,
    listen_to_collections,
)
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
        self._callback = listen_to_collections(self)

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
        listen_no_longer(self._callback)
