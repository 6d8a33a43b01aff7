"""The interface of all meters: the only connection between the plugin and a device."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.memory_timeline import Recording
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.reserve import ReserveState


@dataclass(frozen=True)
class Reading:
    """The state of a device's memory at one moment, in bytes."""

    allocated_bytes: int
    """Live now, as the allocator counts them (on a GPU: blocks, rounded up)."""
    requested_bytes: int
    """Live now, as tensors requested them; leaks are judged by this, because blocks are rounded."""
    peak_bytes: int
    """Highest ``allocated_bytes`` since the last ``reset_peak``."""
    reserved_bytes: int | None = None
    """Held by the allocator, in use or not; None if the device has no reserve."""
    peak_reserved_bytes: int | None = None
    """Highest ``reserved_bytes`` since the last ``reset_peak``."""
    peak_without_scratch_bytes: int | None = None
    """Highest ``allocated_bytes`` of a region without what operators allocate and free themselves;
    None if that is not told apart."""


@dataclass(frozen=True)
class DriverReading:
    """The memory of a card as its driver counts it, of all processes, in bytes."""

    free_bytes: int
    total_bytes: int

    @property
    def used_bytes(self) -> int:
        """What any process uses, and what the driver itself needs."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True)
class Requests:
    """The bytes that were requested of an allocator, in the order of its calls."""

    allocated: Sequence[int]
    """Of each allocation."""
    freed: Sequence[int]
    """Of each block that was freed."""


@dataclass(frozen=True)
class RefusedAllocation:
    """The last allocation that a device had no memory for."""

    number: int
    """How many there have been, with this one."""
    refusal: Refusal
    reserve: ReserveState
    """What was reserved then."""


@dataclass(frozen=True)
class Garbage:
    """Memory that is live and that only garbage in reference cycles keeps alive, in bytes."""

    allocated_bytes: int = 0
    requested_bytes: int = 0


OLDEST = 2
"""The generation of the collector's full collections."""


@dataclass(frozen=True)
class OlderGarbage:
    """What objects that are older than the region, and are garbage now, keep alive."""

    requested_bytes: int
    last_serial: int
    """The number of the last allocation in it."""


class GarbageCounter(ABC):
    """Counts garbage in reference cycles while a region runs, without freeing it."""

    @abstractmethod
    def known(self) -> Garbage:
        """Return what was found and is still live."""

    @abstractmethod
    def count(self, boundaries: int) -> Garbage | None:
        """Look for garbage after so many boundaries; None if its memory cannot all be counted."""

    def older(self, generation: int = OLDEST) -> list[OlderGarbage] | None:
        """Return what only garbage keeps alive that is older than the region, and was not counted.

        One for each group of objects that reference each other; None if its memory cannot all be
        counted. This looks at all objects that a collection of the generation looks at.
        """
        return []

    def collect_older(self) -> list[OlderGarbage]:
        """Collect all garbage; return what that freed and was not counted.

        As :meth:`older` does, or block by block if that is not known.
        """
        return []

    def missed_since(self) -> int | None:
        """Return after how many boundaries counts began to miss garbage that the last one found.

        None if they have missed none.
        """
        return None


@dataclass(frozen=True)
class Cleaned:
    """What cleaning a device before or after a region did."""

    workspace_bytes: int | None = None
    """Bytes of the library workspaces dropped; None if they cannot be counted separately."""
    garbage_left: bool = False
    """Whether there may still be garbage in reference cycles."""


