"""The section on memory over time: its data, and the holders of what regions have retained."""

from collections.abc import Sequence
from typing import Any

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import summary
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.html import template
from pytest_cka_memory.units import counted

_MOST_DRAWN = 50
"""Pictures in a page: each may have 200 KB."""
_MOST_HOLDERS = 5
_NOT_RECORDED = (
    "<section id='over-time'><p class='notice'>Memory over time is not drawn: this meter counts "
    "tensors, and only the blocks of an allocator are recorded.</p></section>"
)


def section(report: Report) -> str:
    """Return the section as HTML; empty if no region has recorded its memory over time."""
    drawn = _drawn(report.results)
    if not drawn:
        asked_for = any(result.record.memory_timeline is not None for result in report.results)
        return _NOT_RECORDED if asked_for else ""
    by_peak = sorted(drawn, key=lambda result: -result.record.peak_increase_bytes)
    chosen = summary.cut(by_peak, _MOST_DRAWN, lambda result: result.nodeid)
    device = str(report.session.get("device") or "the device")
    data = [_data(result, device) for result in chosen]
    left = len(drawn) - len(chosen)
    more = (
        f"<p class='notice'>{counted(left, 'more region')} with lower peaks "
        f"{'is' if left == 1 else 'are'} not drawn: choose tests with "
        "<code>--cka-memory-timeline=PATTERN</code>.</p>"
        if left
        else ""
    )
    parts = {
        "MORE": more,
        "DATA": template.embedded(data),
        "SCRIPT": template.text_of("timeline.js"),
    }
    return template.fill("timeline.html", parts)


def _drawn(results: Sequence[Result]) -> list[Result]:
    pictures = ((result, result.record.memory_timeline) for result in results)
    return [result for result, picture in pictures if picture and picture["memories"]]


def _data(result: Result, device: str) -> dict[str, Any]:
    picture = dict(result.record.memory_timeline or {})
    holders = _holders(result)
    picture["name"] = one_line(result.name)
    picture["memories"] = [
        {
            **memory,
            "name": "the host" if memory["host"] else device,
            "views": {
                view: [[one_line(label), runs] for label, runs in bands]
                for view, bands in memory["views"].items()
            },
            "places": [_place(place, holders.get(place[0], [])) for place in memory["places"]],
        }
        for memory in picture["memories"]
    ]
    return picture


def _place(place: Sequence[Any], held_by: Sequence[str]) -> list[Any]:
    *texts, callers = place
    return [*map(one_line, texts), [one_line(line) for line in callers], held_by]


def _holders(result: Result) -> dict[str, list[str]]:
    """Return line -> expressions that hold what it allocated, as far as they were searched for."""
    record = result.record
    found: dict[str, list[str]] = {}
    for holding in (*record.retained, *record.grown, *record.host_retained):
        if holding.created_at and holding.held_by:
            of_line = found.setdefault(holding.created_at[0], [])
            if holding.held_by not in of_line and len(of_line) < _MOST_HOLDERS:
                of_line.append(one_line(holding.held_by))
    return found
