"""The meter for accelerators: it reads the counters of their caching allocator."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator import blocks_in_use, stats
from pytest_cka_memory.meters.accelerator.blocks_in_use import Captures
from pytest_cka_memory.meters.accelerator.by_blocks import native_counting
from pytest_cka_memory.meters.accelerator.by_storages import StorageCounting
from pytest_cka_memory.meters.accelerator.counting import Counting
from pytest_cka_memory.meters.accelerator.stats import AllocatorStats, device_name
from pytest_cka_memory.meters.base import Cleaned, DriverReading, Meter, Peaks, Reading
from pytest_cka_memory.meters.conditions import of_accelerator

_MOST_ENTRIES = 100_000


class AllocatorHistory:
    """Records the history, unless the user does: what the user has started is never changed."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._functions = torch_private.allocator_history(device_type)
        self._is_ours = False
        self._undo: Callable[[], object] = bool

    def record(self) -> bool:
        """Start recording; return False if this allocator cannot."""
        if self._functions is None:
            return False
        if self._is_recorded():
            return True
        try:
            self._functions.record(max_entries=_MOST_ENTRIES)
        except RuntimeError:  # backend:cudaMallocAsync has the functions but cannot record
            return False
        self._is_ours = True
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
        if self._is_ours and self._functions is not None:
            self._is_ours = False
            self._functions.record(enabled=None)

    def _is_recorded(self) -> bool:
        return self._is_ours or torch_private.records_history(self._device_type)

    def _leave_to_user(self) -> None:
        self._is_ours = False


class AcceleratorMeter(Meter):
    """Reads the counters of ``torch.accelerator``: CUDA, ROCm, XPU and out-of-tree backends.

    Raises:
        DeviceError: if the device cannot be used.
        NoCountersError: if its allocator has no such counters.
    """

    notes: tuple[str, ...] = (
        "start and peak count the allocator's blocks; retained and growth count requested bytes",
        "memory outside PyTorch's allocator (CUDA context, NCCL, other libraries) counts only with "
        "--cka-memory-also=driver or max_outside_mb",
    )

    def __init__(self, kind: str, index: int) -> None:
        self._device = torch.device(kind, index)
        self.device = str(self._device)
        self._stats = AllocatorStats(self._device)
        self._drop_workspaces = torch_private.workspace_dropper(kind)
        self._history = AllocatorHistory(kind)
        self._captures = Captures()
        self._stats.check()
        self.device_name = device_name(self._device)
        self.name = "PyTorch's caching allocator"
        if not self._stats.all().get(
            "requested_bytes.all.allocated"
        ):  # e.g. backend:cudaMallocAsync
            self.name += ", whole blocks only"
        self._counting: Counting = native_counting(self._device, self._stats) or StorageCounting(
            self._device, self._stats
        )
        self.notes = (*self.notes, *self._counting.notes, *torch_private.LOST)

    @property
    def knows_blocks(self) -> bool:  # type: ignore[override]  # of the class in other meters
        return self._counting.knows_blocks

    def block_at(self, address: int) -> tuple[int, int] | None:
        return self._counting.block_at(address)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *self._counting.seen_notes()]}

    def conditions(self) -> dict[str, str]:
        return of_accelerator(self.device)

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._captures.start(user)
        self._counting.start_for(user)

    def stop_for(self, user: object) -> None:
        self._counting.stop_for(user)
        self._captures.stop(user)

    def clean(self) -> int | None:
        return self.clean_before(thorough=True).workspace_bytes

    def clean_before(self, *, thorough: bool) -> Cleaned:
        return self._clean(lambda: self._counting.collect_before(thorough=thorough))

    def clean_after(self, mark: Any, *, thorough: bool) -> Cleaned:
        return self._clean(lambda: self._counting.collect_after(mark, thorough=thorough))

    def _clean(self, collect: Callable[[], bool]) -> Cleaned:
        # The order matters: running kernels and reference cycles hold tensors; the cache can
        # release only blocks that no tensor and no library's workspace uses.
        torch.accelerator.synchronize(self._device)
        workspace_bytes = self._without_workspaces()
        is_clean = collect()
        self._empty_cache()
        return Cleaned(workspace_bytes, garbage_left=not is_clean)

    def between_regions(self, *, objects_dropped: bool = False, since: int = 0) -> None:
        self._counting.between_regions(objects_dropped=objects_dropped, since=since)

    def read(self) -> Reading:
        levels = self._stats.levels()
        peak_bytes, peak_reserved_bytes = self._counting.peaks()
        return Reading(
            allocated_bytes=levels.allocated,
            requested_bytes=levels.requested,
            peak_bytes=peak_bytes,
            reserved_bytes=levels.reserved,
            peak_reserved_bytes=peak_reserved_bytes,
        )

    def reset_peak(self) -> None:
        self._counting.reset_peak()

    def mark(self) -> Any:
        return self._counting.mark()

    def open_peaks(self) -> Peaks | None:
        return self._counting.open_peaks()

    def wait_for_threads(self) -> None:
        stats.wait_until_ended(self._device)

    def retained_since(self, mark: Any) -> int:
        return self._counting.retained_since(mark)

    def host_retained_since(self, mark: Any) -> int | None:
        return self._counting.host_retained_since(mark)

    def host_allocations_since(self, mark: Any) -> Sequence[Allocation]:
        return self._counting.host_allocations_since(mark)

    def count_collected(self, mark: Any) -> Callable[[], int] | None:
        return self._counting.count_collected(mark)

    def reserved_by_graphs(self) -> Sequence[Holding]:
        return blocks_in_use.reserved_by_graphs(self._device)

    def driver(self) -> DriverReading | None:
        counts = getattr(torch.get_device_module(self._device), "mem_get_info", None)
        return None if counts is None else DriverReading(*counts(self._device))

    def record_history(self) -> bool:
        return self._history.record()

    def dump_history(self, path: Path) -> bool:
        return self._history.dump(path)

    def stop_history(self) -> None:
        self._history.stop()

    def serial(self) -> int:
        return self._counting.serial()

    def allocations_since(self, mark: Any) -> Sequence[Allocation]:
        return self._counting.allocations_since(mark)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._counting.allocations_at_peak()

    def _without_workspaces(self) -> int | None:
        """Drop the libraries' workspaces; return their bytes, None if they cannot be dropped."""
        if self._drop_workspaces is None:
            return None
        before = self._counting.levels().requested
        with self._counting.dropping_workspaces():
            self._drop_workspaces()
        return before - self._counting.levels().requested

    def _empty_cache(self) -> None:
        torch.accelerator.empty_cache()
        self._counting.note_empty_cache()
