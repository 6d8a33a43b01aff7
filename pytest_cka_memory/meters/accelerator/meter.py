"""The meter for accelerators: it reads the counters of their caching allocator.

And waits before it for the threads in which torch runs backward passes.
"""

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import empty  # at import, because a test may patch these
from torch.autograd import grad

from emulated_cuda import this_process
from pytest_cka_memory.core.allocations import RawFrames
from pytest_cka_memory.core.reserve import ReserveState
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.meters import accelerator, torch_keepers, torch_private
from pytest_cka_memory.meters.accelerator import AllocatorStats, Levels, device_name
from pytest_cka_memory.meters.accelerator.refusals import Lines, refusals_of, reserve_of
from pytest_cka_memory.meters.base import (
    Cleaned,
    DriverReading,
    Meter,
    Reading,
    RefusalFile,
    RefusedAllocation,
    Requests,
)
from pytest_cka_memory.meters.collector import not_counted
from pytest_cka_memory.meters.patching import JoinedPatches
from pytest_cka_memory.meters.torch_versions import facts_of_accelerator

_MOST_HISTORY_ENTRIES = 1_000_000
_MOST_REQUESTS = 4_000_000
"""Entries while sizes are recorded; each allocation makes up to three."""


_has_threads_in = 0
"""The number of the process in which torch has started these threads, which do not end."""


@not_counted
def wait_for_backward(*devices: torch.device, briefly: bool = False) -> None:
    """Wait until the threads of `devices` hold nothing of earlier backward passes.

    The caller of a backward pass gets the gradients while the thread still references them. If the
    pass fails, the thread references the exception, and with it every frame of the traceback and
    their tensors. It drops its references when it next runs: within about 1 ms, but possibly after
    a reading.

    To wait, a backward pass over an empty tensor runs in the queue of each thread. Neither the pass
    nor its tensors allocate memory. Other threads' passes run before it.

    Args:
        *devices: those of one type.
        briefly: whether to wait for 0.05 s at most instead of 1 s.
    """
    global _has_threads_in
    if torch_keepers.compiles_backward():
        return  # it would compile the pass, and runs its own in the thread that calls them
    # Inside a backward pass, waiting for its thread would be a deadlock. The threads must not be
    # started here: once they run, a forked child process cannot run backward passes.
    is_inside = torch_private.graph_task_id() != -1
    is_known = _has_threads_in == os.getpid()
    if is_inside or not (is_known or this_process.thread_may_exist(torch_private.BACKWARD_THREAD)):
        return
    _has_threads_in = os.getpid()
    for waiting in [_EmptyPass.running_on(device) for device in devices]:
        waiting.wait(briefly=briefly)


class _EmptyPass(threading.Thread):
    """A thread that has run a pass over nothing when it ends.

    A new one for each pass: no dispatch mode is active there, and its node is the last in the
    queue.
    """

    LONGEST_S, BRIEF_S, STEPS = 1.0, 0.05, 20
    given_up: ClassVar[dict[torch.device, "_EmptyPass"]] = {}
    """Those for which the last wait was too short."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(target=run_empty_pass, args=(device,), daemon=True)
        self._device = device
        self._left_s = self.LONGEST_S

    @classmethod
    def running_on(cls, device: torch.device) -> "_EmptyPass":
        """Return one that runs after all passes that have ended on the device."""
        earlier = cls.given_up.get(device)
        if earlier is not None and earlier.still_runs(0.001):  # so long that it can end
            return earlier
        new = cls(device)
        with suppress(RuntimeError):  # the interpreter ends
            new.start()
        return new

    def wait(self, *, briefly: bool) -> None:
        """Wait until it has ended, for a second at most in all waits together."""
        wait_s = min(self._left_s, self.BRIEF_S if briefly else self.LONGEST_S)
        for _ in range(self.STEPS):  # a machine that stands still for a second uses up only one
            if not self.still_runs(wait_s / self.STEPS):
                self.given_up.pop(self._device, None)
                return
        self._left_s -= wait_s
        self.given_up[self._device] = self

    def still_runs(self, wait_s: float) -> bool:
        """Whether it has not ended after this time."""
        if self.is_alive():
            self.join(wait_s)
        return self.is_alive()


def run_empty_pass(device: torch.device) -> None:
    """Run a backward pass that allocates nothing; return when the device's thread has had it."""
    with suppress(RuntimeError, AssertionError):  # measured without it if that is not possible
        end = empty(0, device=device, requires_grad=True).view(0)
        gradient = empty(0, device=device)
        if torch_private.RUN_BACKWARD is None:
            grad(end, end, gradient)
        else:  # grad() would import sympy, for half a second and into the process's figures
            arguments = (end,), (gradient,), False, False, (end,), False
            torch_private.RUN_BACKWARD(*arguments, accumulate_grad=False)


