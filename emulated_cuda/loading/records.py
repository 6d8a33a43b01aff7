"""What each process writes for ``python -m emulated_cuda``: the memory that it took, and its end.

A process has two files in the folder that the environment names. In one the library keeps the
figures that it knows itself, so that they remain if the process is killed. The other has what torch
knows and which exception has ended the program, and is written when the process ends.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from emulated_cuda import loading, this_process
from emulated_cuda.cards import CARDS, CONTEXT_BYTES, Card
from emulated_cuda.loading.library import MOST_DEVICES, Library

_FIGURES = struct.Struct("QQ")
"""``Device`` in csrc/figures.cpp: most bytes in use, and bytes that the last refusal lacked."""
_STATUS = struct.Struct("qq")
"""What follows there: whether the process has called ``exit``, and with which status."""
STILL_RUNS = "still running"
_SMALL_SHARE = 0.01
"""A reserve that differs by less, whenever events come, is shown as one number."""


@dataclass(frozen=True)
class Refusal:
    """The last allocation that torch's allocator could not make, and what it held then, in bytes.

    By then it has released all that it could.
    """

    requested_bytes: int
    left_bytes: int
    """What the device had left."""
    in_use_bytes: int
    free_bytes: int
    """Reserved and free, but not in private pools."""
    largest_free_bytes: int
    """The largest block of it."""
    free_in_pools_bytes: int
    """Free in private pools of CUDA graphs and ``MemPool``."""


@dataclass(frozen=True)
class DeviceUse:
    """What a process did with the memory of one device."""

    index: int
    reserved_bytes: int
    """The most that was in use on the device, beside the CUDA context."""
    missing_bytes: int
    """What the last allocation that the device refused lacked; 0 if it refused none."""
    allocated_bytes: int | None
    """The most that torch's tensors took; None if the process was killed, or did not use torch."""
    ran_out: bool | None
    """Whether torch raised an error because the memory did not suffice; None if not known."""
    refusal: Refusal | None = None
    """What torch's allocator held when it raised the last such error; None if it raised none."""
    cache_releases: int | None = None
    """How often torch's allocator got memory only after it had released what it kept free; None if
    not known."""
    is_library_refused: bool | None = False
    """Whether a library was refused memory, which it had asked of the device itself or of torch's
    allocator; None if that is not known."""
    late_reserved_bytes: int | None = None
    """The most that was in use if events come as late as they may; None if that was not run."""

    @property
    def depends_on_events(self) -> bool:
        """Whether a run with late events had another reserve, by more than 1 %."""
        late = self.late_reserved_bytes
        return late is not None and (
            abs(late - self.reserved_bytes) > _SMALL_SHARE * self.reserved_bytes
        )


@dataclass(frozen=True)
class ProcessUse:
    """What a process did with emulated devices."""

    process: int
    program: str
    rank: int | None
    card: Card
    total_bytes: int
    ended: bool
    """Whether it ended by itself; False if it was killed or still runs."""
    devices: tuple[DeviceUse, ...]
    """Those that it allocated memory on."""
    end: str | None = None
    """Why it is not known whether all of it fits: an exception, an exit status or a signal ended
    it, or it still runs. None if it ended without an error."""

    @property
    def usable_bytes(self) -> int:
        """What the card has for a program, less its CUDA context."""
        return self.total_bytes - CONTEXT_BYTES


def with_late_reserves(
    processes: Sequence[ProcessUse], late: Sequence[ProcessUse]
) -> list[ProcessUse]:
    """Return the processes with the reserves that they had in another run, with late events.

    They are matched by rank, program and order of start.
    """
    left = list(late)
    matched = []
    for process in processes:
        same = next(
            (p for p in left if (p.rank, p.program) == (process.rank, process.program)), None
        )
        if same is not None:
            left.remove(same)
            reserved = {device.index: device.reserved_bytes for device in same.devices}
            process = replace(
                process,
                devices=tuple(
                    replace(device, late_reserved_bytes=reserved.get(device.index))
                    for device in process.devices
                ),
            )
        matched.append(process)
    return matched


def write_at_exit(library: Library, card: Card, total_bytes: int) -> None:
    """Write a record when this process ends, if the environment names a folder for it."""
    folder = loading.setting_of(os.environ).get("records")
    if folder is not None and os.path.isdir(folder):
        _Recorder(Path(folder), library, card, total_bytes).begin()


