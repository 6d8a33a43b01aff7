"""The additions that follow each block of a region: ``cycles`` and ``timeline``.

``cycles`` has the bytes that garbage collections free, and the cycles that held them; they are
described as text in :mod:`pytest_cka_memory.holders.cycles`. Garbage at batch boundaries,
``garbage_bytes`` of a sample, is counted in :mod:`.batches` for every region. ``timeline`` has each
allocation and release, as the data of a picture.
"""

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from gc import collect  # at import, because a test may patch gc.collect
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, AllocationSite
from pytest_cka_memory.core.memory_timeline import Place, Recording, picture_of
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.holders import cycles, tensors
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.meters.base import Meter, Peaks
from pytest_cka_memory.meters.collector import listen_no_longer, listen_to_collections

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
        self.collected: list[Allocation] = []
        self._callback = listen_to_collections(self)

    def note(self, phase: str, generation: int) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""
        if phase == "start" and self._is_listing:
            self._bytes_before = self._peaks.collected()
            self._live = self._meter.allocations_since(self._peaks.mark)
            self._is_listing = len(self._live) <= _MOST_LISTED
            return
        live, self._live = self._live, ()
        if live and self._peaks.collected() > self._bytes_before:
            self.collected += (allocation for allocation in live if not allocation.is_live())

    def stop(self) -> None:
        """Stop listening."""
        listen_no_longer(self._callback)


class Cycles(Addition):
    """Counts what collections free while the region runs and at its end."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        self._described: cycles.DescribedGarbage = []
        self._is_counted = peaks.count_collected()
        self._freed = FreedByCollections(peaks, meter) if self._is_counted else None
        if self._is_counted:
            # What was created to begin the region brings the next collection near, which would free
            # a cycle of the user before it can be described.
            collect(0)

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        """Describe the cycles that are garbage, the first time that there are any."""
        if not self._is_counted or self._described:
            return
        if garbage is None:
            self._describe()
        else:
            allocations = self._meter.allocations_since(self._peaks.mark)
            self._described += cycles.described_garbage(garbage, allocations)

    def finish(self) -> None:
        """Find the cycles that are garbage now, then free them.

        If nothing of the region is live, a collection could free nothing of it.
        """
        if self._is_counted and self._describe():
            collect()

    def close(self) -> None:
        if self._freed is not None:
            self._freed.stop()

    def fields(self) -> dict[str, Any]:
        if self._freed is None:
            return {"cycle_bytes": None}
        cycle_bytes = self._peaks.collected()
        holdings: tuple[Holding, ...] = ()
        if cycle_bytes or self._described:
            holdings = cycles.freed_holdings(self._described, self._freed.collected, cycle_bytes)
        return {"cycle_bytes": cycle_bytes, "cycles": holdings}

    def _describe(self) -> bool:
        """Describe what is garbage; return whether anything of the region was live before."""
        allocations = self._meter.allocations_since(self._peaks.mark)
        if not allocations:
            return False
        with _kept_garbage() as garbage:
            collect()
            self._described += cycles.described_garbage(garbage, allocations)
        return True


@contextmanager
def _kept_garbage() -> Iterator[list[Any]]:
    """Let collections in the block keep what they find, in the list that it gives.

    Finalizers run and weak references are cleared as in every collection. What is found is freed
    by the next collection after the block.
    """
    flags, others = gc.get_debug(), gc.garbage[:]
    kept = gc.garbage
    try:
        kept.clear()
        gc.set_debug(flags | gc.DEBUG_SAVEALL)
        yield kept
    finally:
        gc.set_debug(flags)
        kept[:] = others


class Timeline(Addition):
    """Records while the region runs, and reduces what was recorded at its end to a picture.

    ``--cka-memory-timeline`` asks for it.
    """

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks = peaks
        peaks.record()

    def fields(self) -> dict[str, Any]:
        recording = self._peaks.recorded()
        if recording is None:
            return {"memory_timeline": {"memories": []}}  # the page says that it was asked for
        return {"memory_timeline": picture_of(recording, partial(_places, recording))}


def _places(recording: Recording, keys: Sequence[tuple[int, int]]) -> list[Place]:
    sites: dict[int, AllocationSite | None] = {}
    for stack, _ in keys:
        if stack not in sites:
            recorded = recording.site_of(stack)
            sites[stack] = None if recorded is None else recorded.readable()
    modules = {site.module for site in sites.values() if site and site.module}
    paths = {module: recording.module_path(module) for module in modules}
    # A stack that was known before the recording has no path; its module may be live.
    paths |= tensors.module_paths({module for module, path in paths.items() if not path})
    return [_place(sites[stack], paths, recording.insides[inside]) for stack, inside in keys]


def _place(site: AllocationSite | None, paths: Mapping[int, str], inside: str | None) -> Place:
    if site is None:
        return Place("", "", "", inside or "", ())
    line, *callers = site.frames or ("",)
    module = paths.get(site.module, "")
    return Place(line, site.code or "", module, inside or "", tuple(callers))
