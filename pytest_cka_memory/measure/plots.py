"""The timeline of a region, drawn with matplotlib if it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.units import MB, format_with_unit, megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_timeline(
    record: RegionRecord, device: str, *, ax: Axes | None = None, limit_mb: object = None
) -> Axes:
    """Draw what was live over a region's batches, its peak and, if given, a limit on the peak.

    A region without batches has three points: its start, its peak and its end.

    Args:
        record: the figures of the region.
        device: for the label of the vertical axis.
        ax: where to draw; by default a new figure.
        limit_mb: a limit as the marker ``max_peak_mb`` takes it: above the level at the start.

    Raises:
        MissingPackageError: if matplotlib is not installed.
        SizeError: if `limit_mb` is not a valid size.
    """
    limit_bytes = None if limit_mb is None else record.start_bytes + megabytes(limit_mb)
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise MissingPackageError(
                "region.plot() needs matplotlib, which is not installed; install it with: "
                'pip install "pytest-cka-memory[plot]"'
            ) from error
        _, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    _draw_levels(record, ax)
    ax.axhline(
        record.peak_bytes / MB,
        ls=":",
        color="C1",
        label=f"peak {format_with_unit(record.peak_bytes)}",
    )
    if limit_bytes is not None:
        ax.axhline(
            limit_bytes / MB, ls="--", color="C3", label=f"limit {format_with_unit(limit_bytes)}"
        )
    ax.set_ylabel(f"live on {device} (MB)")
    ax.set_title(record.label or "the whole test")
    ax.legend()
    return ax


def _draw_levels(record: RegionRecord, ax: Any) -> None:
    samples = record.timeline
    if not samples:
        levels = [record.start_bytes / MB, record.peak_bytes / MB, record.end_bytes / MB]
        ax.plot(range(3), levels, marker="o", label="live")
        ax.set_xticks(range(3), ["start", "peak", "end"])
        return
    batches = [sample.batch for sample in samples]
    live = [record.start_bytes / MB, *(sample.allocated_bytes / MB for sample in samples)]
    ax.plot([0, *batches], live, marker=".", label="live after the batch")
    highest = [sample.peak_bytes / MB for sample in samples]
    ax.plot(batches, highest, marker=".", label="highest in the batch")
    ax.set_xlabel("batch")