class AcceleratorMeter(Meter):
    """Reads the counters of ``torch.accelerator``: CUDA, ROCm, XPU and out-of-tree backends.

    A subclass counts what the allocator does not: what a region has allocated, and its peaks.

    Args:
        device: with its index.
        stats: the counters of that device, which :meth:`AllocatorStats.check` has found usable.
        limits: what the figures of the subclass leave out; part of the notes.
    """

    notes: tuple[str, ...] = (
        "start and peak count the allocator's blocks; retained and growth count requested bytes",
        "memory outside PyTorch's allocator (CUDA context, NCCL, other libraries) counts only with "
        "--cka-memory-also=driver or max_outside_mb",
    )

    def __init__(
        self, device: torch.device, stats: AllocatorStats, limits: tuple[str, ...] = ()
    ) -> None:
        self._device, self._stats = device, stats
        self.device = str(device)
        self.device_name = device_name(device)
        self._drop_workspaces = torch_private.workspace_dropper(device.type)
        self._history = AllocatorHistory(device.type)
        self._patches_of_pools = JoinedPatches(
            accelerator.Captures(), accelerator.Releases(device.type)
        )
        self._refusals = refusals_of(device.type)
        self.name = "PyTorch's caching allocator"
        if not stats.all().get("requested_bytes.all.allocated"):  # e.g. backend:cudaMallocAsync
            self.name += ", whole blocks only"
        self.notes = (*self.notes, *limits, *torch_private.LOST)

    @property
    def torch_device(self) -> str:
        return str(self._device)  # an emulated one has another name in reports

    def facts(self) -> dict[str, Any]:
        is_cuda = self._device.type == "cuda"
        return {**super().facts(), "cuda": torch.version.cuda if is_cuda else None}

    def conditions(self) -> dict[str, str]:
        return facts_of_accelerator(self.device)

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._patches_of_pools.start(user)

    def stop_for(self, user: object) -> None:
        self._patches_of_pools.stop(user)

    @abstractmethod
    def levels(self) -> Levels:
        """Return the allocator's levels, in which the reserve may be older than the rest."""

    @abstractmethod
    def peaks(self) -> tuple[int, int]:
        """Return the highest level and reserve since :meth:`reset_peak`, or since a region."""

    @abstractmethod
    def collect_before(self, *, thorough: bool) -> bool:
        """Free what is garbage before a region, so that its start level does not include it.

        Returns:
            False if there may still be garbage: only without `thorough`, to save time.
        """

    @abstractmethod
    def collect_after(self, mark: Any, *, thorough: bool) -> bool:
        """Do the same at the end of a region that began at `mark`."""

    def dropping_workspaces(self) -> AbstractContextManager[None]:
        """Return a context in which everything that is freed counts as a library's workspace."""
        return nullcontext()

    def note_empty_cache(self) -> None:
        """Take note that the cache was emptied, which lowers the reserve."""

    def clean(self) -> int | None:
        return self.clean_before(thorough=True).workspace_bytes

    def clean_before(self, *, thorough: bool) -> Cleaned:
        # Before workspaces are dropped: what threads free is none. And at any level, because what
        # they reference may be as large as what has been freed since there was no garbage.
        if self.levels().allocated:
            self.wait_for_threads()
        return self._clean(lambda: self.collect_before(thorough=thorough))

    def clean_after(self, mark: Any, *, thorough: bool) -> Cleaned:
        return self._clean(lambda: self.collect_after(mark, thorough=thorough))

    def _clean(self, collect: Callable[[], bool]) -> Cleaned:
        # The order matters: running kernels and reference cycles hold tensors; the cache can
        # release only blocks that no tensor and no library's workspace uses.
        torch.accelerator.synchronize(self._device)
        workspace_bytes = self._without_workspaces()
        is_clean = collect()
        torch.accelerator.empty_cache()
        self.note_empty_cache()
        return Cleaned(workspace_bytes, garbage_left=not is_clean)

    def _without_workspaces(self) -> int | None:
        """Drop the libraries' workspaces; return their bytes, None if they cannot be dropped."""
        if self._drop_workspaces is None:
            return None
        before = self.levels().requested
        with self.dropping_workspaces():
            self._drop_workspaces()
        return before - self.levels().requested

    def read(self) -> Reading:
        levels = self._stats.levels()
        peak_bytes, peak_reserved_bytes = self.peaks()
        return Reading(
            allocated_bytes=levels.allocated,
            requested_bytes=levels.requested,
            peak_bytes=peak_bytes,
            reserved_bytes=levels.reserved,
            peak_reserved_bytes=peak_reserved_bytes,
        )

    def wait_for_threads(self, *, briefly: bool = False) -> None:
        wait_for_backward(self._device, briefly=briefly)

    def reserved_by_graphs(self) -> Sequence[Holding]:
        return accelerator.reserved_by_graphs(self._device)

    def after_captures(self, call: Callable[[], object]) -> Callable[[], None]:
        return accelerator.after_captures(call)

    def before_releases(self, call: Callable[[], object]) -> Callable[[], object]:
        return accelerator.before_releases(call)

    def reserve(self) -> ReserveState | None:
        return reserve_of(self._device)

    def addresses_in_pools(self) -> frozenset[int]:
        return accelerator.addresses_in_pools(self._device)

    def refused(self) -> RefusedAllocation | None:
        return self._refusals.last(self._device)

    def open_refusal_file(self, path: Path, make: Callable[[], object]) -> RefusalFile | None:
        if not self._refusals.is_observed:
            return None
        file = RefusalFile(path, make)
        self._refusals.open(file, self._lines)
        return file

    def close_refusal_file(self, file: RefusalFile) -> None:
        self._refusals.close(file)

    def _lines(self) -> Lines:
        dump = None if self._history.is_ours else self._history.dump
        return Lines(self.frames_of_blocks, self._device.index, dump)

    def frames_of_blocks(self) -> Mapping[int, RawFrames]:
        """Return address and frames of each live block whose allocation was seen."""
        return {}

    def driver(self) -> DriverReading | None:
        memory_info = getattr(torch.get_device_module(self._device), "mem_get_info", None)
        return None if memory_info is None else DriverReading(*memory_info(self._device))

    def total_bytes(self) -> int | None:
        is_cuda = self._device.type == "cuda"
        return int(torch.cuda.mem_get_info(self._device)[1]) if is_cuda else None

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        total = torch.cuda.mem_get_info(self._device)[1]
        own_share = torch.cuda.get_per_process_memory_fraction(self._device)
        share = min(own_share, (limit_bytes + 0.5) / total)
        torch.cuda.set_per_process_memory_fraction(share, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(own_share, self._device)

    def record_requests(self) -> bool:
        return self._history.record_requests()

    def recorded_requests(self) -> Requests | None:
        return self._history.recorded_requests(self._device.index)

    def record_history(self) -> bool:
        return self._history.record()

    def dump_history(self, path: Path) -> bool:
        return self._history.dump(path)

    def stop_history(self) -> None:
        self._history.stop()


class AllocatorHistory:
    """The history of blocks that an allocator records, for PyTorch's memory viewer.

    If the user records it, what the user has started is never changed.

    Args:
        device_type: ``cuda`` or ``xpu``.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._functions = torch_private.allocator_history(device_type)
        self.is_ours = False
        """Whether :meth:`record` records, and not the user."""
        self._undo: Callable[[], object] = bool

    def record(self) -> bool:
        """Start recording; return False if this allocator cannot."""
        if self._functions is None:
            return False
        if self._is_recorded():
            return True
        try:
            # C++ stacks take minutes to write, and tell users little.
            self._functions.record(max_entries=_MOST_HISTORY_ENTRIES, stacks="python")
        except RuntimeError:  # backend:cudaMallocAsync has the functions but cannot record
            return False
        self.is_ours = True
        self._undo = torch_private.on_history_call(self._device_type, self._leave_to_user)
        return True

    def dump(self, path: Path) -> bool:
        """Write what is recorded, by whomever; return False if nothing is."""
        if self._functions is None or not self._is_recorded():
            return False
        self._functions.dump(str(path))
        return True

    def stop(self) -> None:
        """Stop what :meth:`record` has started, unless the user has started or stopped it since."""
        self._undo()
        self._undo = bool
        if self.is_ours and self._functions is not None:
            self.is_ours = False
            self._functions.record(enabled=None)

    def record_requests(self) -> bool:
        """Record sizes without stacks; return False if that is not possible, or a user records."""
        if self._functions is None or self._is_recorded():
            return False
        try:
            self._functions.record(
                "all", context=None, max_entries=_MOST_REQUESTS, clear_history=True
            )
        except RuntimeError:  # backend:cudaMallocAsync
            return False
        return True

    def recorded_requests(self, index: int) -> Requests | None:
        """Stop that recording, and return the sizes of the device with this index."""
        if self._functions is None:
            return None
        try:
            traces = self._functions.snapshot()["device_traces"]
        finally:
            self._functions.record(enabled=None)
        trace = traces[index] if index < len(traces) else []
        if len(trace) >= _MOST_REQUESTS:
            return None
        of_action = {
            action: [int(entry["size"]) for entry in trace if entry["action"] == action]
            for action in ("alloc", "free_requested")
        }
        return Requests(*of_action.values())

    def _is_recorded(self) -> bool:
        return self.is_ours or torch_private.records_history(self._device_type)

    def _leave_to_user(self) -> None:
        self.is_ours = False
