"""The interface of all meters: the only connection between the plugin and a device."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.reserve import ReserveState
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.meters.readings import (
    OLDEST,
    Cleaned,
    DriverReading,
    Garbage,
    GarbageCounter,
    OlderGarbage,
    Peaks,
    Reading,
    RefusalFile,
    RefusedAllocation,
    Requests,
)

__all__ = [
    "OLDEST",
    "AllocationCounts",
    "Cleaned",
    "DriverReading",
    "Garbage",
    "GarbageCounter",
    "Meter",
    "OlderGarbage",
    "Peaks",
    "Reading",
    "RefusalFile",
    "RefusedAllocation",
    "Requests",
]


class AllocationCounts(ABC):
    """Questions about the allocations of a device since a moment, such as the start of a region."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Set both peaks to the current level."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a token for the current moment; it must not keep a tensor alive.

        Returns:
            What :meth:`retained_since` and its like take.
        """

    def open_peaks(self) -> Peaks | None:
        """Return peaks for a region that begins now.

        Returns:
            The peaks; None if the device has one counter for all regions. The region closes them.
        """
        return None

    def wait_for_threads(self, *, briefly: bool = False) -> None:
        """Wait until threads of torch have freed what they no longer use; most devices have none.

        Args:
            briefly: whether to give up soon, as at each boundary.
        """
        del briefly

    @abstractmethod
    def retained_since(self, mark: Any) -> int:
        """Return the bytes that were allocated after `mark` and are live now.

        Args:
            mark: what :meth:`mark` has returned, or the start of a region.

        Returns:
            Bytes, as tensors requested them. What grew since counts with its growth.
        """

    def host_retained_since(self, mark: Any) -> int | None:
        """Return the bytes of tensors on the host that were allocated after `mark` and are live.

        Args:
            mark: what :meth:`mark` has returned, or the start of a region.

        Returns:
            Bytes; None if this meter measures the host itself, or does not count it beside its
            device.
        """
        return None

    def host_allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """Return the allocations that :meth:`host_retained_since` counts.

        Args:
            mark: what :meth:`mark` has returned, or the start of a region.

        Returns:
            One :class:`~pytest_cka_memory.core.allocations.Allocation` for each; empty if unknown.
        """
        return []

    def count_collected(self, mark: Any) -> Callable[[], int] | None:
        """Count what the garbage collector frees, as long as the result is referenced.

        Args:
            mark: what :meth:`mark` has returned, or the start of a region.

        Returns:
            A function that returns the bytes that were allocated after `mark` and so freed; None
            if that is unknown, or if :meth:`open_peaks` has peaks that count it.
        """
        return None

    def serial(self) -> int:
        """Return how many allocations there have been.

        Returns:
            Their number, which never falls; 0 if they are not counted.
        """
        return 0

    knows_blocks: bool = False
    """Whether :meth:`block_at` knows all allocations."""

    def block_at(self, address: int) -> tuple[int, int] | None:
        """Return the live allocation at an address.

        Args:
            address: of its data.

        Returns:
            Its bytes and its number in the order of all allocations; None if there is none.
        """
        return None

    def garbage_counter(self) -> GarbageCounter | None:
        """Return a counter of garbage for a region that begins now, if this meter has its own.

        If it has none, garbage is looked for among Python's objects if `knows_blocks` is true, and
        collected at batch boundaries otherwise.

        Returns:
            The counter; None if this meter has none.
        """
        return None

    def allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """Return the allocations that :meth:`retained_since` counts, as far as they are known.

        Args:
            mark: what :meth:`mark` has returned, or the start of a region.

        Returns:
            One :class:`~pytest_cka_memory.core.allocations.Allocation` for each storage or block.
        """
        return []

    def allocations_at_peak(self) -> list[AllocationGroup]:
        """Return what was live at the peak since :meth:`reset_peak`, as far as it is known.

        Returns:
            Groups of equal allocations, with bytes and site each.
        """
        return []


class Meter(AllocationCounts):
    """A device's memory counters. Use them between :meth:`start` and :meth:`stop`, which nest.

    A meter knows nothing of regions, tests or limits, so a new device is one new subclass.
    """

    device: str
    """The device in reports: ``cpu``, ``cuda:0``, or the name of an emulated one."""
    device_name: str
    """What the device is, e.g. ``NVIDIA A100-SXM4-80GB``."""
    name: str
    """What counts the memory, in a few words."""
    notes: tuple[str, ...] = ()
    """What its figures include and leave out; printed under every table."""

    @property
    def torch_device(self) -> str:
        """The device for models, as ``torch.device`` takes it; by default the same as `device`."""
        return self.device

    def facts(self) -> dict[str, Any]:
        """Return what its figures depend on, as builtin types, for reports and baselines.

        Returns:
            ``device``, ``device_name``, ``meter``, ``notes`` (a list), ``torch`` and ``cuda``
            (versions, or None) and ``conditions``; a subclass may add keys.
        """
        torch = sys.modules.get("torch")  # not imported for a meter that does not need it
        return {
            "device": self.device,
            "device_name": self.device_name,
            "meter": self.name,
            "notes": list(self.notes),
            "torch": str(torch.__version__) if torch else None,
            "cuda": torch.version.cuda if torch and self.device.startswith("cuda") else None,
            "conditions": dict(self.note_conditions() if self._noted is None else self._noted),
        }

    _noted: Mapping[str, str] | None = None
    """The facts that its figures depend on, when they were last read."""

    def note_conditions(self) -> Mapping[str, str]:
        """Read the facts that its figures depend on: those of a session are read when it begins.

        What a test sets itself is part of what is measured.

        Returns:
            What :meth:`conditions` returns.
        """
        self._noted = self.conditions()
        return self._noted

    def conditions(self) -> Mapping[str, str]:
        """Return the facts of :data:`pytest_cka_memory.core.conditions.FACTS` that its figures
        depend on, without those that have their usual value.

        Returns:
            Name of a fact -> its value as text.
        """
        return {}

    @abstractmethod
    def start(self) -> None:
        """Start counting."""

    @abstractmethod
    def stop(self) -> None:
        """Undo the matching :meth:`start`."""

    def start_for(self, user: object) -> None:
        """Start counting for an open region, or for another object that can be referenced weakly.

        A signal handler may raise an exception at any line, so :meth:`stop_for` may never be
        called. A meter that changes the process should therefore end what it has started when it
        finds, at the next start or stop, that all its users were freed.

        Args:
            user: the region, or the other object; it is referenced weakly.
        """
        self.start()

    def stop_for(self, user: object) -> None:
        """Undo the matching :meth:`start_for`.

        Args:
            user: what was passed to :meth:`start_for`.
        """
        self.stop()

    @abstractmethod
    def clean(self) -> int | None:
        """Free what is not in use: collect garbage, drop library workspaces and empty caches.

        Returns:
            The bytes of the dropped workspaces, which only a first run allocates; None if they
            cannot be counted separately.
        """

    def clean_before(self, *, thorough: bool) -> Cleaned:
        """Do what :meth:`clean` does, before a region.

        Args:
            thorough: if not, the region will not be judged, and a meter may leave garbage if
                finding it takes long.

        Returns:
            What was done.
        """
        return Cleaned(self.clean())

    def clean_after(self, mark: Any, *, thorough: bool) -> Cleaned:
        """Do what :meth:`clean` does, at the end of a region.

        A meter that knows that nothing since `mark` is live can save itself the work.

        Args:
            mark: the start of the region.
            thorough: as for :meth:`clean_before`.

        Returns:
            What was done.
        """
        return Cleaned(self.clean())

    def between_regions(self, *, objects_dropped: bool = False, since: int = 0) -> None:
        """Take note of a moment at which no test runs.

        Args:
            objects_dropped: whether a fixture that several tests used has just been torn down, so
                that there may be garbage which the level does not show.
            since: the number of allocations when that fixture was set up. If nothing that was
                allocated after it is live, there is no such garbage.
        """

    @abstractmethod
    def read(self) -> Reading:
        """Return the current value of all counters.

        Returns:
            Levels and peaks, in bytes.
        """

    def total_bytes(self) -> int | None:
        """Return the memory of the device.

        Returns:
            Bytes; None if its allocator cannot be limited to less.
        """
        return None

    def limited(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Let the allocator reserve no more than so many bytes, in a ``with`` block.

        Args:
            limit_bytes: at most what :meth:`total_bytes` returns.

        Returns:
            The context. Allocations beyond the limit raise ``torch.OutOfMemoryError`` in it.

        Raises:
            NotImplementedError: if :meth:`total_bytes` is None.
        """
        raise NotImplementedError

    def record_requests(self) -> bool:
        """Record how much is requested at each allocation.

        Only for a device whose blocks are larger than what is requested of its allocator.

        Returns:
            Whether that is possible.
        """
        return False

    def recorded_requests(self) -> Requests | None:
        """Stop recording and return it; None without :meth:`record_requests`."""
        return None

    def reserved_by_graphs(self) -> Sequence[Holding]:
        """Return what pools of CUDA graphs have reserved, by the graph that holds it."""
        return ()

    def after_captures(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call a function after each capture of a CUDA graph.

        Args:
            call: the function.

        Returns:
            A function that ends this.
        """
        return lambda: None

    def before_releases(self, call: Callable[[], object]) -> Callable[[], object]:
        """Call a method before the program empties the allocator's cache.

        Args:
            call: the method; its object is not kept for it.

        Returns:
            A function that ends this.
        """
        return lambda: None

    def reserve(self) -> ReserveState | None:
        """Return what the reserve consists of; None if the device has no snapshot of it."""
        return None

    def addresses_in_pools(self) -> Collection[int]:
        """Return the addresses of live blocks in private pools."""
        return ()

    def allocations_at(self, addresses: Collection[int]) -> Sequence[Allocation]:
        """Return the live allocations at some addresses, also those older than any region.

        Args:
            addresses: of their data.

        Returns:
            One :class:`~pytest_cka_memory.core.allocations.Allocation` for each that is known.
        """
        return []

    def refused(self) -> RefusedAllocation | None:
        """Return the last allocation for which the device had no memory; None if unknown.

        Returns:
            Its number, what was asked for, and what was reserved then.
        """
        return None

    def open_refusal_file(self, path: Path, make: Callable[[], object]) -> RefusalFile | None:
        """Write what is live to a file whenever memory is refused; `make` makes its folder.

        None if this device never says that memory is refused.
        """
        return None

    def close_refusal_file(self, file: RefusalFile) -> None:  # most devices have none
        """End what :meth:`open_refusal_file` has begun. The file is not removed."""

    def driver(self) -> DriverReading | None:
        """Return what the driver of the device counts; None if the device has no driver.

        Returns:
            Free and total bytes of the card, of all processes.
        """
        return None

    def record_history(self) -> bool:
        """Make the allocator record where blocks are allocated.

        Returns:
            Whether it can.
        """
        return False

    def dump_history(self, path: Path) -> bool:
        """Write what :meth:`record_history` has recorded, for PyTorch's memory viewer.

        Args:
            path: the file, which is replaced.

        Returns:
            Whether there was anything to write.

        Raises:
            OSError: if the file cannot be written.
        """
        return False

    def stop_history(self) -> None:
        """Stop what :meth:`record_history` has started; the user's own recording goes on."""
