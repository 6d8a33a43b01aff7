"""An allocator of an accelerator whose figures a test sets, behind the functions of torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

BLOCK = 512


class Allocator:
    """A stand-in for the allocator behind ``torch.accelerator``.

    It rounds sizes up to blocks of 512 bytes, and has reserved memory and one workspace.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.workspace = 0
        self.freed_by_sync = 0
        self.counts_requested = True
        self.has_peaks = True
        self.reserved = 0
        self.peak = self.peak_reserved = 0
        self.trial = 0
        """Of the tensor by which a new meter finds out whether anything is counted."""

    def allocate(self, size: int) -> None:
        self.sizes.append(size)
        self._rise()

    def free(self, size: int) -> None:
        self.sizes.remove(size)

    def use_workspace(self, size: int) -> None:
        self.workspace = size
        self._rise()

    def level(self) -> int:
        return sum(-(-size // BLOCK) * BLOCK for size in [*self.sizes, self.workspace])

    def stats(self, device: torch.device) -> dict[str, int]:
        stats = {
            "allocated_bytes.all.current": self.level(),
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "requested_bytes.all.current": sum(self.sizes) + self.workspace,
            "requested_bytes.all.allocated": 1,
        }
        if self.has_peaks:
            stats["allocated_bytes.all.peak"] = max(self.peak, self.trial)
            self.trial = 0
        if not self.counts_requested:
            stats["requested_bytes.all.current"] = stats["requested_bytes.all.allocated"] = 0
        return stats

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")
        if self.freed_by_sync:
            self.free(self.freed_by_sync)
            self.freed_by_sync = 0

    def drop_workspaces(self) -> None:
        self.calls.append("drop workspaces")
        self.workspace = 0

    def empty_cache(self) -> None:
        self.calls.append("empty cache")
        self.reserved = self.level()

    def reset_peaks(self, device: torch.device) -> None:
        self.peak, self.peak_reserved = self.level(), self.reserved

    def _rise(self) -> None:
        self.peak = max(self.peak, self.level())
        self.reserved = max(self.reserved, self.level())
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def install(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Replace torch's functions for ``cuda`` by a scripted allocator."""
    made = Allocator()
    for name, function in {
        "memory_stats": made.stats,
        "synchronize": made.synchronize,
        "empty_cache": made.empty_cache,
        "reset_peak_memory_stats": made.reset_peaks,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    empty = torch.empty

    def counted_empty(*size: int, device: object = None, **options: Any) -> torch.Tensor:
        made.trial = BLOCK
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", counted_empty)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", made.drop_workspaces, raising=False
    )
    cuda = SimpleNamespace(get_device_name=lambda index: f"Scripted {index}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    return made
