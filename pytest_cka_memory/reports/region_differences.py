"""What one region needed more than another, by the line and the module that allocated it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.reports.wrapping import wrapped
from pytest_cka_memory.units import counted, format_with_unit

_MOST_LINES = 6
_BEFORE = "allocated before the region"


def lines(figure: str, records: Sequence[RegionRecord], width: int) -> Iterator[str]:
    """Yield lines about the regions whose `figure` a failed assertion has compared.

    The region with the highest figure is compared with each other one, largest difference first.
    Nothing is yielded for a single region, or for a figure that no storages explain.

    Args:
        figure: its name.
        records: the regions, with what explains the figure.
        width: characters of a line.
    """
    field = FIGURES[figure].explained_by
    highest, *others = sorted(records, key=lambda record: -getattr(record, figure))
    for other in others if field else ():
        more = getattr(highest, figure) - getattr(other, figure)
        names = f"region {highest.label!r} has {_signed(more)} of {FIGURES[figure].noun}"
        yield from wrapped(f"{names} compared with region {other.label!r}:", width)
        counts_all = not FIGURES[figure].above_entry
        now, before = (_by_place(getattr(it, field), counts_all) for it in (highest, other))
        changes = Counter(now)
        changes.subtract(before)
        changed = [place for place in changes if changes[place]]
        changed.sort(key=lambda place: -abs(changes[place]))
        for place in changed[:_MOST_LINES]:
            sizes = f"{format_with_unit(before[place])} -> {format_with_unit(now[place])}"
            at = "" if place == _BEFORE else "at "
            yield from wrapped(f"{_signed(changes[place])} ({sizes}) {at}{place}", width, "  ")
        if len(changed) > _MOST_LINES:
            yield f"  and {counted(len(changed) - _MOST_LINES, 'smaller difference')}"


def _by_place(holdings: Sequence[Holding], counts_all: bool) -> Counter[str]:
    """Return the bytes of each place; without `counts_all`, only what the region has allocated."""
    sizes: Counter[str] = Counter()
    for holding in holdings:
        if counts_all or not holding.before_region:
            sizes[_place_of(holding)] += holding.bytes
    return sizes


def _place_of(holding: Holding) -> str:
    if holding.before_region:
        return _BEFORE
    module = f", in {holding.module}" if holding.module else ""
    return f"{holding.made_at or holding.inside or 'unknown code'}{module}"


def _signed(size: float) -> str:
    return f"{'+' if size > 0 else ''}{format_with_unit(size)}"
