"""Regions as lines, tables and plots: what notebooks and consoles show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import RegionRecord, shown_columns
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.units import MB, counted, format_with_unit, megabytes

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
                "region.plot() needs matplotlib, which is not installed; run pip install "
                "'pytest-cka-memory[plot]'"
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


def summary(record: RegionRecord) -> str:
    """Return the main figures of a region that has ended, in one line."""
    if not record.completed:
        return "ended by an exception"
    parts = [
        f"peak increase {format_with_unit(record.peak_increase_bytes)}",
        f"retained {format_with_unit(record.retained_bytes)}",
    ]
    if record.host_retained_bytes:
        parts.append(f"on the host {format_with_unit(record.host_retained_bytes)}")
    if record.growth_bytes_per_batch is not None:
        parts.append(f"growth per batch {format_with_unit(record.growth_bytes_per_batch)}")
    parts += [counted(record.batches, "batch")] if record.batches else []
    return ", ".join(parts)


def line_of_region(label: str, record: RegionRecord | None) -> str:
    """Return a region in one line; `record` is None while it is open."""
    return f"<Region {label!r}{', open' if record is None else f': {summary(record)}'}>"


def html_of_region(label: str, record: RegionRecord | None, device: str) -> str:
    """Return a region as a table; as a line while it is open, when `record` is None."""
    if record is None:
        return f"<p>{escape(line_of_region(label, record))}</p>"
    return table_of_regions([record], device)


def table_of_regions(records: Sequence[RegionRecord], caption: str) -> str:
    """Return an HTML table with one row for each region, and the columns of the terminal's."""
    columns = shown_columns(records)
    rows = [
        [record.label or "the whole test", *(_cell(record, column) for column in columns)]
        for record in records
    ]
    return table(["region", *(column.column for column in columns)], rows, caption)


def _cell(record: RegionRecord, column: Figure) -> str:
    value = column.shown_value(record)
    return str(value) if column.name == "batches" else format_with_unit(value)


class Holdings(tuple[Holding, ...]):
    """Groups of storages, which notebooks show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [
            [
                format_with_unit(holding.bytes),
                str(holding.count or "-"),
                f"{holding.dtype} {holding.shape}" if holding.shape is not None else "-",
                holding.made_at or "-",
                holding.held_by or "-",
                holding.hint or "-",
            ]
            for holding in self
        ]
        head = ("size", "tensors", "largest", "made at", "held by", "what to do")
        return table(head, rows, f"retained: {counted(len(self), 'group')}")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str) -> str:
    """Return an HTML table of texts, which are escaped."""
    body = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{_cells(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _cells(texts: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
