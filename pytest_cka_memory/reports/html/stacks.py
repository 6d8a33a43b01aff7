"""Bytes as one bar with parts: by owner, and a reserve by what it consists of."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.reserve import place_of
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.reports import html
from pytest_cka_memory.reports.failure import holdings_of
from pytest_cka_memory.units import counted, format_with_unit

_MOST_OWNERS = 6
_MOST_POOLS = 4
Row = tuple[float, str, str]
"""Bytes, text, and the style of a part; without a style it has a colour by its number."""


def owners(breach: Breach, record: RegionRecord) -> Iterator[str]:
    """Yield a figure of the bytes that a limit counts, as a bar with a part for each owner.

    Nothing is yielded if the limit could not be measured, or if nothing is known of the bytes.

    Args:
        breach: the broken limit.
        record: the region that broke it.
    """
    holdings = holdings_of(breach, record)
    is_peak = holdings is record.at_peak
    if not holdings or breach.measured_bytes is None:
        return
    # Limits on a peak allow an increase, but what is live at the peak includes the level at entry.
    start = record.start_bytes if is_peak else 0
    total = max(start + breach.measured_bytes, sum(holding.bytes for holding in holdings))
    limit = start + breach.allowed_bytes
    end = max(total, limit, 1)
    title = "Live at the peak" if is_peak else "Retained"
    on_entry = f", {format_with_unit(start)} of them in use before the region" if start else ""
    yield from _stack(
        f"{title}: {format_with_unit(total)}, by owner",
        list(_owner_rows(holdings, total)),
        end,
        "code",
        f"<b style='left:{100 * limit / end:.2f}%'></b>",
        f"<li><i class='limit'></i><span>{format_with_unit(limit)}</span>"
        f"<span>allowed by <code>{html.text(breach.limit)}</code>{on_entry}</span></li>",
    )


def _stack(
    title: str, rows: Sequence[Row], end: float, element: str, mark: str = "", last: str = ""
) -> Iterator[str]:
    """Yield a figure of rows as parts of one bar, with a legend.

    Args:
        title: as text.
        rows: the parts.
        end: bytes of the whole width.
        element: what has the texts in the legend, such as ``code``.
        mark: HTML above the bar.
        last: HTML after the legend.
    """
    yield f"<figure class='owners'><p class='unit'>{html.text(title)}</p>"
    yield "<div class='stack' aria-hidden='true'>"
    for number, (size, _, name) in enumerate(rows):
        yield f"<i class='{name or f'c{number}'}' style='width:{100 * size / end:.2f}%'></i>"
    yield f"{mark}</div><ul>"
    yield from _legend(rows, element)
    yield f"{last}</ul></figure>"


def _owner_rows(holdings: Sequence[Holding], total: float) -> Iterator[tuple[float, str, str]]:
    """Yield size, text and style of the largest owners, of the others together, and of the rest."""
    inside = [holding for holding in holdings if not holding.before_region]
    for holding in inside[:_MOST_OWNERS]:
        yield holding.bytes, owner(holding), ""
    others = inside[_MOST_OWNERS:]
    if others:
        yield sum(h.bytes for h in others), f"{counted(len(others), 'smaller group')}", "others"
    before = sum(holding.bytes for holding in holdings[len(inside) :])
    if before:
        yield before, "live before the region", "before"
    rest = total - sum(holding.bytes for holding in holdings)
    if rest > 0:
        yield rest, "not recorded", "others"


def _legend(rows: Sequence[Row], element: str) -> Iterator[str]:
    for number, (size, text, name) in enumerate(rows):
        yield (
            f"<li><i class='{name or f'c{number}'}'></i><span>{format_with_unit(size)}</span>"
            f"<{element}>{html.text(text)}</{element}></li>"
        )


def reserve(record: RegionRecord) -> Iterator[str]:
    """Yield a figure of a reserve that was explained: a bar for each pool and stream, with parts
    for what is in use and what is not. Nothing is yielded for a record without one.
    """
    parts = record.reserve[:_MOST_POOLS]
    if not parts:
        return
    end = max(part.reserved_bytes for part in parts)
    for part in parts:
        rows = [
            (part.in_use_bytes, "in use", "c0"),
            (part.rounding_bytes, "rounding", "c1"),
            (part.waiting_bytes, "freed, but perhaps still used by a stream", "c2"),
            (part.free_part_bytes, "free beside blocks in use: cannot be released", "c3"),
            (part.free_whole_bytes, "free in whole segments", "others"),
        ]
        rows = [row for row in rows if row[0]]
        where = f", {place_of(part)}" if len(record.reserve) > 1 else ""
        title = f"Reserve {record.reserve_moment}: {format_with_unit(part.reserved_bytes)}{where}"
        yield from _stack(title, rows, end, "span")
    if len(record.reserve) > len(parts):
        yield f"<p>And {counted(len(record.reserve) - len(parts), 'smaller pool')}.</p>"


def segments(record: RegionRecord) -> Iterator[str]:
    """Yield a figure of the segments that cannot be released, with a bar for each: what is in use
    by the line that allocated it. Nothing is yielded for a record without one.
    """
    drawn = record.reserve_segments
    if not drawn:
        return
    sizes: Counter[str] = Counter()
    for block in (block for segment in drawn for block in segment.blocks):
        sizes[block.line] += block.bytes
    largest = sizes.most_common(_MOST_OWNERS)
    styles = {line: f"c{number}" for number, (line, _) in enumerate(largest)}
    end = max(segment.bytes for segment in drawn)
    yield "<figure class='owners'><p class='unit'>Segments that blocks keep from being released</p>"
    for segment in drawn:
        share = 100 * segment.bytes / end
        yield f"<div class='stack' aria-hidden='true' style='width:{share:.2f}%'>"
        place = 0
        for block in segment.blocks:
            if block.offset > place:
                yield f"<s style='width:{100 * (block.offset - place) / segment.bytes:.3f}%'></s>"
            width = 100 * block.bytes / segment.bytes
            yield f"<i class='{styles.get(block.line, 'others')}' style='width:{width:.3f}%'></i>"
            place = block.offset + block.bytes
        yield "</div>"
    rows = [(size, line, styles[line]) for line, size in largest]
    others = sum(sizes.values()) - sum(size for size, *_ in rows)
    rows += [(others, "other lines", "others")] if others else []
    yield "<ul>"
    yield from _legend(rows, "code")
    yield "</ul></figure>"


def owner(holding: Holding) -> str:
    """Return line, expression, operator and modules of a group, or what else is known of it."""
    site = holding.created_at[0] if holding.created_at else holding.inside or "unknown code"
    code = f": {holding.code}" if holding.code else ""
    by = f" ({holding.operator})" if holding.operator else ""
    inside = f", in {holding.module}" if holding.module else ""
    return f"{site}{code}{by}{inside}"
