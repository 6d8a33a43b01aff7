"""What a meter returns: readings, peaks of one region, counted garbage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import AllocationGroup
from pytest_cka_memory.core.memory_timeline import Recording
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.reserve import ReserveState


class Reading(NamedTuple):
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


@dataclass
class RefusalFile:
    """A file that has what was live when memory was last refused, as torch writes snapshots."""

    path: Path
    make_folder: Callable[[], object]
    is_written: bool = False
    has_history: bool = False  # what the allocator did before, because the program records that
    problem: str = ""  # why it could not be written
    seconds: float = 0.0  # that it took, each time together


class Garbage(NamedTuple):
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
    def known(self, *, is_collecting: bool = False) -> Garbage:
        """Return what was found and is still live; a collection may be about to free it."""

    @abstractmethod
    def count(self, boundaries: int, *, of_all: bool = False) -> Garbage | None:
        """Look for garbage after so many boundaries; None if its memory cannot all be counted.

        With `of_all` among all objects of the region, however long that takes.
        """

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

    def found_before(self, serial: int) -> int | None:
        """Return how many bytes of what the last count has found anew were allocated up to the
        allocation of that number; None if it is not known.
        """
        return None

    def is_quick(self) -> bool:
        """Return whether to look for garbage takes no longer than a few operators now."""
        return False

    def end(self) -> None:  # noqa: B027  # most have nothing to do
        """Take note that the region ends."""

    def has_left_out(self) -> bool:
        """Return whether the last count has not looked at all objects of the region."""
        return False

    def missed_at_end(self) -> int | None:
        """Return what :meth:`missed_since` does, if the last counts have left objects out, of what
        is garbage now.
        """
        return None

    def missed_since(self) -> int | None:
        """Return after how many boundaries counts began to miss garbage that the last one found.

        None if they have missed none.
        """
        return None


class Cleaned(NamedTuple):
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
