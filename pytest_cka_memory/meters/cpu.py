"""The CPU has no allocator counters to ask, so every tensor storage is booked, to the byte."""

import platform
from gc import collect  # now: a test may patch gc.collect, and garbage would look kept

import torch

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.ledger.dispatch import StorageTracker


class CpuMeter(Meter):
    """Exact accounting of CPU tensor storages while started.

    The peak is a tensor peak: what an operator allocates and frees inside itself is not seen.
    """

    device = "cpu"
    name = "exact accounting of tensor storages"
    notes: tuple[str, ...] = (
        "the peak counts tensors, not temporaries inside one operator (a lower bound);",
        "DataLoader worker processes and what compiled code frees inside itself are not seen",
    )

    def __init__(self) -> None:
        self.notes = (*self.notes, *torch_private.LOST)
        self.device_name = _cpu_name()
        self._watch = StorageTracker(torch.device("cpu"))

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()

    def clean(self) -> int | None:
        if not self._watch.nothing_lives():
            collect()
            self._watch.find_unseen()
        return None

    def read(self) -> Reading:
        # Compiled code, DataLoader workers and buffers bear tensors without an operator.
        self._watch.find_unseen(young=True)
        ledger = self._watch.ledger
        ledger.settle()
        return Reading(
            allocated_bytes=ledger.level, requested_bytes=ledger.level, peak_bytes=ledger.peak
        )

    def reset_peak(self) -> None:
        self._watch.ledger.reset_peak()

    def mark(self) -> int:
        return self._watch.ledger.serial

    def retained_since(self, mark: int) -> int:
        return self._watch.ledger.retained_since(mark)

    def serial(self) -> int:
        return self._watch.ledger.serial

    def allocations_since(self, mark: int) -> list[Allocation]:
        return self._watch.ledger.allocations_since(mark)

    def allocations_at_peak(self) -> list[Allocation]:
        return self._watch.ledger.alive_at_peak()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "cpu"
