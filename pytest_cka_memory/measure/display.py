"""Regions, sweeps and probes as one line of text, and as a table in notebooks."""

from collections.abc import Iterable, Sequence
from html import escape

from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.figures import RegionRecord, shown_columns
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.units import counted, format_with_unit


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
