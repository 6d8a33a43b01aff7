"""The section of the terminal summary, as lines with a colour each."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import COMPARED, FIGURES
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Result
from pytest_cka_memory.reports import fitted, kinds_lines, laid_out, one_line, summary, wrapped
from pytest_cka_memory.reports.tables import RowChoice, cells, chosen, known_columns, legend_of
from pytest_cka_memory.units import counted, format_with_unit

_NAME_WIDTH = 24
"""Columns are left out until names have this room."""
_LEAST_NAME = 12
_PROSE_WIDTH = 100
_MAX_NAMED = 10
_BETWEEN = "  "
_INDENT = "  "
"""Before the rows below the name of their file."""
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


class RowName(NamedTuple):
    """The name of a region in two parts; tables show the first part once for several rows."""

    heading: str
    """File and class of the test: ``tests/test_net.py::TestNet``."""
    row: str
    """Test, label and rank: ``test_step[64] train``."""


def section(report: Report, width: int = 100, choice: RowChoice = DEFAULT) -> list[Line]:
    """Return table, legend and findings, and what is not in the table.

    Args:
        report: the session.
        width: characters of a line.
        choice: which rows to show.
    """
    nothing = [Line(_NOTHING), *legend(report.session, (), width, ())]
    lines = figures(report, width, choice, _SHOW_ALL) if report.results else nothing
    lines += kinds_at_peaks(shown_rows(report, choice), width)
    for reason, count in report.unmeasured.items():
        lines += sentence(f"{count} not measured: {reason}", width, "yellow")
    lines += missing(report.missing)
    return lines + [Line(one_line(f"FAILED: {text}"), "red") for text in report.problems]


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
    lines, columns = table(rows, width, by_file=not is_sorted)
    return [
        *lines,
        *sentence(left_out, width, "yellow"),
        Line(""),
        *legend(report.session, report.results, width, columns),
        *findings(report.results, width),
    ]


def shown_rows(report: Report, choice: RowChoice) -> list[Result]:
    """Return the regions that :func:`figures` shows."""
    return chosen(report.results, choice, "").results


def table(
    results: Sequence[Result], width: int = 100, *, by_file: bool = True
) -> tuple[list[Line], list[Figure]]:
    """Return one row per region below the name of its file, and the figures that it shows.

    What does not fit is left out and named below: first columns without a value, then the least
    important ones, but never a figure that broke a limit. Then names are shortened. The last lines
    say which figures are not the same on all ranks.

    Args:
        results: the regions.
        width: characters of a line.
        by_file: whether rows stand below the name of their file. If they are sorted by a figure,
            each has its whole name instead.
    """
    names = _names(results, by_file)
    columns = known_columns(results)
    all_rows = [cells(result, columns) for result in results]
    left_out = _columns_without_room(results, columns, all_rows, names, width)
    rows = [{key: row[key] for key in row if key not in left_out} for row in all_rows]
    indent = _indent(names)
    room = width - len(indent) - _width(_widths(rows).values()) - len(_BETWEEN)
    shown = fitted([name.row for name in names], max(_LEAST_NAME, room))
    texts = [[name, *row.values()] for name, row in zip(shown, rows, strict=True)]
    titles = ["region", *rows[0]]
    align = "".join("l" if title in _LEFT else "r" for title in titles)
    head, *body = laid_out([titles, *texts], align)
    # The head is not indented, but its columns stand above those of the rows.
    head = head.replace("region", f"region{indent}", 1)
    body = [f"{indent}{row}" for row in body]
    lines = [Line(head), Line("-" * max(map(len, [head, *body])))]
    headings = fitted([name.heading for name in names], width)
    for heading, group in groupby(zip(headings, body, results, strict=True), lambda row: row[0]):
        lines += [Line(heading)] if heading else []
        lines += [Line(row, _COLOURS.get(result.verdict)) for _, row, result in group]
    lost = [key for key in left_out if any(_has_value(row[key]) for row in all_rows)]
    if lost:
        lines += map(Line, wrapped(f"(no room for: {', '.join(lost)})", width))
    lines += [line for text in differences(results) for line in sentence(text, width)]
    return lines, [figure for figure in columns if figure.column not in left_out]


def _columns_without_room(
    results: Sequence[Result],
    columns: Sequence[Figure],
    rows: Sequence[dict[str, str]],
    names: Sequence[RowName],
    width: int,
) -> list[str]:
    """Return the columns to leave out because names need room; `rows` has all cells."""
    broken = {breach.figure for result in results for breach in result.breaches}
    broken |= {FIGURES[name].shown_as for name in broken if name in FIGURES}
    others = [figure for figure in columns if figure.name not in broken]
    others.sort(key=lambda figure: figure.importance)
    dispensable = ["timeline", *(figure.column for figure in others)]
    empty = [key for key in dispensable if not any(_has_value(row[key]) for row in rows)]
    longest = max(len(name.row) for name in names)
    room = width - len(_indent(names)) - min(_NAME_WIDTH, longest) - len(_BETWEEN)
    widths = _widths(rows)
    left_out: list[str] = []
    for key in dict.fromkeys([*empty, *dispensable]):
        if _width(widths.values()) <= room:
            break
        left_out.append(key)
        del widths[key]
    return left_out


def _names(results: Sequence[Result], by_file: bool) -> list[RowName]:
    if by_file:
        return [row_name(result) for result in results]
    return [RowName("", one_line(result.name)) for result in results]


def row_name(result: Result) -> RowName:
    """Return the name of a region, on one line, split before the name of the test's function."""
    file, colons, test = result.nodeid.partition("::")
    if not colons:
        return RowName("", one_line(result.name))
    classes, colons, _ = test.partition("[")[0].rpartition("::")
    heading = f"{file}::{classes}" if colons else file
    return RowName(one_line(heading), one_line(result.name[len(heading) + 2 :]))


