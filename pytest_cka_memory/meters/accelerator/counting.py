"""How a meter for accelerators counts: natively, in the allocator, or in a ledger of storages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters.base import Peaks


class Counting(ABC):
    """What one device's allocator does not count itself, while any object uses it."""

    notes: tuple[str, ...] = ()
    """What its figures leave out."""

    def seen_notes(self) -> tuple[str, ...]:
        """Return notes about what was seen so far, which the figures leave out."""
        return ()

    def start_for(self, user: object) -> None:  # noqa: B027  # nothing to do where all is counted
        """Start counting until `user` stops it or is freed."""

    def stop_for(self, user: object) -> None:  # noqa: B027
        """Undo the matching :meth:`start_for`, if there was one."""

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
        """Return a context in which what is freed is a workspace of a library."""
        return nullcontext()

    def note_empty_cache(self) -> None:  # noqa: B027  # most have nothing to do
        """Take note that the cache was emptied, which lowers the reserve."""

    def between_regions(self, *, objects_dropped: bool, since: int) -> None:  # noqa: B027
        """As :meth:`~pytest_cka_memory.meters.base.Meter.between_regions`."""

    @abstractmethod
    def peaks(self) -> tuple[int, int]:
        """Return the highest level and reserve since :meth:`reset_peak`, or since a region."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Set both peaks to the current level."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a token for the current moment."""

    def open_peaks(self) -> Peaks | None:
        """Return peaks for a region alone; None if the device has one counter for all regions."""
        return None

    @abstractmethod
    def retained_since(self, mark: Any) -> int:
        """Return the requested bytes of blocks that were allocated after `mark` and are live."""

    def host_retained_since(self, mark: Any) -> int | None:
        """As :meth:`~pytest_cka_memory.meters.base.Meter.host_retained_since`."""
        return None

    def host_allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """As :meth:`~pytest_cka_memory.meters.base.Meter.host_allocations_since`."""
        return []

    @abstractmethod
    def serial(self) -> int:
        """Return the number of allocations so far."""

    @abstractmethod
    def allocations_since(self, mark: Any) -> Sequence[Allocation]:
        """Return the allocations that :meth:`retained_since` counts, as far as they are known."""

    def allocations_at_peak(self) -> list[AllocationGroup]:
        """Return what was live at the peak; unused if regions have peaks of their own."""
        return []