class _Recorder:
    """Writes the record of this process, and of each that is forked from it."""

    def __init__(self, folder: Path, library: Library, card: Card, total_bytes: int) -> None:
        self._folder, self._library = folder, library
        self._card, self._total_bytes = card, total_bytes
        self._highest: dict[int, int] = {}
        """Device -> the highest allocated bytes before the program's last reset of the peak."""
        self._refusals: dict[int, Refusal] = {}
        self._raised = 0
        """How often torch has told Python that the memory did not suffice."""
        self._exception: str | None = None
        this_process.call_after("torch", self._follow_torch)
        atexit.register(self._write_end)
        os.register_at_fork(after_in_child=self.begin)
        self._write_before_exits_without_cleanup()

    def begin(self) -> None:
        """Write what is known of this process, whatever happens to it."""
        self._exception, self._refusals, self._raised = None, {}, 0
        self._began_ns = time.monotonic_ns()  # of the machine: the same clock for all processes
        self._library.keep_figures_in(str(self._folder / f"{os.getpid()}.figures"))
        self._write(None)
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            # A process that multiprocessing forks runs its own finalizers at its end, not those of
            # atexit, and drops finalizers that its parent has registered: so register in it again.
            util.register_after_fork(self, _Recorder.end_with_multiprocessing)
            self.end_with_multiprocessing()

    def end_with_multiprocessing(self) -> None:
        """Write the record also where multiprocessing ends this process."""
        from multiprocessing import util

        util.Finalize(None, self._write_end, exitpriority=0)

    def _write_before_exits_without_cleanup(self) -> None:
        """Write the record before ``os._exit`` too, by which processes of multiprocessing end."""
        end = os._exit

        @wraps(end)
        def write_and_end(status: int) -> NoReturn:
            with suppress(Exception):
                self._write_end()
                self._library.note_exit_status(status)
            end(status)

        os._exit = write_and_end

    def _follow_torch(self) -> None:
        from emulated_cuda import torch_private

        torch_private.call_before_peak_resets(self._note_peaks)
        torch_private.call_when_memory_is_refused(self._note_refusal)
        error = sys.modules["torch"].OutOfMemoryError
        made = error.__init__

        @wraps(made)
        def raised(*args: Any) -> None:
            self._raised += 1
            made(*args)

        error.__init__ = raised

    def _note_refusal(self, index: int, requested: int, total: int, left: int) -> None:
        with suppress(Exception):  # one from here would replace the error that the program gets
            self._refusals[index] = Refusal(requested, left, *_held_on(index))

    def _note_peaks(self) -> None:
        for index, stats in _stats():
            peak = stats.get("allocated_bytes.all.peak", 0)
            self._highest[index] = max(peak, self._highest.get(index, 0))

    def _write_end(self) -> None:
        self._note_peaks()
        self._exception = _exception() or self._exception
        has_failed = self._raised > 0 or self._exception is not None
        # What a library has caught in C++, such as cuDNN, which then takes a smaller workspace, is
        # no error of the program.
        ran_out = {index: has_failed and stats.get("num_ooms", 0) > 0 for index, stats in _stats()}
        refusals = {index: list(astuple(each)) for index, each in self._refusals.items()}
        releases = {index: _cache_releases(stats) for index, stats in _stats()}
        self._write(
            {
                "allocated": self._highest,
                "ran_out": ran_out,
                "refusals": refusals,
                "cache_releases": releases,
                "is_library_refused": {
                    index: _is_library_refused(stats) for index, stats in _stats()
                },
            }
        )

    def _write(self, of_torch: dict[str, dict[int, Any]] | None) -> None:
        record = {
            "program": os.path.basename((sys.argv or ["python"])[0]) or "python",
            "rank": os.environ.get("RANK"),
            "began_ns": self._began_ns,
            "card": self._card.name,
            "total_bytes": self._total_bytes,
            "of_torch": of_torch,
            "exception": self._exception,
        }
        path = self._folder / f"{os.getpid()}.json"
        with suppress(FileNotFoundError):  # the list was made before this process has ended
            path.write_text(json.dumps(record), encoding="utf-8")


def _held_on(index: int) -> tuple[int, int, int, int]:
    """Return the last four figures of a :class:`Refusal`, of what torch's allocator holds now."""
    torch = sys.modules["torch"]
    in_use = torch.cuda.memory_stats(index).get("allocated_bytes.all.current", 0)
    shared: list[int] = []
    in_pools = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index:
            continue
        free = [each["size"] for each in segment["blocks"] if each["state"] == "inactive"]
        if tuple(segment.get("segment_pool_id", _NO_POOL)) == _NO_POOL:
            shared += free
        else:
            in_pools += sum(free)
    return in_use, sum(shared), max(shared, default=0), in_pools


_NO_POOL = (0, 0)


