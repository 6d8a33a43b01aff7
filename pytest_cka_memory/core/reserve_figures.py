"""The figures of the allocator's reserve, and what it consisted of when it was too large."""

from dataclasses import dataclass
from typing import Annotated

from pytest_cka_memory.core.conditions import OF_SCRATCH
from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.reserve import DrawnSegment, ReservePart

UNEXPLAINED = (
    "the allocator reserved more than was in use at once, and why is not known: this device has no "
    "snapshot, or all was released before anything looked at it; free blocks may be too small for "
    "what was requested"
)
"""The advice on a reserve of which it is not known what it consists of."""


@dataclass(frozen=True)
class Refusal:
    """An allocation that a device had no memory for, in bytes."""

    requested_bytes: int
    free_bytes: int
    """What the driver could still give."""
    total_bytes: int
    """The memory of the device."""


@dataclass(frozen=True, kw_only=True)
class ReserveFigures:
    """Figures of a region that are None on a device without a reserve."""

    reserved_start_bytes: Annotated[
        int | None,
        Figure(
            "reserve at entry",
            "Held by the allocator at entry; null, like the other reserved figures, if the device "
            "has no reserve.",
        ),
    ] = None
    reserved_peak_bytes: Annotated[
        int | None,
        Figure(
            "reserve peak",
            "Most that the allocator held inside the region.",
            column="reserved",
            legend="most that the allocator held",
            position=7,
            importance=3,
            only_if_known=True,
            judged_as="reserved_increase_bytes",
        ),
    ] = None
    reserved_end_bytes: Annotated[
        int | None,
        Figure(
            "reserve at exit",
            "Held by the allocator when the code ended, before cleaning: unless the code emptied "
            "the cache, this includes blocks that are not in use.",
        ),
    ] = None
    reserved_after_cleaning_bytes: Annotated[
        int | None,
        Figure(
            "reserve after cleaning",
            "Held by the allocator after garbage, workspaces and the cache were freed at exit.",
        ),
    ] = None
    reserve: tuple[ReservePart, ...] = ()
    """What the reserve consisted of, by pool and stream, if a limit on it broke or the device ran
    out of memory."""
    reserve_moment: str = ""
    """When that was: ``at the end``, ``after batch 12``, ``before the cache
    was emptied``, ``after cleaning``, ``out of memory``."""
    reserve_kept_by: tuple[Holding, ...] = ()
    """The blocks in use that lay beside free memory, which could not be released for that reason;
    their ``keeps_bytes`` say how much, the most first."""
    reserve_segments: tuple[DrawnSegment, ...] = ()
    """A picture of the segments with the most of what cannot be released. Not in JSON reports."""
    refusal: Refusal | None = None
    """The allocation with which the device ran out of memory, if that has ended the region."""

    @property
    def reserved_increase_bytes(
        self,
    ) -> Annotated[
        int | None,
        Figure(
            "reserve increase",
            "reserved_peak_bytes minus reserved_start_bytes.",
            position=8,
            shown_as="reserved_peak_bytes",
            in_baselines=True,
            depends_on=OF_SCRATCH,
            explained_by="at_peak",
            advice=UNEXPLAINED,
            includes="peak_increase_bytes",
        ),
    ]:
        """Peak of the reserve above its level at entry; None if the device has no reserve."""
        if self.reserved_peak_bytes is None or self.reserved_start_bytes is None:
            return None
        return self.reserved_peak_bytes - self.reserved_start_bytes
