"""What an update of a baseline file changes: every figure that rose or fell."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pytest_cka_memory.baseline.file import BaselineKey, Figures
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.units import format_with_unit

_MOST_SHOWN = 30


class BaselineChange(NamedTuple):
    """A figure whose baseline has changed."""

    key: BaselineKey
    figure: str
    old_bytes: int | None
    """None if the figure was not determined, which happens to growth only."""
    new_bytes: int | None

    @property
    def rise_bytes(self) -> int:
        """The rise; negative if the figure fell."""
        return (self.new_bytes or 0) - (self.old_bytes or 0)


def changes(
    old: Mapping[BaselineKey, Figures], new: Mapping[BaselineKey, Figures]
) -> tuple[BaselineChange, ...]:
    """Return every figure whose value in `new` differs from that in `old`, largest rise first."""
    found = [
        BaselineChange(key, figure, old[key].get(figure), figures.get(figure))
        for key, figures in new.items()
        if key in old
        for figure, row in COMPARED.items()
        if old[key].get(figure) != figures.get(figure)
        # What stands in the place of a figure that has changed as well says nothing new.
        if not row.in_place_of or old[key].get(row.in_place_of) == figures.get(row.in_place_of)
    ]
    return tuple(sorted(found, key=lambda change: -change.rise_bytes))


def as_lines(found: Sequence[BaselineChange]) -> list[str]:
    """Return a line per change, for the terminal; the middle is left out if there are many."""
    if len(found) <= _MOST_SHOWN:
        return _table(found)
    half = _MOST_SHOWN // 2  # the largest rises and the largest falls
    lines = _table([*found[:half], *found[-half:]])
    return [*lines[:half], f"  ... and {len(found) - 2 * half} more", *lines[half:]]


def _table(found: Sequence[BaselineChange]) -> list[str]:
    if not found:
        return []
    from tabulate import tabulate  # takes 20 ms, so only if there is a change

    rows = [list(_cells(change)) for change in found]
    align = ("left", "left", "right", "left", "right", "right", "left")
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
    return [f"  {line}".rstrip() for line in table.splitlines()]


def _cells(change: BaselineChange) -> Iterator[str]:
    old, new = change.old_bytes, change.new_bytes
    yield one_line(f"{change.key.nodeid} {change.key.label}".rstrip())
    yield COMPARED[change.figure].noun
    sizes = [format_with_unit(old), format_with_unit(new)]
    if sizes[0] == sizes[1]:  # the change is too small for two decimals
        sizes = [f"{old:,} B", f"{new:,} B"]
    yield from (sizes[0], "->", sizes[1])
    if old is None or new is None:
        yield from ("", "known now" if old is None else "not known now")
    else:
        from pytest_cka_memory.reports.tables import share_of_change  # few sessions need it

        share = share_of_change(old, new) if old else ""
        yield from (share, "up" if new > old else "down")
