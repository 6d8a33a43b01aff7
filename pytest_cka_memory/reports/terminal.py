"""The section of the terminal summary, as lines with a colour each."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pytest_cka_memory.core import garbage
from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.figures import FIGURES, RegionRecord, shown_columns
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Result
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.kinds import kinds_lines
from pytest_cka_memory.reports.legend import legend_of
from pytest_cka_memory.reports.names import RowName, fitted, row_name
from pytest_cka_memory.reports.ranks import differences
from pytest_cka_memory.reports.rows import RowChoice, chosen
from pytest_cka_memory.reports.wrapping import wrapped
from pytest_cka_memory.units import counted, format_size, format_with_unit

_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH = 24
"""Columns are left out until names have this room."""
_LEAST_NAME = 12
_PROSE_WIDTH = 100
_MAX_NAMED = 10
_BETWEEN = "  "
_LEFT = ("region", "timeline", "verdict")
_NOTHING = "nothing was measured"
_SHOW_ALL = "--rows=all shows all"
DEFAULT = RowChoice()
_COLOURS = {
    "ok": "green",
    "BREACH": "red",
    "not judged": "yellow",
    KNOWN: "yellow",
    WARNED: "yellow",
}


class Line(NamedTuple):
    """A line and its colour on terminals that have colours."""

    text: str
    colour: str | None = None


def table(results: Sequence[Result], width: int = 100, *, by_file: bool = True) -> list[Line]:
    """Return one row per region below the name of its file, in at most `width` columns.

    With `by_file` false, for rows that are sorted by a figure, each has its whole name.

    What does not fit is left out and named below: first columns without a value, then the least
    important ones, but never a figure that broke a limit. Then names are shortened. The last lines
    say which figures are not the same on all ranks.
    """
    columns = known_columns(results)
    rows = [cells(result, columns) for result in results]
    names = [_name(result, by_file) for result in results]
    indent = "  " if any(name.heading for name in names) else ""
    room = width - len(indent)
    left_out = _left_out_of(results, rows, names, width)
    lost = [key for key in left_out if any(_has_value(row[key]) for row in rows)]
    rows = [{key: row[key] for key in row if key not in left_out} for row in rows]
    shown = fitted(
        [name.row for name in names], max(_LEAST_NAME, room - _width(_widths(rows).values()) - 2)
    )
    head, *body = _lay_out([{"region": name, **row} for name, row in zip(shown, rows, strict=True)])
    head = f"{head[: len('region')]}{indent}{head[len('region') :]}"
    body = [f"{indent}{row}" for row in body]
    lines = [Line(head), Line("-" * max(map(len, [head, *body])))]
    headings = fitted([name.heading for name in names], width)
    for heading, group in groupby(
        zip(headings, body, results, strict=True), key=lambda row: row[0]
    ):
        lines += [Line(heading)] if heading else []
        lines += [Line(row, _colour(result)) for _, row, result in group]
    missing_columns = f"(no room for: {', '.join(lost)})" if lost else ""
    lines += [Line(text) for text in wrapped(missing_columns, width)]
    return lines + [line for text in differences(results) for line in sentence(text, width)]


def _name(result: Result, by_file: bool) -> RowName:
    return row_name(result) if by_file else RowName("", one_line(result.name))


def _left_out_of(
    results: Sequence[Result],
    rows: Sequence[dict[str, str]],
    names: Sequence[RowName],
    width: int,
) -> list[str]:
    """Return the columns that a table leaves out, because names need room."""
    indent = 2 if any(name.heading for name in names) else 0
    longest = max(len(name.row) for name in names)
    room = width - indent - min(_NAME_WIDTH, longest) - 2
    return _left_out(rows, _dispensable(results, known_columns(results)), room)


def printed_columns(results: Sequence[Result], width: int, *, by_file: bool = True) -> list[Figure]:
    """Return the figures that :func:`table` prints of these results in this width."""
    if not results:
        return []
    columns = known_columns(results)
    rows = [cells(result, columns) for result in results]
    left_out = _left_out_of(results, rows, [_name(it, by_file) for it in results], width)
    return [figure for figure in columns if figure.column not in left_out]


def _dispensable(results: Sequence[Result], columns: Sequence[Figure]) -> list[str]:
    """Return the columns that may be left out, the least important first."""
    broken = {breach.figure for result in results for breach in result.breaches}
    broken |= {FIGURES[name].shown_as for name in broken if name in FIGURES}
    others = [figure for figure in columns if figure.name not in broken]
    others.sort(key=lambda figure: figure.importance)
    return ["timeline", *(figure.column for figure in others)]


def _has_value(cell: str) -> bool:
    return cell not in ("", "-")


def _left_out(rows: Sequence[dict[str, str]], dispensable: Sequence[str], room: int) -> list[str]:
    """Return the columns without which `rows` fit in `room` characters."""
    empty = [key for key in dispensable if not any(_has_value(row[key]) for row in rows)]
    widths = _widths(rows)
    found: list[str] = []
    for key in dict.fromkeys([*empty, *dispensable]):
        if _width(widths.values()) <= room:
            break
        found.append(key)
        del widths[key]
    return found


def known_columns(results: Sequence[Result]) -> list[Figure]:
    """Return the figures to show; some are left out if no region has a value."""
    return list(shown_columns(result.record for result in results))


def figures(
    report: Report, width: int = 100, choice: RowChoice = DEFAULT, elsewhere: str = ""
) -> list[Line]:
    """Return the table with its legend, and what was found.

    Args:
        report: the session.
        width: characters of a line.
        choice: which rows to show.
        elsewhere: where the other rows are.
    """
    rows, is_sorted, left_out = chosen(report.results, choice, elsewhere)
    columns = printed_columns(rows, width, by_file=not is_sorted)
    return [
        *table(rows, width, by_file=not is_sorted),
        *sentence(left_out, width, "yellow"),
        Line(""),
        *legend(report.session, report.results, width, columns),
        *findings(report.results, width),
    ]


def shown_rows(report: Report, choice: RowChoice) -> list[Result]:
    """Return the regions that :func:`figures` shows."""
    return chosen(report.results, choice, "").results


def section(report: Report, width: int = 100, choice: RowChoice = DEFAULT) -> list[Line]:
    """Return table, legend and findings, and what is not in the table."""
    nothing = [Line(_NOTHING), *legend(report.session, (), width, ())]
    counts = report.unmeasured.items()
    return [
        *(figures(report, width, choice, _SHOW_ALL) if report.results else nothing),
        *kinds_at_peaks(shown_rows(report, choice), width),
        *(
            line
            for why, count in counts
            for line in sentence(f"{count} not measured: {why}", width, "yellow")
        ),
        *missing(report.missing),
        *(Line(one_line(f"FAILED: {problem}"), "red") for problem in report.problems),
    ]


def sentence(text: str, width: int, colour: str | None = None, indent: str = "") -> list[Line]:
    """Return a text as lines of at most `width` characters, and of at most 100."""
    width = min(width, _PROSE_WIDTH)
    return [Line(line, colour) for line in wrapped(one_line(text), width, indent)]


def _lay_out(rows: Sequence[dict[str, str]]) -> list[str]:
    from tabulate import tabulate  # takes 20 ms, so only for a table

    # The header is passed as an ordinary row, because tabulate widens columns for a header.
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    align = ["left" if name in _LEFT else "right" for name in rows[0]]
    return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align).splitlines()


def _widths(rows: Sequence[dict[str, str]]) -> dict[str, int]:
    """Return the width of each column, in which its name fits, too."""
    columns = zip(rows[0], *(row.values() for row in rows), strict=True)
    return {name: max(map(len, (name, *texts))) for name, *texts in columns}


def _width(widths: Collection[int]) -> int:
    """Return the width of rows with columns of these widths."""
    return sum(widths) + len(_BETWEEN) * (len(widths) - 1)


def cells(result: Result, columns: Sequence[Figure]) -> dict[str, str]:
    """Return heading and text of every column of a region but its name."""
    record = result.record
    levels = [sample.allocated_bytes for sample in record.timeline]
    return {
        **{figure.column: _cell(record, figure) for figure in columns},
        "timeline": sparkline(levels),
        "verdict": result.verdict,
    }


def _cell(record: RegionRecord, figure: Figure) -> str:
    value = figure.shown_value(record)
    if figure.name == "batches":
        return str(value or "-")
    at_most = "≤ " if figure.name == "retained_bytes" and record.garbage_left and value else ""
    return at_most + format_size(value)


def sparkline(levels: Sequence[int], width: int = 8) -> str:
    """Return levels as a line of at most `width` bars, evenly sampled."""
    if not levels:
        return ""
    step = max(1, len(levels) / width)
    taken = [levels[min(len(levels) - 1, int(i * step))] for i in range(min(width, len(levels)))]
    taken[-1] = levels[-1]
    low, high = min(taken), max(taken)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((level - low) * scale)] for level in taken)


def _colour(result: Result) -> str | None:
    return _COLOURS.get(result.verdict)


def legend(
    session: Mapping[str, Any],
    results: Sequence[Result] = (),
    width: int = 100,
    columns: Iterable[Figure] | None = None,
) -> list[Line]:
    """Return device, meter, what the figures leave out, and what the columns mean.

    By default these are all columns of `results`.
    """
    versions = [f"torch {session['torch'] or 'not imported'}"]
    meanings = legend_of(known_columns(results) if columns is None else columns)
    versions += [f"CUDA {session['cuda']}"] if session["cuda"] else []
    device = f"device: {session['device']} ({session['device_name']}), {', '.join(versions)}"
    return [
        *sentence(device, width),
        *sentence(f"meter: {session['meter']}", width),
        *(line for note in session["notes"] for line in sentence(note, width, indent="  ")),
        *(line for text in highest(results) for line in sentence(text, width)),
        *(line for text in garbage_at_peaks(results) for line in sentence(text, width)),
        *map(Line, wrapped(meanings, min(width, _PROSE_WIDTH), hanging="")),
    ]


def highest(results: Sequence[Result]) -> list[str]:
    """Return a sentence about the region with the highest level of a session, if there are two."""
    completed = [result for result in results if result.record.completed]
    if len(completed) < 2:
        return []
    most = max(completed, key=lambda result: result.record.peak_bytes)
    return [f"highest level: {format_with_unit(most.record.peak_bytes)} in {most.name}"]


def garbage_at_peaks(results: Sequence[Result]) -> list[str]:
    """Return a sentence about the region with the most garbage at its peak, if there is one."""
    found = [result for result in results if garbage.note_on_peak(result.record)]
    if not found:
        return []
    most = max(found, key=lambda result: garbage.bytes_at_peak(result.record))
    others = f" (and in {counted(len(found) - 1, 'other region')})" if len(found) > 1 else ""
    return [f"garbage: {garbage.note_on_peak(most.record)}, in {most.name}{others}"]


def findings(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return every broken limit, and what was not judged and why.

    A sentence that is the same for several regions follows their names: of all of them if a limit
    broke, and of the first ten if it was not judged. Names are not wrapped, so that they can be
    copied.
    """
    width = min(width, _PROSE_WIDTH)
    lines = []
    for (verdict, text), group in groupby(_found(results), key=lambda found: found[:2]):
        colour, names = _COLOURS[verdict], [name for *_, name in group]
        more = len(names) - _MAX_NAMED if verdict == "not judged" else 0
        named = names[:_MAX_NAMED] if more > 0 else names
        lines += [Line(f"{verdict} {one_line(name)}", colour) for name in named]
        lines += [Line(f"{verdict} in {more:,} more regions", colour)] if more > 0 else []
        lines += [Line(line, colour) for line in wrapped(one_line(text), width, "  ", hanging="  ")]
    return lines


