"""The meter for a device whose allocator cannot be counted: it records every storage there."""

import sys
import threading
from collections.abc import Callable
from gc import collect  # at import, because a test may patch gc.collect
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.conditions import of_operators, processor_name
from pytest_cka_memory.meters.storages import live_objects
from pytest_cka_memory.meters.storages.dispatch import StorageTracker

_CPU = torch.device("cpu")
_OLDER_THREADS = (
    "threads were alive before regions began: tensors that they made and freed are not counted, "
    "unless a thread pool ran a function that it was given in the region"
)


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
    )

    def __init__(self, reason: str = "chosen by hand", device: torch.device = _CPU) -> None:
        self.device = str(device)
        self.notes = (f"torch's allocator is not counted: {reason}", *self.notes)
        self.notes = (*self.notes, *torch_private.LOST)
        self.device_name = processor_name()
        self._tracker = StorageTracker(device)
        self._older_threads = False
        """Whether a region began while another thread was alive."""

    def facts(self) -> dict[str, Any]:
        threads = [_OLDER_THREADS] if self._older_threads else []
        return {**super().facts(), "notes": [*self.notes, *threads, *live_objects.notes()]}

    def conditions(self) -> dict[str, str]:
        return of_operators()

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._older_threads |= _are_other_threads_alive()
        self._tracker.start(user)

    def stop_for(self, user: object) -> None:
        self._tracker.stop(user)

    def clean(self) -> int | None:
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


def _are_other_threads_alive() -> bool:
    """Whether there are threads whose work is not counted: not idle ones of an executor."""
    if threading.active_count() == 1:
        return False
    executors = sys.modules.get("concurrent.futures.thread")
    counted = {threading.current_thread(), *getattr(executors, "_threads_queues", ())}
    return not counted.issuperset(threading.enumerate())