class Peaks(ABC):
    """The peaks of one open region. It must not keep a tensor alive."""

    mark: Any
    """The moment at which the region began, for :meth:`Meter.retained_since`."""

    @abstractmethod
    def read(self) -> Reading:
        """Return the levels now, and as peaks the highest levels since the region began."""

    def start(self) -> Reading:
        """Return the levels when the region began, also if another thread has allocated since."""
        return self.read()

    def end(self) -> Reading:
        """Return what :meth:`read` does, just after cleaning, which may have read the levels."""
        return self.read()

    def reserved(self) -> int | None:
        """Return what the allocator holds, before cleaning; None if the device has no reserve."""
        return self.read().reserved_bytes

    def peak_reserved(self) -> int | None:
        """Return the most that the allocator held; None if the device has no reserve."""
        return self.read().peak_reserved_bytes

    @abstractmethod
    def sample(self) -> tuple[Reading, int, int]:
        """Return a reading, the highest level since the last sample, and the allocations so far."""

    def allocations(self) -> Sequence[AllocationGroup]:
        """Return what was live at the region's peak, as far as it is known."""
        return []

    def record(self) -> bool:
        """Record each allocation and release from now on; return False if that is not possible."""
        return False

    def recorded(self) -> Recording | None:
        """Stop recording and return what was recorded; None without :meth:`record`."""
        return None

    def count_collected(self) -> bool:
        """Count what the garbage collector frees from now on; return False if that is unknown."""
        return False

    def collected(self) -> int:
        """Return the bytes that were allocated in the region and freed by the garbage collector.

        Only after :meth:`count_collected` has returned True.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """End counting; called once, also after an exception."""


class AllocationCounts(ABC):
    """Questions about the allocations of a device since a moment, such as the start of a region."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Set both peaks to the current level."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a token for the current moment; it must not keep a tensor alive."""

    def open_peaks(self) -> Peaks | None:
        """Return peaks for a region alone; None if the device has one counter for all regions."""
        return None

    def wait_for_threads(self) -> None:  # noqa: B027  # most devices have none
        """Wait until threads of torch have freed what they no longer use."""

    @abstractmethod
    def retained_since(self, mark: Any) -> int:
        """Return the bytes that were allocated after `mark` and are live now."""

    def host_retained_since(self, mark: Any) -> int | None:
        """Return the bytes of tensors on the host that were allocated after `mark` and are live.

        None if this meter measures the host itself, or does not count it beside its device.
        """
        return None

    def host_allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """Return the allocations that :meth:`host_retained_since` counts."""
        return []

    def count_collected(self, mark: Any) -> Callable[[], int] | None:
        """Count what the garbage collector frees, as long as the result is referenced.

        Returns:
            A function that returns the bytes that were allocated after `mark` and so freed; None
            if that is unknown, or if :meth:`open_peaks` has peaks that count it.
        """
        return None

    def serial(self) -> int:
        """Return the number of allocations so far; 0 if they are not counted."""
        return 0

    knows_blocks: bool = False
    """Whether :meth:`block_at` knows all allocations."""

    def block_at(self, address: int) -> tuple[int, int] | None:
        """Return bytes and number of the live allocation at an address; None if there is none."""
        return None

    def garbage_counter(self) -> GarbageCounter | None:
        """Return a counter of garbage for a region that begins now, if this meter has its own.

        If it has none, garbage is looked for among Python's objects if `knows_blocks` is true, and
        collected at batch boundaries otherwise.
        """
        return None

    def allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """Return the allocations that :meth:`retained_since` counts, as far as they are known."""
        return []

    def allocations_at_peak(self) -> list[AllocationGroup]:
        """Return what was live at the peak since :meth:`reset_peak`, as far as it is known."""
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
        """Return what its figures depend on, as builtin types, for reports and baselines."""
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
        """
        self._noted = self.conditions()
        return self._noted

    def conditions(self) -> Mapping[str, str]:
        """Return the facts of :data:`pytest_cka_memory.core.conditions.FACTS` that its figures
        depend on, without those that have their usual value.
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
        """
        self.start()

    def stop_for(self, user: object) -> None:
        """Undo the matching :meth:`start_for`."""
        self.stop()

    @abstractmethod
    def clean(self) -> int | None:
        """Free what is not in use: collect garbage, drop library workspaces and empty caches.

        Returns the bytes of the dropped workspaces, which only a first run allocates; None if they
        cannot be counted separately.
        """

    def clean_before(self, *, thorough: bool) -> Cleaned:
        """Do what :meth:`clean` does, before a region.

        Without `thorough` the region will not be judged, and a meter may leave garbage if finding
        it takes long.
        """
        return Cleaned(self.clean())

    def clean_after(self, mark: Any, *, thorough: bool) -> Cleaned:
        """Do the same at the end of a region that began at `mark`.

        A meter that knows that nothing since `mark` is live can save itself the work.
        """
        return Cleaned(self.clean())

    def between_regions(self, *, objects_dropped: bool = False, since: int = 0) -> None:
        """Take note of a moment at which no test runs.

        With `objects_dropped`, a fixture that several tests used has just been torn down, so
        that there may be garbage which the level does not show. There is none if nothing that was
        allocated since allocation number `since` is live: before it, the fixture was set up.
        """

    @abstractmethod
    def read(self) -> Reading:
        """Return the current value of all counters."""

    def total_bytes(self) -> int | None:
        """Return the memory of the device; None if its allocator cannot be limited to less."""
        return None

    def limited(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Let the allocator reserve no more than so many bytes. Only with :meth:`total_bytes`."""
        raise NotImplementedError

    def record_requests(self) -> bool:
        """Record how much is requested at each allocation; return False if that is not possible.

        Only for a device whose blocks are larger than what is requested of its allocator.
        """
        return False

    def recorded_requests(self) -> Requests | None:
        """Stop recording and return it; None without :meth:`record_requests`."""
        return None

    def reserved_by_graphs(self) -> Sequence[Holding]:
        """Return what pools of CUDA graphs have reserved, by the graph that holds it."""
        return ()

    def after_captures(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call `call` after each capture of a graph; return a function that ends this."""
        return lambda: None

    def before_releases(self, call: Callable[[], object]) -> Callable[[], object]:
        """Call `call`, a method, before the program empties the cache; return what ends this.

        The object of the method is not kept for it.
        """
        return lambda: None

    def reserve(self) -> ReserveState | None:
        """Return what the reserve consists of; None if the device has no snapshot of it."""
        return None

    def addresses_in_pools(self) -> Collection[int]:
        """Return the addresses of live blocks in private pools."""
        return ()

    def allocations_at(self, addresses: Collection[int]) -> Sequence[Allocation]:
        """Return the live allocations at these addresses, also older ones than any region."""
        return []

    def refused(self) -> RefusedAllocation | None:
        """Return the last allocation for which the device had no memory; None if unknown."""
        return None

    def driver(self) -> DriverReading | None:
        """Return what the driver of the device counts; None if the device has no driver."""
        return None

    def record_history(self) -> bool:
        """Make the allocator record where blocks are allocated; return False if it cannot."""
        return False

    def dump_history(self, path: Path) -> bool:
        """Write that record for PyTorch's memory viewer; return False if there is none."""
        return False

    def stop_history(self) -> None:
        """Stop what :meth:`record_history` has started; the user's own recording goes on."""
