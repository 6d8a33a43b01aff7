"""What reports say of a figure: how much was garbage or is explained, and kinds of memory."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.retention import (
    Holding,
    garbage_growth_bytes_per_batch,
    growth_bytes_per_batch,
    highest_growth_bytes_per_batch,
    judged_growth,
)
from pytest_cka_memory.units import counted, format_exact, format_with_unit

_RAISED = {
    *(name for name, row in FIGURES.items() if row.explained_by == "at_peak"),
    *("process_increase_bytes", "process_growth_bytes_per_batch"),
}
"""Figures that garbage raises."""
_LEAST_SHARE = 0.01
"""Less than this share of the peak increase would not explain a figure."""
_MUCH = 0.1
"""Where groups are that have together this share or more is said, though none is shown."""
_MOST_FILES = 2


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
        return (
            f"; in addition, {left} was garbage in reference cycles at the last batch, and is not "
            "counted as growth"
        )
    if figure not in _RAISED:
        return ""
    sentence = _at_the_peak(record)
    if sentence:
        return f"; {sentence}; to free it, {_repair(record)}"
    if record.garbage_freed:
        return (
            "; without the plugin the peak is higher, because the plugin freed garbage in "
            "reference cycles at batch boundaries to find growth (not all memory of this "
            "garbage can be counted)"
        )
    return ""


def note_on_peak(record: RegionRecord) -> str:
    """Return a sentence about garbage at the peak, for tables; empty if there was little."""
    sentence = _at_the_peak(record)
    return sentence and f"{sentence}, which the collector had not freed"


def bytes_at_peak(record: RegionRecord) -> int:
    """Return how much of the peak counts as garbage."""
    return (record.garbage_at_peak_bytes if record.timeline else record.garbage_end_bytes) or 0


def note_on_growth(record: RegionRecord, warmup: int, tolerance_bytes: int) -> str:
    """Return what a limit on growth says of garbage that rises with the batches; else nothing."""
    rise = garbage_growth_bytes_per_batch(record.timeline, warmup)
    if rise <= tolerance_bytes or record.timeline[-1].garbage_bytes < _least_bytes(record):
        return ""
    last = format_with_unit(record.timeline[-1].garbage_bytes)
    named = _described(record.garbage[0]) if record.garbage else ""
    return (
        f"garbage in reference cycles rises by {format_exact(rise)} per batch, to {last}, "
        f"until Python's collector runs, and is not judged{named}; what to do: "
        f"{_repair(record)}; the marker no_cycles fails a test that leaves any garbage"
    )


def note_on_older(record: RegionRecord, warmup: int, tolerance_bytes: int) -> str:
    """Return what a limit on growth says if it may be hidden by what became garbage unseen."""
    growth = growth_bytes_per_batch(record.timeline, warmup) or 0.0
    highest = highest_growth_bytes_per_batch(record.timeline, warmup) or 0.0
    if growth > tolerance_bytes or highest <= tolerance_bytes:
        return ""
    batches = [sample.batch for sample in record.timeline if sample.uncertain_bytes]
    is_one = len(batches) == 1
    at = f"batch {batches[0]}" if is_one else f"batches {batches[0]} to {batches[-1]}"
    return (
        f"growth may be as high as {format_exact(highest)} per batch, because it is not known "
        f"whether some tensors were still in use or already garbage at the end of {at}; what to "
        "do: create the objects that reference these tensors inside the region; then it is known "
        "when they become garbage"
    )


_LEAST_RISE = 0.05
"""A level that rises by less than this share of it in the second half of the batches is not noted:
the allocator takes segments of 2 and 20 MB, and a step at any time is usual."""


def note_on_reserve(record: RegionRecord, warmup: int = 1) -> str:
    """Return a sentence on a reserve that rises while what is in use does not; else nothing."""
    sentence = _rise_of(record, warmup, "reserved", "the allocator's reserve")
    # If what is in use rises, that is the cause.
    in_use = growth_bytes_per_batch(record.timeline, warmup) if sentence else None
    return "" if (in_use or 0) > 0 else sentence


def note_on_outside(record: RegionRecord, warmup: int = 1) -> str:
    """Return a sentence on a rise outside torch's allocator; else nothing."""
    return _rise_of(record, warmup, "outside", "the card's memory outside torch's allocator")


