"""How much of a figure the storages explain that are shown with it."""

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.units import format_with_unit

_FREED = (
    "the rest was freed before the region ended: measure inside the function that has the loop, "
    "or see the timeline"
)
_NOT_LIVE = (
    "it was freed before the region ended: measure inside the function that has the loop, or see "
    "the timeline"
)
_NOT_HELD = "no reference of a Python object to the rest was found"
_NOT_FOUND = "what keeps the rest was not found"
_NOT_IN_USE = "no tensor had the rest at the peak: the allocator keeps it for later"
_NO_PLACE = "where the rest was allocated is not known"


def sentence(record: RegionRecord, figure: str) -> str:
    """Return which part of a figure is explained: ``explains 4.80 of 4.80 MB per batch``.

    Args:
        record: the region.
        figure: name of a figure that is too high.

    Returns:
        The sentence; empty for a figure that no storages explain.
    """
    row = FIGURES.get(figure)
    total = None if row is None else getattr(record, row.name)
    if row is None or not row.explained_by or not total or total < 0:
        return ""
    field = row.explained_by
    holdings: tuple[Holding, ...] = getattr(record, field)
    if not holdings and field != "grown":
        return ""
    if holdings and field == "grown" and all(it.bytes_per_batch is None for it in holdings):
        return ""  # a report of an earlier version
    if field == "at_peak" and not figure.startswith("reserved"):
        not_listed = max(0, record.peak_bytes - sum(holding.bytes for holding in holdings))
        known = total - min(total, not_listed + sum(map(_bytes_without_place, holdings)))
    else:
        known = min(total, sum(_explained_bytes(holding, field) for holding in holdings))
    per_batch = " per batch" if field == "grown" else ""
    if not holdings:
        return f"nothing that is live explains {format_with_unit(total)}{per_batch}: {_NOT_LIVE}"
    text = f"explains {_of(known, total)}{per_batch}"
    if _is_all(known, total):
        return text
    if figure.startswith("reserved"):
        return f"{text}; {_NOT_IN_USE}"
    return f"{text}; {_why(record, field, total - known)}"


def _explained_bytes(holding: Holding, field: str) -> float:
    """Return the bytes of one group as far as they are explained."""
    if field == "grown":
        return holding.bytes_per_batch or 0.0
    if field == "at_peak":
        return 0 if holding.before_region else holding.bytes - _bytes_without_place(holding)
    return holding.bytes if holding.held_by is not None else 0


def _bytes_without_place(holding: Holding) -> int:
    """Return the bytes of a group at the peak if it is not known where they were allocated."""
    is_known = holding.before_region or holding.inside is not None or holding.created_at
    return 0 if is_known else holding.bytes


def _why(record: RegionRecord, field: str, rest: float) -> str:
    """Return why the rest is not explained."""
    if field == "at_peak":
        return _NO_PLACE
    if field != "grown":
        return _NOT_HELD
    is_live = record.retained_bytes >= rest * len(record.timeline) / 2
    return _NOT_FOUND if is_live else _FREED


def _of(part: float, whole: float) -> str:
    """Return two sizes, with the unit once if both have the same."""
    small, large = format_with_unit(part), format_with_unit(whole)
    number, _, unit = small.partition(" ")
    return f"{number} of {large}" if unit == large.partition(" ")[2] else f"{small} of {large}"


def _is_all(part: float, whole: float) -> bool:
    return part >= 0.995 * whole
