"""The record of a region, from its readings."""

from collections.abc import Sequence

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.measure.region_stack import ClosedRegion
from pytest_cka_memory.meters.base import Reading


def record_at(
    label: str,
    start: Reading,
    end: Reading,
    timeline: Sequence[Sample],
    *,
    retained_bytes: int = 0,
    one_time_bytes: int | None = None,
    garbage_left: bool = False,
    garbage_at_peak_bytes: int | None = None,
    garbage_end_bytes: int | None = None,
    garbage_freed: bool = False,
    host_retained_bytes: int | None = None,
    reserved_end_bytes: int | None = None,
) -> RegionRecord:
    """Return the record of a region as if it ended at `end`; the rest is known after cleaning."""
    return RegionRecord(
        label=label,
        completed=True,
        start_bytes=start.allocated_bytes,
        end_bytes=end.allocated_bytes,
        peak_bytes=end.peak_bytes,
        peak_without_scratch_bytes=end.peak_without_scratch_bytes,
        retained_bytes=retained_bytes,
        one_time_bytes=one_time_bytes,
        garbage_left=garbage_left,
        garbage_at_peak_bytes=garbage_at_peak_bytes,
        garbage_end_bytes=garbage_end_bytes,
        garbage_freed=garbage_freed,
        host_retained_bytes=host_retained_bytes,
        reserved_start_bytes=start.reserved_bytes,
        reserved_peak_bytes=end.peak_reserved_bytes,
        reserved_end_bytes=reserved_end_bytes,
        reserved_after_cleaning_bytes=end.reserved_bytes,
        timeline=tuple(timeline),
    )


def record_of(
    label: str,
    start: Reading,
    closed: ClosedRegion,
    timeline: Sequence[Sample],
    *,
    workspace_bytes: int | None,
    first_run_retained_bytes: int | None,
    garbage_at_peak_bytes: int | None,
    garbage_freed: bool,
) -> RegionRecord:
    """Return the record of a region that has ended.

    Args:
        label: its label.
        start: the levels when it began.
        closed: its figures after cleaning.
        timeline: its samples.
        workspace_bytes: bytes of library workspaces that cleaning has dropped; None if unknown.
        first_run_retained_bytes: what an earlier run of the same code has retained, if there was
            one; what this run retained less is one-time memory.
        garbage_at_peak_bytes: how much of the peak was garbage; None if that is not known.
        garbage_freed: whether garbage was freed at batch boundaries.
    """
    one_time_bytes = workspace_bytes
    if first_run_retained_bytes is not None:
        kept_once = max(0, first_run_retained_bytes - closed.retained_bytes)
        one_time_bytes = (one_time_bytes or 0) + kept_once
    return record_at(
        label,
        start,
        closed.end,
        timeline,
        retained_bytes=closed.retained_bytes,
        one_time_bytes=one_time_bytes,
        garbage_left=closed.garbage_left,
        garbage_at_peak_bytes=garbage_at_peak_bytes,
        garbage_end_bytes=closed.garbage_bytes,
        garbage_freed=garbage_freed,
        host_retained_bytes=closed.host_retained_bytes,
        reserved_end_bytes=closed.reserved_bytes,
    )