def kinds_at_peaks(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return regions whose kinds of memory at the peak are known, each with their shares."""
    width = min(width, _PROSE_WIDTH)
    lines = []
    for result in results:
        found = list(kinds_lines(result.record, "peak_bytes", width))
        lines += [Line(one_line(result.name)), *map(Line, found)] if found else []
    return lines


def _found(results: Sequence[Result]) -> Iterator[tuple[str, str, str]]:
    """Yield verdict, sentence and region of every finding."""
    for result in results:
        for breach in result.breaches:
            yield result.verdict_of(breach), f"{breach.limit}: {breach.message}", result.name
        for unjudged in result.unjudged:
            yield "not judged", f"{unjudged.limit}: {unjudged.reason}", result.name
        if not result.record.completed:
            yield "not judged", "", f"{result.name}: {why_incomplete(result)}"


def why_incomplete(result: Result) -> str:
    """Return why a region that an exception ended was not judged."""
    if result.outcome in ("passed", "xpassed"):
        return "an exception ended it; put its 'with' block around the code that catches it"
    return "the test was skipped" if result.outcome == "skipped" else "the test failed"


def unjudged(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return a text per limit that was not judged, for sessions without the table."""
    counts = Counter((u.limit, u.reason) for result in results for u in result.unjudged)
    lines = [
        line
        for (limit, reason), count in counts.items()
        for line in sentence(f"not judged: {limit}, {reason} (regions: {count})", width, "yellow")
    ]
    left = [r for r in results if r.limits and not r.record.completed and r.outcome == "passed"]
    return lines + [Line(f"not judged {r.name}: {why_incomplete(r)}", "yellow") for r in left]


def missing(nodeids: Sequence[str]) -> list[Line]:
    """Return how many results are missing, and the first of them."""
    if not nodeids:
        return []
    named = [Line(f"  {one_line(nodeid)}", "yellow") for nodeid in nodeids[:_MAX_NAMED]]
    more = [Line(f"  ... and {len(nodeids) - _MAX_NAMED} more", "yellow")]
    why = "the session stopped early, or a worker died"
    verb = "has" if len(nodeids) == 1 else "have"
    head = Line(f"{counted(len(nodeids), 'collected test')} {verb} no result ({why})", "yellow")
    return [head, *named, *(more if len(nodeids) > _MAX_NAMED else [])]
