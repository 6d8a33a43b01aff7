"""What every meter can do: the one seam between a device and the rest of the plugin."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, UnownedBlock


@dataclass(frozen=True)
class Reading:
    """One look at a device's memory, in bytes."""

    allocated_bytes: int
    """Live now, as the allocator counts it (on a GPU: blocks, rounded up)."""
    requested_bytes: int
    """Live now, as tensors asked for it. Leaks are judged on this: blocks come in whole sizes."""
    peak_bytes: int
    """Highest ``allocated_bytes`` since the last ``reset_peak``."""
    reserved_bytes: int | None = None
    """Held by the allocator, in use or not; None where a device has no reserve."""
    peak_reserved_bytes: int | None = None
    """Highest ``reserved_bytes`` since the last ``reset_peak``."""


class Meter(ABC):
    """A device's memory counters. Bracket every use with :meth:`start` and :meth:`stop`; they nest.

    A meter knows nothing of regions, tests or limits, so a new device is one new subclass.
    """

    device: str
    """As ``torch.device`` writes it, ``cpu``, ``cuda:0``; predictions, as the option names it."""
    device_name: str
    """What the device is, e.g. ``NVIDIA A100-SXM4-80GB``."""
    name: str
    """What does the counting, in a few words."""
    notes: tuple[str, ...] = ()
    """What its figures can and cannot see: printed under every table."""

    @property
    def torch_device(self) -> str:
        """Where tests put models, as ``torch.device`` takes it; `device` but for predictions."""
        return self.device

    @abstractmethod
    def start(self) -> None:
        """Begin to count."""

    @abstractmethod
    def stop(self) -> None:
        """End what the matching :meth:`start` began."""

    @abstractmethod
    def clean(self) -> int | None:
        """Let go of everything nobody holds: collect garbage, drop library workspaces and caches.

        Returns the bytes of library workspaces dropped, which only a first run allocates; None
        where the device does not let them be told apart.
        """

    @abstractmethod
    def read(self) -> Reading:
        """Read all counters now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start both peaks anew from the present level."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a token for now; it must hold no tensor alive."""

    @abstractmethod
    def retained_since(self, mark: Any) -> int:
        """Bytes born after `mark` was taken and alive now."""

    def record_history(self) -> bool:
        """Let the allocator note where each block comes from, within bounds; False if it cannot."""
        return False

    def dump_history(self, path: Path) -> bool:
        """Write those notes for PyTorch's memory viewer; False where the device has none."""
        return False

    def serial(self) -> int:
        """How many allocations there have been; 0 where they are not counted."""
        return 0

    def allocations_since(self, mark: Any) -> list[Allocation]:
        """What :meth:`retained_since` counts, one by one, as far as it can be told."""
        return []

    def unowned_blocks_since(self, mark: Any) -> list[UnownedBlock]:
        """Blocks since `mark` that no tensor owns; only while :meth:`record_history` is on."""
        return []

    def allocations_at_peak(self) -> list[Allocation]:
        """What was alive at the highest level since ``reset_peak``, as far as it can be told."""
        return []
