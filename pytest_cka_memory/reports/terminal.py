"""The section of the terminal summary, as lines with a colour each."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_cka_memory.core.figures import Figure, RegionRecord, shown_columns
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import KNOWN, Result
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.legend import legend_of
from pytest_cka_memory.units import counted, format_size

_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH = 16
_LEGEND_WIDTH = 90
_MAX_NAMED = 10
_LEFT = ("region", "timeline", "verdict")
_NOTHING = "nothing was measured"


class Line(NamedTuple):
    """A line and its colour on terminals that have colours."""

    text: str
    colour: str | None = None


def table(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return one row per region; names are shortened on the left to fit `width` columns."""
    columns = known_columns(results)
    rows = [cells(result, columns) for result in results]
    room = width - _width(rows) - 2
    if room < _NAME_WIDTH:  # a name is more useful than a chart
        rows = [{key: text for key, text in row.items() if key != "timeline"} for row in rows]
        room = max(_NAME_WIDTH, width - _width(rows) - 2)
    names = [_shortened(one_line(name), room) for name in _names(results)]
    rows = [{"region": name, **row} for name, row in zip(names, rows, strict=True)]
    head, *body = _lay_out(rows)
    coloured = [Line(row, _colour(result)) for row, result in zip(body, results, strict=True)]
    return [Line(head), Line("-" * max(map(len, [head, *body]))), *coloured]


def known_columns(results: Sequence[Result]) -> list[Figure]:
    """Return the figures to show; some are left out if no region has a value."""
    return list(shown_columns(result.record for result in results))


def section(report: Report, width: int = 100) -> list[Line]:
    """Return table, legend and findings, and what is not in the table."""
    rows = [*table(report.results, width), Line("")] if report.results else [Line(_NOTHING)]
    counts = report.unmeasured.items()
    return [
        *rows,
        *(
            Line(one_line(line.text), line.colour)
            for line in legend(report.session, report.results)
        ),
        *findings(report.results, width),
        *(Line(one_line(f"{count} not measured: {why}"), "yellow") for why, count in counts),
        *missing(report.missing),
        *(Line(one_line(f"FAILED: {problem}"), "red") for problem in report.problems),
    ]


def _lay_out(rows: Sequence[dict[str, str]]) -> list[str]:
    from tabulate import tabulate  # takes 20 ms, which a session spends only for a table

    # The header is passed as an ordinary row, because tabulate widens columns for a header.
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    align = ["left" if name in _LEFT else "right" for name in rows[0]]
    return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align).splitlines()


def _width(rows: Sequence[dict[str, str]]) -> int:
    columns = zip(rows[0], *(row.values() for row in rows), strict=True)
    return sum(2 + max(map(len, column)) for column in columns) - 2


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
    value = getattr(record, figure.name)
    return str(value or "-") if figure.name == "batches" else format_size(value)


def _names(results: Sequence[Result]) -> list[str]:
    """Return test, label and rank; with the file if two files have a test of that name."""
    tests = [result.nodeid.partition("::")[2] for result in results]
    owners: dict[str, set[str]] = {}
    for test, result in zip(tests, results, strict=True):
        owners.setdefault(test, set()).add(result.nodeid)
    return [
        result.name[0 if len(owners[test]) > 1 else len(result.nodeid) - len(test) :]
        for test, result in zip(tests, results, strict=True)
    ]


def _shortened(name: str, room: int) -> str:
    return name if len(name) <= room else "…" + name[1 - room :]


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
    return {"ok": "green", "BREACH": "red", "not judged": "yellow", KNOWN: "yellow"}.get(
        result.verdict
    )


def legend(session: Mapping[str, Any], results: Sequence[Result] = ()) -> list[Line]:
    """Return device, meter, what the figures leave out, and the meaning of the table's columns."""
    versions = [f"torch {session['torch'] or 'not imported'}"]
    meanings = legend_of(result.record for result in results)
    versions += [f"CUDA {session['cuda']}"] if session["cuda"] else []
    return [
        Line(f"device: {session['device']} ({session['device_name']}), {', '.join(versions)}"),
        Line(f"meter: {session['meter']}"),
        *(Line(f"  {note}") for note in session["notes"]),
        *map(Line, textwrap.wrap(meanings, _LEGEND_WIDTH)),
    ]


def findings(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Return every broken limit, and what was not judged and why."""
    lines = []
    for result in results:
        for breach in result.breaches:
            colour = _colour(result)
            lines.append(Line(f"{result.verdict} {one_line(result.name)}", colour))
            sentence = textwrap.wrap(one_line(f"{breach.limit}: {breach.message}"), width - 2)
            lines += [Line(f"  {part}", colour) for part in sentence]
        for unjudged in result.unjudged:
            lines.append(Line(f"not judged {one_line(result.name)}", "yellow"))
            lines.append(Line(one_line(f"  {unjudged.limit}: {unjudged.reason}"), "yellow"))
        if not result.record.completed:
            why = f"{one_line(result.name)}: {why_incomplete(result)}"
            lines.append(Line(f"not judged {why}", "yellow"))
    return lines


def why_incomplete(result: Result) -> str:
    """Return why a region that an exception ended was not judged."""
    if result.outcome in ("passed", "xpassed"):
        return "an exception ended it; put its 'with' block around the code that catches it"
    return "the test was skipped" if result.outcome == "skipped" else "the test failed"


def unjudged(results: Sequence[Result]) -> list[Line]:
    """Return one line per limit that was not judged, for sessions without the table."""
    counts = Counter((u.limit, u.reason) for result in results for u in result.unjudged)
    lines = [
        Line(f"not judged: {limit}, {reason} (regions: {count})", "yellow")
        for (limit, reason), count in counts.items()
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
