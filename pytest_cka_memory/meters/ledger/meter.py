"""The meter for a device whose allocator cannot be counted: it records every storage there."""

from collections.abc import Callable
from gc import collect  # at import, because a test may patch gc.collect
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters import objects, torch_private
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.conditions import of_operators, processor_name
from pytest_cka_memory.meters.ledger.dispatch import StorageTracker

_CPU = torch.device("cpu")


class StorageMeter(Meter):
    """Counts the bytes of all tensor storages on one device exactly, while started.

    Its peak counts tensors; temporaries that an operator allocates and frees are not counted.

    Args:
        reason: why the allocator is not counted instead; part of the notes.
        device: the CPU, or an accelerator with its index.
    """

    name = "exact accounting of tensor storages"
    notes: tuple[str, ...] = (
        "the peak counts tensors, not temporaries inside one operator (a lower bound)",
        "memory of DataLoader workers and temporaries of compiled code are not counted",
        "memory that several storages share (NumPy, DLPack) counts once for each of them",
        "lower bounds: what other threads allocate, mapped files, and batches that workers of a "
        "DataLoader have sent and no operator has used",
    )

    def __init__(self, reason: str = "chosen by hand", device: torch.device = _CPU) -> None:
        self.device = str(device)
        self.notes = (f"torch's allocator is not counted: {reason}", *self.notes)
        self.notes = (*self.notes, *torch_private.LOST)
        self.device_name = processor_name()
        self._tracker = StorageTracker(device)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *objects.notes()]}

    def conditions(self) -> dict[str, str]:
        return of_operators()

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._tracker.start(user)

    def stop_for(self, user: object) -> None:
        self._tracker.stop(user)

    def clean(self) -> int | None:
        # A collection and a search of all objects take most of a region's time.
        if not self._tracker.nothing_is_live():
            collect()
            self._tracker.record_unseen()
        return None

    def read(self) -> Reading:
        # Compiled code, DataLoader workers and buffers create tensors without an operator.
        self._tracker.record_unseen(young=True)
        ledger = self._tracker.ledger
        ledger.settle()
        return Reading(
            allocated_bytes=ledger.level, requested_bytes=ledger.level, peak_bytes=ledger.peak
        )

    def reset_peak(self) -> None:
        self._tracker.ledger.reset_peak()

    def mark(self) -> int:
        return self._tracker.ledger.mark()

    def retained_since(self, mark: int) -> int:
        return self._tracker.ledger.retained_since(mark)

    def count_collected(self, mark: int) -> Callable[[], int] | None:
        return self._tracker.ledger.count_collected(mark)

    def serial(self) -> int:
        return self._tracker.ledger.serial

    def allocations_since(self, mark: int) -> list[Allocation]:
        return self._tracker.ledger.allocations_since(mark)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._tracker.ledger.alive_at_peak()