def _rise_of(record: RegionRecord, warmup: int, of: str, words: str) -> str:
    level = f"{of}_bytes"
    growth = judged_growth(record.timeline, warmup, level)
    if growth is None or growth.bytes_per_batch <= 0:
        return ""
    last_bytes = getattr(growth.last, level)
    if last_bytes - getattr(growth.reference, level) < _LEAST_RISE * last_bytes:
        return ""
    in_use = ", while the memory in use does not rise" if of == "reserved" else ""
    return (
        f"{words} rises by {format_with_unit(growth.bytes_per_batch)} per batch, to "
        f"{format_with_unit(last_bytes)}{in_use}, and is not judged; what to do: write "
        f"flat_per_batch(of={of!r}) to judge it"
    )


def _at_the_peak(record: RegionRecord) -> str:
    found_bytes = bytes_at_peak(record)
    if found_bytes < _least_bytes(record):
        return ""
    size = format_with_unit(found_bytes)
    if not record.timeline:
        return f"{size} was garbage in reference cycles when the code ended"
    peak = format_with_unit(record.peak_bytes)
    return f"{size} of {peak} at the peak was garbage in reference cycles"


def _least_bytes(record: RegionRecord) -> float:
    """Return how much garbage is worth a sentence."""
    return max(1, _LEAST_SHARE * record.peak_increase_bytes)


def _repair(record: RegionRecord) -> str:
    made = record.garbage[0].created_at if record.garbage else ()
    place = f" of the objects made at {made[0].partition(' in ')[0]}" if made else ""
    return f"call gc.collect() in the loop, or break the cycle{place}"


def _described(holding: Holding) -> str:
    held = f": {holding.held_by}" if holding.held_by else ""
    made = f", made at {holding.made_at}" if holding.created_at else ""
    return f"{held}{made}"


_FREED = (
    "the rest was freed before the region ended; measure inside the function that has the loop, "
    "or pass --cka-memory-html=memory.html --cka-memory-timeline to see when it was live"
)
_NOT_LIVE = (
    "the memory was freed before the region ended; measure inside the function that has the loop, "
    "or pass --cka-memory-html=memory.html --cka-memory-timeline to see when it was live"
)
_NOT_HELD = "no Python object was found that references the rest"
_NOT_FOUND = "nothing was found that keeps the rest alive"
_NOT_IN_USE = (
    "no tensor used the rest at the peak: the allocator keeps it reserved for later allocations"
)
_NO_PLACE = "it is not known where the rest was allocated"


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
        return (
            f"nothing that is still live explains {format_with_unit(total)}{per_batch}; {_NOT_LIVE}"
        )
    text = f"explains {_of(known, total)}{per_batch}"
    if known >= 0.995 * total:
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


PARAMETERS = "parameters"
"""Parameters and buffers of modules."""
GRADIENTS = "gradients"
"""``.grad`` of leaf tensors, and what a backward pass has returned."""
OPTIMISER = "optimiser"
"""The state of optimizers."""
INPUTS = "inputs"
"""What a loader yields, and what code outside modules creates or copies to the device."""
ACTIVATIONS = "activations"
"""What a graph of autograd has kept for its backward pass."""
TEMPORARIES = "temporaries"
"""Results that were freed again, and that no graph had kept."""
WORKSPACES = "workspaces"
"""Memory that libraries keep until their workspaces are dropped."""
IN_POOLS = "graph pools"
"""Memory in private pools of CUDA graphs and ``MemPool`` that has no other kind."""
OTHER = "other"
"""Everything else, such as results that the code has kept."""
KINDS = (
    PARAMETERS,
    GRADIENTS,
    OPTIMISER,
    INPUTS,
    ACTIVATIONS,
    TEMPORARIES,
    WORKSPACES,
    IN_POOLS,
    OTHER,
)

