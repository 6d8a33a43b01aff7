"""The text of a failing test: the limits it broke, what holds the memory, and what to do.

The message of a broken limit is written by the limit itself, in :mod:`pytest_cka_memory.limits`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.figure_rows import DRIVER, PROCESS
from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.report import is_scope
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import Breach, Result
from pytest_cka_memory.limits import figures
from pytest_cka_memory.reports import excess, kinds_lines, shorten, wrapped
from pytest_cka_memory.reports.tables import provenance_of, sparkline
from pytest_cka_memory.units import MB, counted, format_exact, format_with_unit

WIDTH = 100
"""Longer lines are hard to read, however wide the terminal is."""
_BARS = 40
_MOST_LIMIT = 36
_MOST_LABEL = 20
_MOST_GROUPS = 4
_MOST_COMPARED = 3
_MOST_FRAMES = 4
_MOST_DIFFERENCES = 6
_BEFORE = "allocated before the region"


def render(
    results: Sequence[Result],
    facts: Mapping[str, Any],
    width: int = WIDTH,
    *,
    warns: bool = False,
) -> str:
    """Return the text about every broken limit of one test; empty if there is none.

    Args:
        results: the regions of the test.
        facts: device and meter, as :meth:`pytest_cka_memory.meters.Meter.facts` returns them.
        width: characters of a line.
        warns: whether to write about the limits that are only warnings, instead of the others.
    """
    lines: list[str] = []
    for result in results:
        breaches = [breach for breach in result.breaches if breach.warns == warns]
        for number, breach in enumerate(breaches):
            lines += wrapped(f"{breach.limit} broken: {breach.message}", width, hanging="")
            if number == 0:
                lines += _place(result.record, facts, width, result.nodeid)
            earlier = breaches[:number]
            if is_explained(breach, earlier):
                lines += explanation(breach, result.record, width, earlier)
            if not any(excess.is_on_a_peak(other) for other in earlier):
                lines += excess.repair_lines(result.nodeid, facts, breach, result.record)
    return "\n".join(lines)


def headline(results: Sequence[Result]) -> str:
    """Return one line about the first broken limit of a test, and how many more there are.

    Empty if none is broken, or all that are only warn.
    """
    broken = [(each, result) for result in results for each in result.breaches if not each.warns]
    if not broken:
        return ""
    breach, result = broken[0]
    where = shorten(result.record.label, _MOST_LABEL)
    place = f" in {where!r}" if where and not is_scope(result.nodeid) else ""
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    return f"{shorten(breach.limit, _MOST_LIMIT)} broken{place}{more}: {_excess(breach)}"


def _excess(breach: Breach) -> str:
    """Return the figure and how much of it is too much; the message if that is not known."""
    if breach.measured_bytes is None:
        return breach.message
    figure = FIGURES.get(breach.figure)
    noun = f"{breach.figure if figure is None else figure.noun} "
    excess = format_with_unit(breach.measured_bytes - breach.allowed_bytes)
    return f"{noun}{format_with_unit(breach.measured_bytes)}, {excess} too much"


def is_explained(breach: Breach, earlier: Sequence[Breach]) -> bool:
    """Whether what holds the memory of a broken limit is to be shown: once for each figure.

    Args:
        breach: the limit.
        earlier: the limits of the same region that are shown before it.
    """
    known = (other.figure for other in earlier)
    return breach.measured_bytes is not None and breach.figure not in known


def compared(
    explained: Sequence[tuple[str, RegionRecord]], facts: Mapping[str, Any], width: int = WIDTH
) -> Iterator[str]:
    """Yield lines about figures that a failed test has compared itself.

    Args:
        explained: name of a figure, and the region with what explains it.
        facts: as for :func:`render`.
        width: characters of a line.
    """
    largest_first = sorted(explained, key=lambda it: -getattr(it[1], it[0]))
    for name, record in largest_first[:_MOST_COMPARED]:
        value = getattr(record, name)
        yield f"{FIGURES[name].noun} {format_exact(value)}"
        yield from _place(record, facts, width)
        yield from explanation(Breach("", 0, value, "", name), record, width)
    for figure in dict.fromkeys(name for name, _ in largest_first):
        records = [record for name, record in explained if name == figure]
        yield from _difference_lines(figure, records, width)
    if len(explained) > _MOST_COMPARED:
        yield f"and {counted(len(explained) - _MOST_COMPARED, 'smaller figure')} of other regions"


def out_of_memory(
    record: RegionRecord, facts: Mapping[str, Any], width: int = WIDTH
) -> Iterator[str]:
    """Yield lines about a region that ended because its device ran out of memory.

    Args:
        record: the region.
        facts: as for :func:`render`.
        width: characters of a line.
    """
    if record.refusal is None:
        return
    verdict = excess.refusal_verdict(record.refusal, record.reserve)
    yield from wrapped(f"out of memory: {verdict}", width, hanging="")
    yield from _place(record, facts, width)
    yield from excess.reserve_explanation(record, width)
    if not excess.would_fit(record.refusal, record.reserve):
        in_use = Breach("", 0, record.peak_bytes, "", "peak_bytes")
        yield from _group_lines(in_use, record, width, ())


def _difference_lines(figure: str, records: Sequence[RegionRecord], width: int) -> Iterator[str]:
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
        for place in changed[:_MOST_DIFFERENCES]:
            sizes = f"{format_with_unit(before[place])} -> {format_with_unit(now[place])}"
            at = "" if place == _BEFORE else "at "
            yield from wrapped(f"{_signed(changes[place])} ({sizes}) {at}{place}", width, "  ")
        if len(changed) > _MOST_DIFFERENCES:
            yield f"  and {counted(len(changed) - _MOST_DIFFERENCES, 'smaller difference')}"


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


def _place(
    record: RegionRecord, facts: Mapping[str, Any], width: int, nodeid: str = ""
) -> Iterator[str]:
    region = f"region {record.label!r}" if record.label else "the whole test"
    if is_scope(nodeid):
        region = nodeid.rpartition("::")[2]
    where = f"in {region}, {provenance_of(facts).verb} {facts['device']} ({facts['meter']})"
    yield from wrapped(where, width, "  ")


def explanation(
    breach: Breach, record: RegionRecord, width: int = WIDTH, earlier: Sequence[Breach] = ()
) -> Iterator[str]:
    """Yield lines about what holds the memory of a broken limit, and what to do.

    Args:
        breach: the limit.
        record: the region that broke it.
        width: characters of a line.
        earlier: limits of the same region that were explained before. Of the storages that were
            shown with them there is only one line.
    """
    figure = FIGURES.get(breach.figure)
    if figure is not None and figure.measured_by == PROCESS:
        for line in figures.lines_about(record):
            yield from wrapped(line, width, "  ")
        if not figures.holdings_of(record):
            return
        yield "  tensors that are still live:"
    if figure is not None and figure.measured_by == DRIVER:
        yield from wrapped(f"what to do: {figure.advice}", width, "  ")
        return
    if is_reserve_the_cause(breach, record):
        yield from excess.reserve_explanation(record, width)
        return
    yield from _growth_line(breach, record, width)
    garbage = record.garbage[:1] if sentences.part_of_message(record, breach.figure) else ()
    is_counted = _explaining_field(breach) != "grown"
    yield from _garbage_lines(garbage, width) if is_counted else ()
    yield from _group_lines(breach, record, width, earlier)
    yield from wrapped(sentences.sentence(record, breach.figure), width, "  ")
    yield from _garbage_lines(garbage, width, ", not counted") if not is_counted else ()
    if breach.figure == "retained_bytes" and record.host_retained_bytes:
        also = f"also retained on the host: {format_exact(record.host_retained_bytes)}, not judged"
        yield from wrapped(also, width, "  ")
        for holding in record.host_retained[:_MOST_GROUPS]:
            yield from holding_lines(holding, width)


def _garbage_lines(garbage: Sequence[Holding], width: int, which: str = "") -> Iterator[str]:
    for holding in garbage:
        yield f"  garbage in reference cycles{which}:"
        yield from holding_lines(holding, width)
        if holding.hint:
            yield from wrapped(f"what to do: {holding.hint}", width, "    ")


def is_reserve_the_cause(breach: Breach, record: RegionRecord) -> bool:
    """Whether a reserve is too large because of what is not in use, and it is known what it is."""
    figure = FIGURES.get(breach.figure)
    is_reserve = figure is not None and figure.name.startswith("reserved")
    return is_reserve and bool(record.reserve) and not _is_peak_the_cause(breach, record)


def _is_peak_the_cause(breach: Breach, record: RegionRecord) -> bool:
    """Whether a reserve would break its limit without what is not in use, and keep it without what
    is: then the peak of what is in use is the cause.
    """
    figure = FIGURES.get(breach.figure)
    if figure is None or not figure.includes or breach.measured_bytes is None:
        return False
    part_bytes = getattr(record, figure.includes)
    rest_bytes = breach.measured_bytes - part_bytes
    return bool(part_bytes > breach.allowed_bytes >= rest_bytes)


def _growth_line(breach: Breach, record: RegionRecord, width: int) -> Iterator[str]:
    """Yield the levels of the batches as a line of bars if the limit is one on growth."""
    if _explaining_field(breach) != "grown" or not record.timeline:
        return
    # Relative to the first batch: the level at entry is in blocks, these are requested bytes.
    first = record.timeline[0].in_use_bytes
    rises = [sample.in_use_bytes - first for sample in record.timeline]
    span = f"{format_with_unit(min(rises))} to {format_with_unit(max(rises))}"
    bars = sparkline(rises, min(_BARS, width - len(span) - 28))
    yield f"  {bars}  {span} above the first batch"


def _group_lines(
    breach: Breach, record: RegionRecord, width: int, earlier: Sequence[Breach]
) -> Iterator[str]:
    """Yield lines about the storages that a limit counts, and what to do.

    Groups that the region allocated come first, then what was live before it.
    """
    holdings = holdings_of(breach, record)
    # Nobody searched for references to what was live at the peak: much of it was freed since.
    traced = is_traced(breach)
    if holdings and not traced:
        yield from kinds_lines(record, breach.figure, width)
        yield "  live at the peak:"
    hint_shown = ""
    inside = [holding for holding in holdings if not holding.before_region]
    shown = _sites_shown(earlier, record, traced=traced)
    for holding in inside[:_MOST_GROUPS]:
        if _site_of(holding) in shown:
            place = holding.created_at[0].partition(" in ")[0]  # without the function's name
            size = _size_of(holding, traced=traced)
            yield from wrapped(f"{size}, made at {place}: as above", width, "  ")
            continue
        yield from holding_lines(holding, width, traced=traced)
        if holding.hint is not None and not hint_shown.startswith(holding.hint):
            hint_shown = holding.hint
            yield from wrapped(f"what to do: {hint_within(breach, holding)}", width, "    ")
    rest = inside[_MOST_GROUPS:]
    if rest:
        all_bytes = sum(holding.bytes for holding in holdings)
        yield from wrapped(sentences.rest_of_groups(rest, all_bytes), width, "  ")
    for holding in holdings[len(inside) :]:
        yield from holding_lines(holding, width, traced=traced)
    if not any(holding.hint for holding in inside[:_MOST_GROUPS]):
        advice = _advice(breach, record)
        yield from wrapped(f"what to do: {advice}", width, "  ") if advice else ()


def hint_within(breach: Breach, holding: Holding) -> str | None:
    """Return a hint; one that keeps a smaller tensor also says that a limit of 0 allows none."""
    hint = holding.hint
    if hint is None:
        return None
    keeps_less = hint.startswith("keep ") and ("clone()" in hint or "detach()" in hint)
    if keeps_less and breach.figure == "retained_bytes" and not breach.allowed_bytes:
        return f"{hint}; this limit allows no tensor at all to be kept, only numbers or text"
    return hint


def _sites_shown(
    earlier: Sequence[Breach], record: RegionRecord, *, traced: bool
) -> set[tuple[object, ...]]:
    """Return the sites of the storages that were shown with earlier limits.

    Args:
        earlier: limits of the region, in the order in which they are shown.
        record: the region.
        traced: whether only those count that were shown with what references them.
    """
    sites: set[tuple[object, ...]] = set()
    for number, breach in enumerate(earlier):
        if is_explained(breach, earlier[:number]) and (is_traced(breach) or not traced):
            holdings = (each for each in holdings_of(breach, record) if not each.before_region)
            sites.update(map(_site_of, islice(holdings, _MOST_GROUPS)))
    return sites - {()}


def _site_of(holding: Holding) -> tuple[object, ...]:
    """Return what is equal for storages that were made in one place; empty if it is unknown."""
    return (holding.created_at[0], holding.code) if holding.created_at else ()


def _advice(breach: Breach, record: RegionRecord) -> str:
    """Return general advice on a figure: on the one that it includes, if that is the cause."""
    figure = FIGURES.get(breach.figure)
    if excess.is_on_a_peak(breach) and sentences.are_mostly_workspaces(record, breach.figure):
        return excess.WORKSPACES_ADVICE
    if figure is None or not _is_peak_the_cause(breach, record):
        return "" if figure is None else figure.advice_for(record)
    cause = FIGURES[figure.includes]
    part_bytes = getattr(record, cause.name)
    kept_bytes = min(record.retained_bytes, part_bytes)
    kept = f", of which {format_with_unit(kept_bytes)} are retained" if kept_bytes else ""
    main = FIGURES["retained_bytes"] if 2 * kept_bytes > part_bytes else cause
    rise = f"the figure rose with the {cause.noun}, {format_with_unit(part_bytes)}{kept}"
    return f"{main.advice}; {rise}"


def holdings_of(breach: Breach, record: RegionRecord) -> tuple[Holding, ...]:
    """Return the storages whose bytes the figure of a broken limit counts, largest group first."""
    figure = FIGURES.get(breach.figure)
    if figure is not None and figure.measured_by == PROCESS:
        return figures.holdings_of(record)
    holdings: tuple[Holding, ...] = getattr(record, _explaining_field(breach))
    return holdings


def is_traced(breach: Breach) -> bool:
    """Whether references to these storages were searched for: not to those at the peak."""
    return _explaining_field(breach) != "at_peak"


def _explaining_field(breach: Breach) -> str:
    figure = FIGURES.get(breach.figure)  # another plugin's limit may name a figure of its own
    return figure.explained_by if figure is not None and figure.explained_by else "at_peak"


def holding_lines(holding: Holding, width: int = WIDTH, *, traced: bool = True) -> Iterator[str]:
    """Yield lines about one group: what it is, where it was allocated, what references it.

    Args:
        holding: the group.
        width: characters of a line.
        traced: whether references to it were searched for.
    """
    kind = [_size_of(holding, traced=traced)]
    if holding.shape is not None:
        largest = "" if holding.count == 1 else "largest "
        by = "" if holding.operator is None else f" by {holding.operator}"
        kind.append(f"{holding.dtype} {largest}{holding.shape}{by}")
    elif holding.inside is not None:
        kind.append(holding.inside)
    elif holding.before_region:
        kind.append("live before the region")
    elif not traced and not holding.created_at:
        kind.append("allocated before the region or by unknown code")
    if holding.kind is not None:
        kind.append(holding.kind)
    if holding.pinned:
        kind.append("pinned")
    if holding.early_bytes is not None:
        early, now = format_with_unit(holding.early_bytes), format_with_unit(holding.bytes)
        kind.append(f"grows from {early} after 2 batches to {now}")
    elif traced and holding.batches is not None:
        first = holding.first_batches
        of_first = f"{holding.batches} of the first {first} batches"
        number = counted(holding.batches, "batch") if first is None else of_first
        kind.append(f"allocated in {number}")
    yield from wrapped(", ".join(kind), width, "  ")
    if holding.created_at:
        made = ", from ".join([holding.made_at, *holding.created_at[1:_MOST_FRAMES]])
        yield from wrapped(f"made at {made}", width, "    ")
    if holding.module is not None:
        yield from wrapped(f"in {holding.module}", width, "    ")
    if holding.held_by is not None:
        yield from wrapped(f"held by {holding.held_by}{_proof_of(holding)}", width, "    ")
    elif traced and holding.hint is None:
        yield "    no Python reference to it was found"


def _proof_of(holding: Holding) -> str:
    """Return what is known about other references; empty if nothing is worth a line."""
    if others := holding.also_held_by:
        must_go = "both" if len(others) == 1 else f"all {len(others) + 1}"
        return (
            f", and by {', and by '.join(others)}: {must_go} references must be removed to free it"
        )
    if holding.freed_bytes is None or holding.bytes < MB:
        return ""
    freed, size = format_with_unit(holding.freed_bytes), format_with_unit(holding.bytes)
    return f": freeing {'it' if holding.count == 1 else 'them'} would release {freed} of {size}"


def _size_of(holding: Holding, *, traced: bool) -> str:
    """Return number and bytes of the storages of a group."""
    noun = "tensor" if traced or holding.shape is not None else "allocation"
    count = f"{counted(holding.count, noun)}, " if holding.count else ""
    return f"{count}{format_exact(holding.bytes)}"
