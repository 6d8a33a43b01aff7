"""The meter for accelerators: it reads the counters of their caching allocator."""

import gc
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup, UnownedBlock
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator import allocator_history, backward_threads
from pytest_cka_memory.meters.accelerator.peak_resets import PeaksBeforeResets
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.device_names import AFTER_PREDICTING
from pytest_cka_memory.meters.ledger.dispatch import StorageTracker

_HISTORY_ENTRIES = 100_000


@dataclass(frozen=True)
class _Mark:
    """The allocator's sum, the ledger's serial number and the unowned blocks at one moment."""

    requested_bytes: int
    serial: int
    unowned: Set[int]


class AcceleratorMeter(Meter):
    """Reads the counters of ``torch.accelerator``: CUDA, ROCm, XPU and out-of-tree backends.

    Raises:
        DeviceError: if the device's allocator has no such counters.
    """

    notes: tuple[str, ...] = (
        "start and peak count the allocator's blocks; retained and growth count requested bytes;",
        "memory outside PyTorch's allocator (CUDA context, NCCL, other libraries) is not counted",
    )

    def __init__(self, kind: str, index: int) -> None:
        self.notes = (*self.notes, *torch_private.LOST)
        self._device = torch.device(kind, index)
        self.device = str(self._device)
        self._tracker = StorageTracker(self._device)
        self._erased_peaks = PeaksBeforeResets(self._device, self._peaks)
        self._drop_workspaces = torch_private.workspace_dropper(kind)
        self._history = torch_private.allocator_history(kind)
        self._recording = False
        try:
            torch.empty(1, device=self._device)  # the counters exist after the first allocation
            stats = self._stats()
        except (RuntimeError, AssertionError, ValueError) as error:
            raise DeviceError(f"{self.device} cannot be measured: {error}") from error
        if "allocated_bytes.all.peak" not in stats:
            raise DeviceError(
                f"{self.device} keeps no peak counters in torch {torch.__version__}; "
                "write --cka-memory-device=cpu to measure on the CPU"
            )
        if not stats["allocated_bytes.all.peak"]:
            raise DeviceError(
                f"{self.device} cannot be measured: its allocator counts nothing; if "
                "PYTORCH_NO_CUDA_MEMORY_CACHING is set, unset it"
            )
        self.device_name = _device_name(self._device)
        self.name = "PyTorch's caching allocator"
        if not stats.get("requested_bytes.all.allocated"):  # e.g. backend:cudaMallocAsync
            self.name += ", whole blocks only"

    def start(self) -> None:
        self._tracker.start()  # the allocator always counts; the tracker knows the storages
        self._erased_peaks.start()

    def stop(self) -> None:
        self._erased_peaks.stop()
        self._tracker.stop()

    def clean(self) -> int | None:
        # The order matters: objects that a backward pass holds may be in a cycle; running kernels
        # and cycles hold tensors; the cache can release only blocks that no tensor and no library's
        # workspace uses.
        backward_threads.wait_until_ended(self._device)
        torch.accelerator.synchronize(self._device)
        gc.collect()
        self._tracker.record_unseen()
        workspace_bytes = None
        if self._drop_workspaces is not None:
            before = self._requested(self._stats())
            self._drop_workspaces()
            workspace_bytes = before - self._requested(self._stats())
        torch.accelerator.empty_cache()
        return workspace_bytes

    def read(self) -> Reading:
        stats = self._stats()
        return Reading(
            allocated_bytes=stats["allocated_bytes.all.current"],
            requested_bytes=self._requested(stats),
            peak_bytes=max(stats["allocated_bytes.all.peak"], self._erased_peaks.allocated_bytes),
            reserved_bytes=stats["reserved_bytes.all.current"],
            peak_reserved_bytes=max(
                stats["reserved_bytes.all.peak"], self._erased_peaks.reserved_bytes
            ),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._erased_peaks.forget()
        self._tracker.ledger.reset_peak()

    def mark(self) -> _Mark:
        return _Mark(self.read().requested_bytes, self._tracker.ledger.serial, set(self._unowned()))

    def retained_since(self, mark: _Mark) -> int:
        """Return the larger of the allocator's rise and the live storages allocated since `mark`.

        The rise alone misses a leak if old tensors of the same size are freed in the region; the
        storages alone miss bytes that no tensor owns.
        """
        rise = self.read().requested_bytes - mark.requested_bytes
        return max(rise, self._tracker.ledger.retained_since(mark.serial), 0)

    def record_history(self) -> bool:
        if self._history is None:
            return False
        try:
            self._history.record(max_entries=_HISTORY_ENTRIES)
        except RuntimeError:  # backend:cudaMallocAsync has the functions but cannot record
            return False
        self._recording = True
        return True

    def dump_history(self, path: Path) -> bool:
        if self._history is None or not self._recording:
            return False
        self._history.dump(str(path))
        self._history.record(enabled=None)
        self._recording = False
        return True

    def unowned_blocks_since(self, mark: _Mark) -> list[UnownedBlock]:
        return list(allocator_history.exclude(self._unowned(), mark.unowned).values())

    def _unowned(self) -> dict[int, UnownedBlock]:
        # A snapshot takes milliseconds and has no frames if the history is not recorded.
        if self._history is None or not self._recording:
            return {}
        found = allocator_history.blocks(self._history.snapshot(), self._device.index)
        return allocator_history.exclude(found, self._tracker.ledger.addresses())

    def serial(self) -> int:
        return self._tracker.ledger.serial

    def allocations_since(self, mark: _Mark) -> list[Allocation]:
        return self._tracker.ledger.allocations_since(mark.serial)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._tracker.ledger.alive_at_peak()

    def _peaks(self) -> tuple[int, int]:
        stats = self._stats()
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    def _stats(self) -> dict[str, int]:
        try:
            return torch.accelerator.memory_stats(self._device)
        except RuntimeError as error:
            if hasattr(torch, "predicted"):
                raise DeviceError(
                    f"{self.device} cannot be measured: {AFTER_PREDICTING}"
                ) from error
            raise

    @staticmethod
    def _requested(stats: dict[str, int]) -> int:
        """Return the requested bytes; the bytes of blocks if the backend does not count them."""
        if stats.get("requested_bytes.all.allocated"):
            return stats["requested_bytes.all.current"]
        return stats["allocated_bytes.all.current"]


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(name(device.index)) if name is not None else device.type
