"""What reports say of garbage in reference cycles that the collector had not freed."""

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.growth import garbage_growth_bytes_per_batch
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.units import format_exact, format_with_unit

_RAISED = {
    *(name for name, row in FIGURES.items() if row.explained_by == "at_peak"),
    *("process_increase_bytes", "process_growth_bytes_per_batch"),
}
"""Figures that garbage raises."""
_LEAST_SHARE = 0.01
"""Less than this share of the peak increase would not explain a figure."""


def part_of_message(record: RegionRecord, figure: str) -> str:
    """Return how much of a figure was garbage, as the end of a sentence; empty if that is little.

    At batch boundaries that is known. Without them it is only known how much was garbage at the
    end: it may have been in use at the peak.
    """
    if figure == "growth_bytes_per_batch":
        left_bytes = record.timeline[-1].garbage_bytes if record.timeline else 0
        if not left_bytes:
            return ""
        left = format_with_unit(left_bytes)
        return f"; {left} of garbage in reference cycles at the last batch is not growth"
    if figure not in _RAISED:
        return ""
    sentence = _at_the_peak(record)
    if sentence:
        return f"; {sentence}: {_repair(record)} would free it"
    if record.garbage_freed:
        return (
            "; garbage in reference cycles was freed at batch boundaries to find growth, because "
            "its memory cannot all be counted: without the plugin the peak is higher"
        )
    return ""


def note_on_peak(record: RegionRecord) -> str:
    """Return a sentence about garbage at the peak, for tables; empty if there was little."""
    sentence = _at_the_peak(record)
    return sentence and f"{sentence}, which the collector had not freed"


def bytes_at_peak(record: RegionRecord) -> int:
    """Return how much of the peak is taken for garbage."""
    return (record.garbage_at_peak_bytes if record.timeline else record.garbage_end_bytes) or 0


def note_on_growth(record: RegionRecord, warmup: int, tolerance_bytes: int) -> str:
    """Return what a limit on growth says of garbage that rises with the batches; else nothing."""
    rise = garbage_growth_bytes_per_batch(record.timeline, warmup)
    if rise <= tolerance_bytes or record.timeline[-1].garbage_bytes < _least_bytes(record):
        return ""
    last = format_with_unit(record.timeline[-1].garbage_bytes)
    named = _described(record.garbage[0]) if record.garbage else ""
    return (
        f"garbage in reference cycles rises by {format_exact(rise)} per batch, to {last}, until "
        f"Python's collector runs, and is not judged{named}; what to do: {_repair(record)} frees "
        "it; the marker no_cycles fails a test that leaves any"
    )


def _at_the_peak(record: RegionRecord) -> str:
    found_bytes = bytes_at_peak(record)
    if found_bytes < _least_bytes(record):
        return ""
    found = format_with_unit(found_bytes)
    if not record.timeline:
        return f"{found} was garbage in reference cycles when the code ended"
    peak = format_with_unit(record.peak_bytes)
    return f"{found} of {peak} at the peak was garbage in reference cycles"


def _least_bytes(record: RegionRecord) -> float:
    """Return how much garbage is worth a sentence."""
    return max(1, _LEAST_SHARE * record.peak_increase_bytes)


def _repair(record: RegionRecord) -> str:
    made = record.garbage[0].created_at if record.garbage else ()
    place = f" of what is made at {made[0].partition(' in ')[0]}" if made else ""
    return f"gc.collect() in the loop, or breaking the cycle{place},"


def _described(holding: Holding) -> str:
    held = f": {holding.held_by}" if holding.held_by else ""
    made = f", made at {holding.made_at}" if holding.created_at else ""
    return f"{held}{made}"