def _cache_releases(stats: Mapping[str, Any]) -> int:
    """Return how often the allocator got memory after it had released what it kept free.

    It tries again also before each error that it raises, unless a graph is being captured.
    """
    return max(0, int(stats.get("num_alloc_retries", 0) - stats.get("num_ooms", 0)))


def _is_library_refused(stats: Mapping[str, Any]) -> bool | None:
    """Return whether a library was refused memory, if anything was and no error reached Python."""
    if stats.get("num_ooms", 0):
        return True  # it has caught the error in C++
    if _cache_releases(stats):
        return False
    # With this setting, the allocator may release blocks of that size first, and does not count it.
    return None if stats.get("max_split_size", -1) > 0 else True


def _stats() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and torch's counters of each device; nothing if torch has used none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            yield index, torch.cuda.memory_stats(index)


def _exception() -> str | None:
    """Return the name of the exception that ends this process; None if none does.

    Python keeps one that nothing caught in `sys.last_type` while it ends, and multiprocessing ends
    a process while it handles the exception. SystemExit is known by its status.
    """
    exception_type = sys.exc_info()[0] or getattr(sys, "last_type", None)
    return None if exception_type in (None, SystemExit) else exception_type.__name__


_PREFIX = "emulated-cuda-records-"
_UNLOCKED = "emulated-cuda-new-"


@contextmanager
def folder_of_records() -> Iterator[Path]:
    """Make a folder, and remove it at the end.

    What was left by processes that were killed is removed too. A folder is in use as long as its
    lock is held, which the system releases when the process ends in any way.
    """
    remove_stale_folders()
    # It gets the name that others look for when it is locked.
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(made.with_name(made.name.replace(_UNLOCKED, _PREFIX)))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_folders() -> None:
    """Remove the folders of this user that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is locked or gone, or not of this user
            _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def read(folder: Path, statuses: Mapping[int, int] = MappingProxyType({})) -> list[ProcessUse]:
    """Return what the processes wrote that used a device: ranks first, then in order of start.

    Args:
        folder: where they wrote.
        statuses: process -> its status, as `subprocess` returns it, as far as it is known.
    """
    records = {path: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    # Not by their numbers, which begin again at 1 after the highest.
    in_order = sorted(records, key=lambda path: records[path]["began_ns"])
    processes = [_process(path, records[path], statuses.get(int(path.stem))) for path in in_order]
    used = [process for process in processes if process.devices]
    return sorted(used, key=lambda p: (p.rank is None, p.rank or 0))


def _process(path: Path, record: Mapping[str, Any], status: int | None) -> ProcessUse:
    figures = path.with_suffix(".figures").read_bytes()
    size = MOST_DEVICES * _FIGURES.size
    of_torch = record["of_torch"] or {}
    is_status_known, own_status = _STATUS.unpack(figures[size:])
    if status is None and is_status_known:
        status = own_status
    return ProcessUse(
        process=int(path.stem),
        program=record["program"],
        rank=int(record["rank"]) if str(record["rank"]).isdecimal() else None,
        card=CARDS[record["card"]],
        total_bytes=record["total_bytes"],
        ended=record["of_torch"] is not None,
        devices=tuple(
            _device(index, reserved, missing, of_torch)
            for index, (reserved, missing) in enumerate(_FIGURES.iter_unpack(figures[:size]))
            if reserved or missing
        ),
        end=_end(record, status, int(path.stem)),
    )


def _device(
    index: int, reserved: int, missing: int, of_torch: Mapping[str, Mapping[str, Any]]
) -> DeviceUse:
    """Return what a process did with a device.

    Args:
        index: of the device.
        reserved: the most bytes in use.
        missing: what the last refusal lacked.
        of_torch: what :meth:`_Recorder._write_end` wrote; empty if the process was killed.
    """

    def known(name: str) -> Any:
        return of_torch.get(name, {}).get(str(index))

    refusal = known("refusals")
    return DeviceUse(
        index,
        reserved,
        missing,
        known("allocated"),
        known("ran_out"),
        refusal and Refusal(*refusal),
        known("cache_releases"),
        known("is_library_refused") if missing else False,
    )


def _end(record: Mapping[str, Any], status: int | None, process: int) -> str | None:
    """Return `ProcessUse.end`."""
    if status == 0:
        return None  # the program has handled any exception
    exception: str | None = record["exception"]
    if exception is not None:
        return exception
    if status is not None:
        return f"exit status {status}" if status > 0 else _name_of_signal(-status)
    if record["of_torch"] is not None:
        return None
    return STILL_RUNS if _runs(process) else "a signal"


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _runs(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")  # neither a zombie nor dead
