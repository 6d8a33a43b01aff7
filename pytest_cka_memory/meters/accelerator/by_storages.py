"""Count storages on an accelerator in a ledger, where its blocks cannot be counted natively.

:class:`TensorMeter` is for an allocator that has no counters either.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters import objects, torch_private
from pytest_cka_memory.meters.accelerator import (
    AllocatorStats,
    Levels,
    device_name,
)
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter, wait_for_backward
from pytest_cka_memory.meters.patching import Patch, SharedPatches
from pytest_cka_memory.meters.storage_meter import StorageMeter, StorageTracker

_RESET = "reset_peak_memory_stats"


class PeaksBeforeResets(SharedPatches):
    """The highest peaks in bytes that resets have erased since :meth:`forget`, while started.

    It patches the reset functions of ``torch.accelerator`` and of the device's module. Resets by a
    function that was imported before, or by the allocator directly, are not seen.
    """

    def __init__(self, device: torch.device, read: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self.allocated_bytes = self.reserved_bytes = 0
        module = torch.get_device_module(device)
        self._modules = torch.accelerator, module, getattr(module, "memory", None)
        self._read = read

    def make_patches(self) -> Iterator[Patch]:
        for module in self._modules:
            if hasattr(module, _RESET):
                yield Patch(module, _RESET, _saving_before(getattr(module, _RESET), self.save))

    def save(self) -> None:
        """Keep the current peaks if they are the highest so far."""
        allocated_bytes, reserved_bytes = self._read()
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)

    def forget(self) -> None:
        """Drop the kept peaks, because the meter itself has reset the counter."""
        self.allocated_bytes = self.reserved_bytes = 0


def _saving_before(original: Callable[..., Any], save: Callable[[], None]) -> Callable[..., Any]:
    def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> Any:
        save()
        return original(*args, **kwargs)

    return reset_peak_memory_stats


@dataclass(frozen=True)
class _Mark:
    serial: int
    unowned_bytes: int
    """Requested bytes that no storage of the ledger had."""


class AcceleratorStorageMeter(AcceleratorMeter):
    """Counts storages in a ledger; the allocator has one peak counter for all regions.

    Args:
        device: with its index.
        stats: the counters of that device.
        why: why its blocks are not counted; None if they cannot be.

    Raises:
        NoCountersError: if the device's peaks cannot be reset.
    """

    def __init__(self, device: torch.device, stats: AllocatorStats, why: str | None = None) -> None:
        stats.check_reset()
        why = why or "this allocator's blocks cannot be counted natively"
        limit = "the list of what was live at the peak leaves out memory inside operators, because "
        super().__init__(device, stats, (limit + why,))
        self._tracker = StorageTracker(device)
        self._erased_peaks = PeaksBeforeResets(device, self._allocator_peaks)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *objects.notes()]}

    def start_for(self, user: object) -> None:
        super().start_for(user)
        self._tracker.start(user)  # the allocator always counts; the tracker knows the storages
        self._erased_peaks.start(user)

    def stop_for(self, user: object) -> None:
        self._erased_peaks.stop(user)
        self._tracker.stop(user)
        super().stop_for(user)

    def levels(self) -> Levels:
        return self._stats.levels()

    def collect_before(self, *, thorough: bool) -> bool:
        gc.collect()
        self._tracker.record_unseen()
        return True

    def collect_after(self, mark: _Mark, *, thorough: bool) -> bool:
        return self.collect_before(thorough=thorough)

    def peaks(self) -> tuple[int, int]:
        allocated_bytes, reserved_bytes = self._allocator_peaks()
        erased = self._erased_peaks
        return (
            max(allocated_bytes, erased.allocated_bytes),
            max(reserved_bytes, erased.reserved_bytes),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._erased_peaks.forget()
        self._tracker.ledger.reset_peak()

    def mark(self) -> _Mark:
        return _Mark(self._tracker.ledger.mark(), self._unowned_bytes())

    def retained_since(self, mark: _Mark) -> int:
        """Return the bytes of new storages, and what the allocator rose beyond all storages."""
        unowned_bytes = max(0, self._unowned_bytes() - mark.unowned_bytes)
        return self._tracker.ledger.retained_since(mark.serial) + unowned_bytes

    def count_collected(self, mark: _Mark) -> Callable[[], int] | None:
        return self._tracker.ledger.count_collected(mark.serial)

    def serial(self) -> int:
        return self._tracker.ledger.serial

    def allocations_since(self, mark: _Mark) -> list[Allocation]:
        return self._tracker.ledger.allocations_since(mark.serial)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._tracker.ledger.alive_at_peak()

    def _unowned_bytes(self) -> int:
        ledger = self._tracker.ledger
        ledger.settle()
        return self._stats.levels().requested - ledger.level

    def _allocator_peaks(self) -> tuple[int, int]:
        stats = self._stats.all()
        return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]


class TensorMeter(StorageMeter):
    """Counts the bytes of the tensor storages on one device exactly, while started.

    Its peak is a lower bound, and there is no reserve: what the allocator has besides tensors,
    such as workspaces of libraries and unused blocks, cannot be read.

    Args:
        device: with its index.
        reason: that the allocator cannot be read; part of the notes.
    """

    name = "tensors counted, allocator not seen"

    def __init__(self, device: torch.device, reason: str) -> None:
        self._device = device
        super().__init__(device=device)
        self.notes = (reason, *StorageMeter.notes, *torch_private.LOST)
        self.device_name = device_name(device)

    def wait_for_threads(self, *, briefly: bool = False) -> None:
        wait_for_backward(self._device, briefly=briefly)

    def clean(self) -> int | None:
        # Running kernels hold tensors, and objects that a backward pass holds may be in a cycle.
        torch.accelerator.synchronize(self._device)
        wait_for_backward(self._device)
        return super().clean()
