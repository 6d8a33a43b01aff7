"""The counters that an accelerator's allocator keeps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters import torch_private


class Levels(NamedTuple):
    """What is live and reserved now, in bytes."""

    allocated: int
    """Of whole blocks."""
    requested: int
    """Of what was asked for; that of blocks if the allocator does not count it."""
    reserved: int


class AllocatorStats:
    """Reads the counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested: Callable[[int], Mapping[str, Any]] | None = None

    def all(self) -> dict[str, int]:
        """Return all counters, as ``torch.accelerator.memory_stats`` does."""
        return torch.accelerator.memory_stats(self._device)

    def levels(self) -> Levels:
        """Return the levels now."""
        return self._flat_levels() if self._nested is None else self._nested_levels(self._nested)

    def read_fast(self) -> None:
        """From now on read levels in a tenth of the time, if this torch version allows it."""
        self._nested = torch_private.device_stats()

    def _flat_levels(self) -> Levels:
        stats = self.all()
        allocated = stats["allocated_bytes.all.current"]
        counts_requested = stats.get("requested_bytes.all.allocated")
        requested = stats["requested_bytes.all.current"] if counts_requested else allocated
        return Levels(allocated, requested, stats["reserved_bytes.all.current"])

    def _nested_levels(self, nested: Callable[[int], Mapping[str, Any]]) -> Levels:
        """Return the levels without sorting a hundred other counters."""
        stats = nested(self._device.index)
        allocated: int = stats["allocated_bytes"]["all"]["current"]
        requested = stats["requested_bytes"]["all"]
        return Levels(
            allocated,
            requested["current"] if requested["allocated"] else allocated,
            stats["reserved_bytes"]["all"]["current"],
        )
