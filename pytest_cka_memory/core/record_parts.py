"""Parts of the record: figures of the reserve and of batches; the names of all for editors."""

from dataclasses import dataclass
from typing import Annotated

from pytest_cka_memory.core.conditions import OF_SCRATCH
from pytest_cka_memory.core.figure_rows import (
    DRIVER,
    NO_POOLS,
    OUTSIDE_ADVICE,
    POOLS,
    AdditionalFigures,
    Figure,
)
from pytest_cka_memory.core.reserve import POOLS_ADVICE, DrawnSegment, ReservePart
from pytest_cka_memory.core.retention import Holding, Sample, growth_bytes_per_batch

UNEXPLAINED = (
    "to find the reason, call region.batch_done() while the reserved memory is high, on a device "
    "that supports memory snapshots; the allocator reserved more than was in use at once, perhaps "
    "because free blocks were too small for the requests"
)
"""The advice on a reserve if it is not known what it consists of."""


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
    """When that was: ``at the end``, ``after batch 12``, ``before the cache was emptied``,
    ``after cleaning``, ``out of memory``."""
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


OTHER_LEVELS = {
    "reserved_growth_bytes_per_batch": "reserved_bytes",
    "outside_growth_bytes_per_batch": "outside_bytes",
    "pools_growth_bytes_per_batch": "pools_bytes",
}
"""Figure of a growth that is not of what is in use -> the attribute of a sample that it judges."""

_SEE = (
    "pass --cka-memory-html=memory.html --cka-memory-timeline to see when each group of tensors "
    "was live"
)


@dataclass(frozen=True, kw_only=True)
class BatchFigures(AdditionalFigures):
    """Figures of a region's batches; None with too few of them."""

    timeline: tuple[Sample, ...] = ()
    """One sample per batch boundary."""

    @property
    def batches(
        self,
    ) -> Annotated[
        int,
        Figure(
            "batches",
            "Number of batch boundaries.",
            column="batches",
            position=1,
            importance=2,
            never_negative=True,
            of_device=False,
        ),
    ]:
        """Number of batch boundaries."""
        return len(self.timeline)

    @property
    def growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth per batch",
            "Rise of the highest level per batch; null with fewer than five full batches.",
            column="growth/b",
            legend="rise of the highest level per batch, from 5 full batches on",
            position=6,
            importance=5,
            in_baselines=True,
            explained_by="grown",
            advice=_SEE,
        ),
    ]:
        """Growth per batch after one batch of warm-up; see :mod:`.retention`."""
        # Most regions have no batches, and this is read several times for each.
        return growth_bytes_per_batch(self.timeline) if self.timeline else None

    @property
    def reserved_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth of the reserve per batch",
            "Rise of the highest reserve per batch; null with fewer than five full batches, and if "
            "the device has no reserve.",
            column="reserved/b",
            legend="rise of the reserve per batch, from 5 full batches on",
            position=8,
            importance=4,
            only_if_not_zero=True,
            advice=UNEXPLAINED,
        ),
    ]:
        """Growth of the reserve at batch boundaries, by the rule of ``growth_bytes_per_batch``."""
        if not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="reserved_bytes")

    @property
    def outside_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth outside torch's allocator per batch",
            "Rise of the highest level outside torch's allocator per batch; null with fewer than "
            "five full batches.",
            column="outside/b",
            legend="its growth per batch, from 5 full batches on",
            position=14,
            importance=4,
            only_if_not_zero=True,
            measured_by=DRIVER,
            unknown_because="this device has no driver that counts its memory",
            advice=OUTSIDE_ADVICE,
        ),
    ]:
        """Growth outside torch's allocator; see :mod:`.retention`."""
        if self.outside_start_bytes is None or not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="outside_bytes")

    @property
    def pools_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth of private pools per batch",
            "Rise of the highest reserve of private pools per batch; null with fewer than five "
            "full batches.",
            column="pools/b",
            legend="its growth per batch, from 5 full batches on",
            position=16,
            importance=4,
            only_if_not_zero=True,
            explained_by="pools",
            measured_by=POOLS,
            unknown_because=NO_POOLS,
            advice=POOLS_ADVICE,
        ),
    ]:
        """Growth of private pools; see :mod:`.retention`."""
        if self.pools_start_bytes is None or not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="pools_bytes")


class FigureNames:
    """Names and types of what a region reads from its record; it has no values of its own.

    For editors and type checkers. They follow from the registry, and a test compares both.
    """

    start_bytes: int
    start_mb: float
    end_bytes: int
    end_mb: float
    peak_bytes: int
    peak_mb: float
    peak_without_scratch_bytes: int | None
    peak_without_scratch_mb: float | None
    retained_bytes: int
    retained_mb: float
    reserved_start_bytes: int | None
    reserved_start_mb: float | None
    reserved_peak_bytes: int | None
    reserved_peak_mb: float | None
    reserved_end_bytes: int | None
    reserved_end_mb: float | None
    reserved_after_cleaning_bytes: int | None
    reserved_after_cleaning_mb: float | None
    garbage_at_peak_bytes: int | None
    garbage_at_peak_mb: float | None
    garbage_end_bytes: int | None
    garbage_end_mb: float | None
    one_time_bytes: int | None
    one_time_mb: float | None
    host_retained_bytes: int | None
    host_retained_mb: float | None
    peak_increase_bytes: int
    peak_increase_mb: float
    increase_without_scratch_bytes: int | None
    increase_without_scratch_mb: float | None
    net_bytes: int
    net_mb: float
    reserved_increase_bytes: int | None
    reserved_increase_mb: float | None
    growth_bytes_per_batch: float | None
    growth_mb_per_batch: float | None
    reserved_growth_bytes_per_batch: float | None
    reserved_growth_mb_per_batch: float | None
    outside_growth_bytes_per_batch: float | None
    outside_growth_mb_per_batch: float | None
    pools_growth_bytes_per_batch: float | None
    pools_growth_mb_per_batch: float | None
    completed: bool
    garbage_left: bool
    garbage_freed: bool
    cycle_bytes: int | None
    cycle_mb: float | None
    process_start_bytes: int | None
    process_start_mb: float | None
    process_peak_bytes: int | None
    process_peak_mb: float | None
    process_end_bytes: int | None
    process_end_mb: float | None
    process_torch_bytes: int | None
    process_torch_mb: float | None
    process_increase_bytes: int | None
    process_increase_mb: float | None
    driver_start_bytes: int | None
    driver_start_mb: float | None
    driver_peak_bytes: int | None
    driver_peak_mb: float | None
    driver_end_bytes: int | None
    driver_end_mb: float | None
    outside_start_bytes: int | None
    outside_start_mb: float | None
    outside_peak_bytes: int | None
    outside_peak_mb: float | None
    pools_start_bytes: int | None
    pools_start_mb: float | None
    pools_bytes: int | None
    pools_mb: float | None
    pools_reserved_bytes: int | None
    pools_reserved_mb: float | None
    pools_increase_bytes: int | None
    pools_increase_mb: float | None
    outside_increase_bytes: int | None
    outside_increase_mb: float | None
    process_growth_bytes_per_batch: float | None
    process_growth_mb_per_batch: float | None
