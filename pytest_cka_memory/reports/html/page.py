"""The report as one HTML page that loads nothing from elsewhere and is readable without scripts.

The problems are plain HTML with their charts. The regions are embedded as JSON, and the script
draws the table and further charts. Template, style and script are the files ``page.*`` beside
this module.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from pytest_cka_memory.core import kinds, shares
from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.figures import COLUMNS, FIGURES, RegionRecord, shown_columns
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import causes, summary
from pytest_cka_memory.reports.causes import ProblemGroup
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.failure import holding_lines
from pytest_cka_memory.reports.html import paths, problems, template, timelines
from pytest_cka_memory.reports.html.charts import chart_of, points
from pytest_cka_memory.reports.legend import heading, legend_of, provenance_of

_MOST_EXTRA = 400


def render(report: Report) -> str:
    """Return the page as HTML."""
    provenance = provenance_of(report.session)
    columns = shown_columns(result.record for result in report.results)
    found = causes.problem_groups(report.results)
    timeline = timelines.section(report)
    holders = "\n".join(paths.section(report.results))
    more = {"timeline.css": timeline, "paths.css": holders}
    styles = ["page.css", *(name for name, part in more.items() if part)]
    parts = {
        "TITLE": heading(provenance),
        "VERDICT": escape(summary.verdict(report)),
        "NOTICES": "\n".join(_notices(report, provenance.notice)),
        "NAVIGATION": "".join(_navigation(report, timeline, holders)),
        "TIMELINE": timeline,
        "PROBLEMS": "\n".join(problems.section(found)),
        "HOLDERS": holders,
        "FACTS": "\n".join(_facts(report)),
        "LEGEND": escape(legend_of(columns)),
        "STYLE": "".join(map(template.text_of, styles)),
        "DATA": template.embedded(_data(report, found, columns)),
        "SIZES": template.text_of("sizes.js"),
        "SCRIPT": template.text_of("page.js"),
    }
    return template.fill("page.html", parts)


def _navigation(report: Report, timeline: str, holders: str) -> Iterator[str]:
    if report.results:
        yield '<a href="#regions">All regions</a> '
    if holders:
        yield '<a href="#holders">What keeps memory</a> '
    if timeline:
        yield '<a href="#over-time">Memory over time</a> '


def _notices(report: Report, notice: str) -> Iterator[str]:
    if notice:
        yield f"<p class='notice'>{escape(notice)}</p>"
    for problem in report.problems:
        yield f"<p class='notice breach'>FAILED: {escape(one_line(problem))}</p>"


def _facts(report: Report) -> Iterator[str]:
    for name, fact in summary.facts(report):
        yield f"<dt>{escape(name)}</dt><dd>{escape(one_line(fact))}</dd>"


def _data(
    report: Report, found: Sequence[ProblemGroup], columns: Sequence[Figure]
) -> dict[str, Any]:
    # By identity, because a test may have measured the same region twice.
    groups = {
        id(result): number
        for number, group in enumerate(found)
        for result in group.results
        if group.breaches and len(group.results) > 1
    }
    return {
        "verdicts": summary.counts(report.results),
        "figures": [{"key": row.name, "title": row.column.capitalize()} for row in columns],
        "columns": _FIELDS,
        "rows": [_row(result, groups.get(id(result))) for result in report.results],
    }


_FIELDS = (
    *("name", "verdict", "outcome", "worker"),
    *(figure.name for figure in COLUMNS),
    *("timeline", "step", "chart", "cause", "broken", "group", "problems", "holders", "extra"),
)


def _row(result: Result, group: int | None) -> list[Any]:
    record = result.record
    found = points(record.timeline)
    chart = chart_of(record, result.breaches)
    cause = causes.first_cause(result)
    return [
        one_line(result.name),
        result.verdict,
        one_line(result.outcome),
        one_line(result.worker),
        *(figure.shown_value(record) for figure in COLUMNS),
        list(zip(found.levels, found.peaks, strict=True)),
        found.step,
        None if chart is None else chart.data,
        "" if cause is None else one_line(cause.line),
        sorted(_broken(result)),
        group,
        [one_line(f"{one.limit}: {one.message}") for one in result.breaches]
        + [one_line(f"{one.limit}: {one.reason}") for one in result.unjudged],
        list(_held(record)),
        [
            one_line(f"{name}: {json.dumps(value, default=str)}"[:_MOST_EXTRA])
            for name, value in result.extra.items()
        ],
    ]


def _broken(result: Result) -> set[str]:
    """Return the columns whose figure broke a limit."""
    rows = (FIGURES.get(breach.figure) for breach in result.breaches)
    return {row.shown_as or row.name for row in rows if row is not None}


def _held(record: RegionRecord) -> Iterator[str]:
    groups = {
        "retained:": (record.retained, "retained_bytes"),
        "allocated and kept in several batches:": (record.grown, "growth_bytes_per_batch"),
        "live at the peak:": (record.at_peak, "peak_bytes"),
        "retained on the host:": (record.host_retained, "host_retained_bytes"),
        "garbage in reference cycles:": (record.garbage, ""),
    }
    for title, (holdings, figure) in groups.items():
        yield from [title] if holdings else []
        if holdings is record.at_peak:
            yield from filter(None, [kinds.line(record, "peak_bytes")])
        for holding in holdings:
            lines = holding_lines(holding, traced=holdings is not record.at_peak)
            yield from map(one_line, lines)
        yield from filter(None, [shares.sentence(record, figure) if holdings else ""])
