"""What is read: by a meter, and from the system of the memory of processes.

A meter returns readings, peaks of one region and counted garbage. The processes are this one and
its children; psutil knows which these are.
"""

import ctypes
import mmap
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import AllocationGroup
from pytest_cka_memory.core.memory_timeline import Recording
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.reserve import ReserveState
from pytest_cka_memory.core.retention import WORKER
from pytest_cka_memory.errors import MissingPackageError


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

    @abstractmethod
    def leave_out(self, kind: type) -> None:
        """Look at no object of a type: none references what may be garbage."""

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

    @abstractmethod
    def start(self) -> Reading:
        """Return the levels when the region began, also if another thread has allocated since."""

    def end(self) -> Reading:
        """Return what :meth:`read` does, just after cleaning, which may have read the levels."""
        return self.read()

    def reserved(self) -> int | None:
        """Return what the allocator holds, before cleaning; None if the device has no reserve."""
        return self.read().reserved_bytes

    def peak_reserved(self) -> int | None:
        """Return the most that the allocator held; None if the device has no reserve."""
        return self.read().peak_reserved_bytes

    def settle(self, *, briefly: bool = False) -> bool:
        """Wait until threads of torch have freed what they have used in the region.

        Args:
            briefly: whether to give up soon, as at each boundary.

        Returns:
            Whether there was anything to wait for.
        """
        del briefly
        return False

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


INSTALL_PSUTIL = (
    "measuring the memory of the process needs psutil, which is not installed; run pip install "
    "'pytest-cka-memory[process]'"
)
_OWN = "this process"
_NAME_OF_WORKERS = "pt_data_worker"
"""What torch calls the processes that load data."""
_ROLLUP = re.compile(rb"^(Pss_Anon|Pss_Shmem|Anonymous): +(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class ProcessReading:
    """The memory of one process at one moment."""

    pid: int
    name: str
    bytes: int
    anonymous_bytes: int | None = None
    """Of anonymous memory, shared or not; it does not rise if the process copies a shared page.
    None on a system that does not count it."""


def has_psutil() -> bool:
    """Whether psutil is installed; does not import it."""
    return find_spec("psutil") is not None


class ProcessTree:
    """The process that runs this code and its children, also their children.

    Raises:
        MissingPackageError: if psutil is not installed.
    """

    def __init__(self) -> None:
        if not has_psutil():
            raise MissingPackageError(INSTALL_PSUTIL)
        import psutil

        self._own = psutil.Process()
        self._gone = psutil.Error
        self._names: dict[int, str] = {}
        self._workers = 0

    def read(self) -> list[ProcessReading]:
        """Return the memory of each process that runs; this one is the first.

        On Linux it is the proportional set size of anonymous and shared memory: a page that several
        processes use counts once in their sum, and pages of files, such as those of libraries, do
        not count, because the system drops them when it needs memory. On other systems it is what
        is unique to each process.
        """
        readings = [ProcessReading(self._own.pid, _OWN, *_memory_of(self._own))]
        for child in self._own.children(recursive=True):
            try:
                size, anonymous_bytes = _memory_of(child)
                if size:  # a process that has ended and was not waited for has none
                    name = self._name_of(child)
                    readings.append(ProcessReading(child.pid, name, size, anonymous_bytes))
            except self._gone:  # it has ended meanwhile, or belongs to another user
                continue
        return readings

    @property
    def own_pid(self) -> int:
        """The number of the process that this was made in."""
        return int(self._own.pid)

    def own_bytes(self) -> int:
        """Return the memory of that process alone, whatever others share with it."""
        size, anonymous_bytes = _memory_of(self._own)
        return size if anonymous_bytes is None else anonymous_bytes

    def _name_of(self, child: Any) -> str:
        known = self._names.get(child.pid, "")
        if known.startswith(WORKER):
            return known
        name = str(child.name())
        if name == _NAME_OF_WORKERS:
            name = f"{WORKER} {self._workers}"
            self._workers += 1
        self._names[child.pid] = name
        return name


def return_free_memory() -> None:
    """Give memory that this process has freed back to the system, as far as its C library can.

    What is allocated next would be in it otherwise, and not raise the memory of the process.
    """
    glibc = _glibc()
    if glibc is None:
        return
    glibc.malloc_trim(0)
    # Where this is set, free() writes into what it frees, and so would take the pages back.
    if hasattr(glibc, "mallinfo2") and not os.environ.get("MALLOC_PERTURB_"):
        _drop_pages_of_arena(glibc)


_BLOCK_BYTES = 120 << 10
"""Of blocks that glibc takes from an arena: from 128 KiB on it may map them by themselves."""
_MOST_BLOCKS = 1_000
_OF_OTHER_ARENA, _FLAGS = 4, 6
"""Flags in the word before a block: not of the main arena; and that, or mapped by itself."""


def _drop_pages_of_arena(glibc: Any) -> None:
    """Give back what is free in the arena of this thread, if it is not the main one.

    ``malloc_trim`` leaves the free end of every other arena as it is. A thread that is not the
    first has such an arena, and so has the first as soon as an allocation was refused. What is free
    is allocated here: then its pages may be dropped.
    """
    before, page, blocks = -1, mmap.PAGESIZE, list[int]()
    try:
        while len(blocks) < _MOST_BLOCKS:
            block = glibc.malloc(_BLOCK_BYTES)
            if not block:
                break
            blocks.append(block)
            word = block - ctypes.sizeof(ctypes.c_size_t)
            if ctypes.c_size_t.from_address(word).value & _FLAGS != _OF_OTHER_ARENA:
                break
            first = -(-block // page) * page
            size = (block + _BLOCK_BYTES) // page * page - first
            glibc.madvise(first, size, mmap.MADV_DONTNEED)
            if len(blocks) % 32 == 1:  # it becomes larger as soon as nothing is free
                now = glibc.mallinfo2().arena
                if now > before >= 0:
                    break
                before = now
    finally:
        for block in reversed(blocks):
            glibc.free(block)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache  # each library that is loaded leaves reference cycles
def _glibc() -> Any:
    """Return the C library if it is glibc; None with another.

    Calls keep Python's lock: else each of many short ones would wait for other threads.
    """
    library = ctypes.PyDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "malloc_trim"):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    library.malloc_trim.argtypes = [size]
    library.malloc.argtypes, library.malloc.restype = [size], address
    library.free.argtypes, library.free.restype = [address], None
    library.madvise.argtypes = [address, size, ctypes.c_int]
    if hasattr(library, "mallinfo2"):  # from glibc 2.33 on
        library.mallinfo2.restype = _MallocInfo
    return library


def _memory_of(process: Any) -> tuple[int, int | None]:
    """Return the bytes of one process, and of its anonymous memory if the system counts that.

    Raises:
        psutil.Error: if it has ended, or this user may not read it.
    """
    if sys.platform == "linux":
        sizes = _rolled_up(process.pid)
        if sizes is not None:
            return sizes
    info: Any = process.memory_full_info()
    return int(getattr(info, "uss", info.rss)), None


def _rolled_up(pid: int) -> tuple[int, int] | None:
    """Return what ``smaps_rollup`` says of both; None on a system that lacks its lines."""
    own = "self" if pid == os.getpid() else str(pid)
    try:
        with open(f"/proc/{own}/smaps_rollup", "rb") as file:
            sizes = {name: 1024 * int(size) for name, size in _ROLLUP.findall(file.read())}
    except OSError:
        return None
    if len(sizes) < 3:
        return None
    return sizes[b"Pss_Anon"] + sizes[b"Pss_Shmem"], sizes[b"Anonymous"]