_OF_TRAINING = (ACTIVATIONS, GRADIENTS, OPTIMISER)
"""If a region has one of them, the line says also that it has none of another."""


def sums_by_kind(holdings: Iterable[Holding], *, before_region: bool) -> Mapping[str, int]:
    """Return the bytes of each kind, largest first; empty if kinds are not known.

    Args:
        holdings: what was live at a peak.
        before_region: whether what was allocated before the region counts.
    """
    bytes_of_kinds: Counter[str] = Counter()
    for holding in holdings:
        if holding.kind is not None and (before_region or not holding.before_region):
            bytes_of_kinds[holding.kind] += holding.bytes
    order = {kind: number for number, kind in enumerate(KINDS)}  # a file may have other kinds
    largest_first = sorted(
        bytes_of_kinds.items(), key=lambda item: (-item[1], order.get(item[0], len(order)))
    )
    return dict(largest_first)


def kinds_line(record: RegionRecord, figure: str) -> str:
    """Return the kinds of what was live at a region's peak as one line; empty if not known.

    Args:
        record: the region.
        figure: the figure that is explained. Only for ``peak_bytes`` does the memory count that was
            live before the region.
    """
    is_level = figure == "peak_bytes"
    sums = sums_by_kind(record.at_peak, before_region=is_level)
    total = sum(sums.values())
    if not total:
        return ""
    missing = [kind for kind in _OF_TRAINING if kind not in sums]
    parts = [f"{kind} {_share(size, total)}" for kind, size in sums.items()]
    parts += [f"{kind} 0" for kind in missing if len(missing) < len(_OF_TRAINING)]
    if is_level:
        return f"at the peak, with memory from before the region: {', '.join(parts)}"
    freed_bytes = total - record.peak_increase_bytes
    less = (
        f"; {format_with_unit(freed_bytes)} of older memory was freed before the peak"
        if freed_bytes
        else ""
    )
    return f"at the peak, allocated in the region: {', '.join(parts)}{less}"


def are_mostly_workspaces(record: RegionRecord, figure: str) -> bool:
    """Whether more than half of what was live at a peak are workspaces of libraries.

    Args:
        record: the region.
        figure: as for :func:`kinds_line`.
    """
    sums = sums_by_kind(record.at_peak, before_region=figure == "peak_bytes")
    return 2 * sums.get(WORKSPACES, 0) > sum(sums.values())


def rest_of_groups(rest: Sequence[Holding], all_bytes: int) -> str:
    """Return how much is in the groups that a message does not show; if it is much, in which files.

    Args:
        rest: these groups, at least one.
        all_bytes: of these groups and those that are shown.
    """
    rest_bytes = sum(holding.bytes for holding in rest)
    text = f"and {counted(len(rest), 'smaller group')}, {format_exact(rest_bytes)}"
    files: Counter[str] = Counter()
    for holding in rest:
        if holding.created_at:
            files[holding.created_at[0].rpartition(":")[0]] += holding.bytes
    most = [each for each in files.most_common(_MOST_FILES) if each[1] >= _MUCH * rest_bytes]
    if not most or rest_bytes < _MUCH * all_bytes:
        return text
    places = [f"{format_with_unit(size)} in {file}" for file, size in most]
    if other_bytes := rest_bytes - sum(size for _, size in most):
        places.append(f"{format_with_unit(other_bytes)} elsewhere")
    return f"{text}, {_share(rest_bytes, all_bytes)} of all: {', '.join(places)}"


def _share(size: int, total: int) -> str:
    percent = round(100 * size / total)
    return f"{percent} %" if percent else "< 1 %"