def _indent(names: Sequence[RowName]) -> str:
    return _INDENT if any(name.heading for name in names) else ""


def _has_value(cell: str) -> bool:
    return cell not in ("", "-")


def _widths(rows: Sequence[dict[str, str]]) -> dict[str, int]:
    """Return the width of each column, in which its name fits, too."""
    columns = zip(rows[0], *(row.values() for row in rows), strict=True)
    return {name: max(map(len, (name, *texts))) for name, *texts in columns}


def _width(widths: Collection[int]) -> int:
    """Return the width of rows with columns of these widths."""
    return sum(widths) + len(_BETWEEN) * (len(widths) - 1)


def differences(results: Sequence[Result]) -> Iterator[str]:
    """Yield a sentence for each region that is not the same on all ranks; none without ranks."""
    of_region = defaultdict(list)
    for result in results:
        if result.rank:
            of_region[result.nodeid, result.record.label].append(result)
    for measured in of_region.values():
        parts = [part for figure in COMPARED.values() if (part := _spread(figure, measured))]
        if parts:
            name = row_name(measured[0]).row.removesuffix(f" {measured[0].rank}")
            yield f"the ranks differ in {name}: {'; '.join(parts)}"


def _spread(figure: Figure, measured: Sequence[Result]) -> str:
    """Return lowest and highest value with their ranks; empty if all are equal or unknown."""
    values = [(getattr(result.record, figure.name), result.rank) for result in measured]
    known = [(value, rank) for value, rank in values if value is not None]
    if len({value for value, _ in known}) < 2:
        return ""
    low, high = (choose(known, key=lambda entry: entry[0]) for choose in (min, max))
    return (
        f"{figure.noun} from {format_with_unit(low[0])} ({low[1]}) "
        f"to {format_with_unit(high[0])} ({high[1]})"
    )


def sentence(text: str, width: int, colour: str | None = None, indent: str = "") -> list[Line]:
    """Return a text as lines of at most `width` characters, and of at most 100."""
    width = min(width, _PROSE_WIDTH)
    return [Line(line, colour) for line in wrapped(one_line(text), width, indent)]


def legend(
    session: Mapping[str, Any],
    results: Sequence[Result] = (),
    width: int = 100,
    columns: Iterable[Figure] | None = None,
) -> list[Line]:
    """Return device, meter, what the figures leave out, and what the columns mean.

    Args:
        session: device, versions, meter and notes, as reports have them.
        results: every region, also those that a table leaves out.
        width: characters of a line.
        columns: the printed figures; by default all that `results` have.
    """
    versions = [f"torch {session['torch'] or 'not imported'}"]
    meanings = legend_of(known_columns(results) if columns is None else columns)
    versions += [f"CUDA {session['cuda']}"] if session["cuda"] else []
    device = f"device: {session['device']} ({session['device_name']}), {', '.join(versions)}"
    return [
        *sentence(device, width),
        *sentence(f"meter: {session['meter']}", width),
        *(line for note in session["notes"] for line in sentence(note, width, indent="  ")),
        *(
            line
            for name, text in summary.extremes(results)
            for line in sentence(f"{name}: {text}", width)
        ),
        *map(Line, wrapped(meanings, min(width, _PROSE_WIDTH), hanging="")),
    ]


def findings(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return every broken limit, and what was not judged and why.

    A sentence that is the same for several regions follows their names: of all of them if a limit
    broke, and of the first ten if it was not judged. Names are not wrapped, so that they can be
    copied.
    """
    width = min(width, _PROSE_WIDTH)
    lines = []
    rows = [
        (each.verdict, f"{each.limit}: {each.sentence}", result.name)
        if each.limit
        else (each.verdict, "", f"{result.name}: {each.sentence}")
        for result in results
        for each in summary.problems([result])
    ]
    for (verdict, text), group in groupby(rows, lambda row: row[:2]):
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
        shares = list(kinds_lines(result.record, "peak_bytes", width))
        lines += [Line(one_line(result.name)), *map(Line, shares)] if shares else []
    return lines


def unjudged(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return a text per limit that was not judged, for sessions without the table.

    Args:
        results: every region.
        width: characters of a line.
    """
    lines = []
    for limit, reason, regions in summary.not_judged(results):
        if limit:
            text = f"not judged: {limit}, {reason} (regions: {len(regions)})"
            lines += sentence(text, width, "yellow")
        else:
            lines.append(Line(f"not judged {regions[0].name}: {reason}", "yellow"))
    return lines


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
