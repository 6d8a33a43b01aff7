"""How a meter for accelerators counts: natively, in the allocator, or in a ledger of storages."""

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytest_cka_memory.meters.accelerator.stats import Levels
from pytest_cka_memory.meters.base import AllocationCounts


class Counting(AllocationCounts):
    """What one device's allocator does not count itself, while any object uses it."""

    notes: tuple[str, ...] = ()
    """What its figures leave out."""

    def seen_notes(self) -> tuple[str, ...]:
        """Return notes about what was seen so far, which the figures leave out."""
        return ()

    def start_for(self, user: object) -> None:
        """Start counting until `user` stops it or is freed."""

    def stop_for(self, user: object) -> None:
        """Undo the matching :meth:`start_for`, if there was one."""

    @abstractmethod
    def levels(self) -> Levels:
        """Return the allocator's levels, in which the reserve may be older than the rest."""

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

    def note_empty_cache(self) -> None:
        """Take note that the cache was emptied, which lowers the reserve."""

    def between_regions(self, *, objects_dropped: bool, since: int) -> None:
        """As :meth:`~pytest_cka_memory.meters.base.Meter.between_regions`."""

    @abstractmethod
    def peaks(self) -> tuple[int, int]:
        """Return the highest level and reserve since :meth:`reset_peak`, or since a region."""
