"""The table in the terminal summary, as lines with a colour each."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

from pytest_cka_memory.core.verdicts import Report, Result
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.units import format_size

_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH = 16
_MAX_NAMED = 10
_LEFT = ("region", "timeline", "verdict")


class Line(NamedTuple):
    """A line and how to colour it on a terminal that can."""

    text: str
    colour: str | None = None


def table(results: Sequence[Result], width: int = 100) -> list[Line]:
    """One row a region; names are cut on the left to fit `width` columns."""
    has_reserve = any_reserve(results)
    rows = [cells(result, has_reserve=has_reserve) for result in results]
    room = width - _width(rows) - 2
    if room < _NAME_WIDTH:  # a name says more than a chart
        rows = [{key: text for key, text in row.items() if key != "timeline"} for row in rows]
        room = max(_NAME_WIDTH, width - _width(rows) - 2)
    names = [_cut(one_line(name), room) for name in _names(results)]
    rows = [{"region": name, **row} for name, row in zip(names, rows, strict=True)]
    head, *body = _lay_out(rows)
    coloured = [Line(row, _colour(result)) for row, result in zip(body, results, strict=True)]
    return [Line(head), Line("-" * max(map(len, [head, *body]))), *coloured]


def any_reserve(results: Sequence[Result]) -> bool:
    """Whether the device of any region has one."""
    return any(result.record.reserved_peak_bytes is not None for result in results)


def whole(report: Report, width: int = 100) -> list[Line]:
    """Everything: table, legend, findings, and what is not in the table."""
    rows = [*table(report.results, width), Line("")] if report.results else [Line(NOTHING)]
    counts = report.unmeasured.items()
    return [
        *rows,
        *(Line(one_line(line.text), line.colour) for line in legend(report.session)),
        *findings(report.results, width),
        *(Line(one_line(f"{count} not measured: {why}"), "yellow") for why, count in counts),
        *missing(report.missing),
        *(Line(one_line(f"FAILED: {problem}"), "red") for problem in report.problems),
    ]


NOTHING = "nothing was measured"


def _lay_out(rows: Sequence[dict[str, str]]) -> list[str]:
    # The header is a row like the others: as a header, tabulate would widen every column.
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    align = ["left" if name in _LEFT else "right" for name in rows[0]]
    return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align).splitlines()


def _width(rows: Sequence[dict[str, str]]) -> int:
    columns = zip(rows[0], *(row.values() for row in rows), strict=True)
    return sum(2 + max(map(len, column)) for column in columns) - 2


def cells(result: Result, *, has_reserve: bool) -> dict[str, str]:
    """Every column of a region but its name, as text; the reserve where any region has one."""
    record = result.record
    growth = record.growth_bytes_per_batch
    reserve = {"reserved": format_size(record.reserved_peak_bytes)} if has_reserve else {}
    return {
        "batches": str(record.batches or "-"),
        "start": format_size(record.start_bytes),
        "peak": format_size(record.peak_bytes),
        "increase": format_size(record.peak_increase_bytes),
        "retained": format_size(record.retained_bytes),
        "growth/b": format_size(growth),
        **reserve,
        "timeline": spark([sample.allocated_bytes for sample in record.timeline]),
        "verdict": result.verdict,
    }


def _names(results: Sequence[Result]) -> list[str]:
    """Test, label and rank; with the file too where two files have a test of that name."""
    tests = [result.nodeid.partition("::")[2] for result in results]
    owners: dict[str, set[str]] = {}
    for test, result in zip(tests, results, strict=True):
        owners.setdefault(test, set()).add(result.nodeid)
    return [
        result.name[0 if len(owners[test]) > 1 else len(result.nodeid) - len(test) :]
        for test, result in zip(tests, results, strict=True)
    ]


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else "…" + name[1 - room :]


def spark(levels: Sequence[int], width: int = 8) -> str:
    """Draw levels as a line of bars, lowest to highest; at most `width` of them, evenly taken."""
    if not levels:
        return ""
    step = max(1, len(levels) / width)
    taken = [levels[min(len(levels) - 1, int(i * step))] for i in range(min(width, len(levels)))]
    taken[-1] = levels[-1]
    low, high = min(taken), max(taken)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((level - low) * scale)] for level in taken)


def _colour(result: Result) -> str | None:
    return {"ok": "green", "BREACH": "red", "not judged": "yellow"}.get(result.verdict)


def legend(session: Mapping[str, Any]) -> list[Line]:
    """Say what was measured, by what, and what such figures can and cannot see."""
    versions = [f"torch {session['torch'] or 'not imported'}"]
    versions += [f"CUDA {session['cuda']}"] if session["cuda"] else []
    return [
        Line(f"device: {session['device']} ({session['device_name']}), {', '.join(versions)}"),
        Line(f"meter: {session['meter']}; sizes in MB (2**20 bytes) where no unit is given"),
        *(Line(f"  {note}") for note in session["notes"]),
        Line("start: live at entry; peak: highest live; increase: peak - start; retained: born"),
        Line("inside and alive at the end; growth/b: rise of the upper level a batch (5+ batches)"),
    ]


def findings(results: Sequence[Result], width: int = 100) -> list[Line]:
    """Name what was broken, and what was not judged and why."""
    lines = []
    for result in results:
        for breach in result.breaches:
            lines.append(Line(f"BREACH {one_line(result.name)}", "red"))
            sentence = textwrap.wrap(one_line(f"{breach.limit}: {breach.message}"), width - 2)
            lines += [Line(f"  {part}", "red") for part in sentence]
        for unjudged in result.unjudged:
            lines.append(Line(f"not judged {one_line(result.name)}", "yellow"))
            lines.append(Line(one_line(f"  {unjudged.limit}: {unjudged.reason}"), "yellow"))
        if not result.record.completed:
            why = f"{one_line(result.name)}: {why_incomplete(result)}"
            lines.append(Line(f"not judged {why}", "yellow"))
    return lines


def why_incomplete(result: Result) -> str:
    """Say why a region that an exception left was not judged."""
    if result.outcome in ("passed", "xpassed"):
        return "an exception left it; write its 'with' around what catches the exception"
    return "the test was skipped" if result.outcome == "skipped" else "the test failed"


def unjudged(results: Sequence[Result]) -> list[Line]:
    """Say in a line each which limits were not judged: for sessions without the table."""
    counts = Counter((u.limit, u.reason) for result in results for u in result.unjudged)
    lines = [
        Line(f"not judged: {limit}, {reason} (regions: {count})", "yellow")
        for (limit, reason), count in counts.items()
    ]
    left = [r for r in results if r.limits and not r.record.completed and r.outcome == "passed"]
    return lines + [Line(f"not judged {r.name}: {why_incomplete(r)}", "yellow") for r in left]


def missing(nodeids: Sequence[str]) -> list[Line]:
    """Say how many results are missing, and name the first of them."""
    if not nodeids:
        return []
    named = [Line(f"  {one_line(nodeid)}", "yellow") for nodeid in nodeids[:_MAX_NAMED]]
    more = [Line(f"  ... and {len(nodeids) - _MAX_NAMED} more", "yellow")]
    head = Line(f"{len(nodeids)} collected tests have no result (stopped early, or lost)", "yellow")
    return [head, *named, *(more if len(nodeids) > _MAX_NAMED else [])]
