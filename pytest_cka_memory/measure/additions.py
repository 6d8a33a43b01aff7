"""What a region measures in addition to its device's memory, if it is asked for.

The additions that follow each block of a region are here, too. ``cycles`` has the bytes that
garbage collections free, and the cycles that held them; they are described as text in
:mod:`pytest_cka_memory.holders.cycles`. Garbage at batch boundaries, ``garbage_bytes`` of a sample,
is counted in :mod:`.batches` for every region. ``timeline`` has each allocation and release, as the
data of a picture. :mod:`.system` has the additions that ask the system.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from gc import collect  # at import, because a test may patch gc.collect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.allocations import Allocation, AllocationSite
from pytest_cka_memory.core.figure_rows import (
    ADDITIONS,
    CYCLES,
    DRIVER,
    MOMENTS,
    POOLS,
    PROCESS,
    TIMELINE,
)
from pytest_cka_memory.core.memory_timeline import Place, Recording, picture_of
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.meters import readings
from pytest_cka_memory.meters.base import Meter, Peaks
from pytest_cka_memory.meters.collector import listen_no_longer, listen_to_collections

if TYPE_CHECKING:
    from pytest_cka_memory.holders.cycles import DescribedGarbage

Additions = Collection[str] | Callable[[], Collection[str]]
"""Names of additions, or a function that returns them when a region begins."""

# As text, because most sessions use none of them, and some take long to import.
_CLASSES = {
    CYCLES: (__name__, "Cycles"),
    PROCESS: ("pytest_cka_memory.measure.system", "ProcessMemory"),
    DRIVER: ("pytest_cka_memory.measure.system", "DriverMemory"),
    POOLS: ("pytest_cka_memory.measure.system", "PoolMemory"),
    TIMELINE: (__name__, "Timeline"),
    MOMENTS: ("pytest_cka_memory.measure.law_runs", "Moments"),
}
"""Name of an addition -> module and name of the subclass of :class:`Addition` that measures it."""


class Addition:
    """Base class of the additions, which measures nothing. Each region has objects of its own.

    They must not keep a tensor alive.
    """

    def boundary(self) -> None:
        """Measure at a batch boundary."""

    def loop_began(self) -> None:
        """Note that a loop is about to begin whose end will be noted."""

    def loop_ended(self, fetched_ahead: int | None) -> None:
        """Note that a loop has ended, for which workers fetch so many batches ahead, if known."""

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        """Look at objects that are garbage at a batch boundary.

        Args:
            garbage: the objects; None if they are not known: then all garbage is about to be
                collected.
            serials: the numbers of the allocations that only they keep alive.
        """

    def finish(self) -> None:
        """Measure when the region's code has ended without an exception, before cleaning."""

    def close(self) -> None:
        """Stop measuring; called once, also after an exception."""

    def levels(self) -> tuple[str, Mapping[int, int | None]]:
        """Return an attribute of samples, and its value by the number of the batch."""
        return "", {}

    def fields(self) -> dict[str, Any]:
        """Return fields of the region's record, after cleaning."""
        return {}


def checked(names: Iterable[str]) -> Collection[str]:
    """Return `names` in the order of ``ADDITIONS``, each once; ``timeline`` is the last.

    Raises:
        MissingPackageError: if psutil is not installed and the process is to be measured.
        ValueError: if one is not the name of an addition.
    """
    asked_for = [names] if isinstance(names, str) else list(names)
    known = (*ADDITIONS, TIMELINE, MOMENTS)
    unknown = [name for name in asked_for if name not in known]
    if unknown:
        raise ValueError(f"cannot measure {unknown[0]!r}; write one of {', '.join(known)}")
    if PROCESS in asked_for and not readings.has_psutil():
        raise MissingPackageError(readings.INSTALL_PSUTIL)
    return [name for name in known if name in asked_for]


def begin(names: Iterable[str], peaks: Peaks, meter: Meter) -> list[Addition]:
    """Begin to measure the additions of these names, for the region that `peaks` belongs to.

    Raises:
        MissingPackageError: if psutil is not installed and the process is to be measured.
        ValueError: if one of `names` is not the name of an addition.
    """
    classes = [_CLASSES[name] for name in checked(names)]
    return [getattr(import_module(module), name)(peaks, meter) for module, name in classes]


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
        # Most regions count no cycles. Imported when one begins that does, because the objects of
        # an import bring the next collection near, too.
        from pytest_cka_memory.holders import cycles

        self._cycles = cycles
        self._peaks, self._meter = peaks, meter
        self._described: DescribedGarbage = []
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
            self._note(garbage, self._meter.allocations_since(self._peaks.mark))

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
            holdings = self._cycles.freed_holdings(
                self._described, self._freed.collected, cycle_bytes
            )
        return {"cycle_bytes": cycle_bytes, "cycles": holdings}

    def _describe(self) -> bool:
        """Describe what is garbage; return whether anything of the region was live before."""
        allocations = self._meter.allocations_since(self._peaks.mark)
        if not allocations:
            return False
        with _kept_garbage() as garbage:
            collect()
            self._note(garbage, allocations)
        return True

    def _note(self, garbage: list[Any], allocations: Sequence[Allocation]) -> None:
        self._described += self._cycles.described_garbage(garbage, allocations)


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
    from pytest_cka_memory.holders import tensors  # here, because most regions record nothing

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
