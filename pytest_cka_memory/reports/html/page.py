"""The report as one HTML page that loads nothing from elsewhere and is readable without scripts.

The summary is plain HTML. The regions are embedded as JSON, and the script draws rows, bars and
timelines on demand. Template, style and script are the files ``page.*`` beside this one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.figures import COLUMNS, RegionRecord, shown_columns
from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import summary
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.failure import holding_lines
from pytest_cka_memory.reports.legend import heading, legend_of, provenance_of
from pytest_cka_memory.reports.summary import Problem

_FOLDER = Path(__file__).parent
_MOST_PROBLEMS = 50
_MOST_EXTRA = 400
_MOST_POINTS = 200
"""Points of a timeline: more than a line on a screen can show."""


def render(report: Report) -> str:
    """Return the page as HTML."""
    provenance = provenance_of(report.session)
    parts = {
        "TITLE": heading(provenance),
        "VERDICT": escape(summary.verdict(report)),
        "NOTICES": "\n".join(_notices(report, provenance.notice)),
        "NAVIGATION": '<a href="#regions">All regions</a> ' if report.results else "",
        "PROBLEMS": "\n".join(_problems(list(summary.problems(report.results)))),
        "FACTS": "\n".join(_facts(report)),
        "LEGEND": escape(legend_of(result.record for result in report.results)),
        "STYLE": _file("page.css"),
        "DATA": _embedded(_data(report, provenance.adjective)),
        "SCRIPT": _file("page.js"),
    }
    head, *rest = _file("page.html").split("{{")
    filled = [head]
    for piece in rest:  # in one pass, so that text from tests is never searched for placeholders
        name, _, following = piece.partition("}}")
        filled += [parts[name], following]
    return "".join(filled)


def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _notices(report: Report, notice: str) -> Iterator[str]:
    if notice:
        yield f"<p class='notice'>{escape(notice)}</p>"
    for problem in report.problems:
        yield f"<p class='notice breach'>FAILED: {escape(one_line(problem))}</p>"


def _facts(report: Report) -> Iterator[str]:
    for name, fact in summary.facts(report):
        yield f"<dt>{escape(name)}</dt><dd>{escape(one_line(fact))}</dd>"


def _problems(problems: Sequence[Problem]) -> Iterator[str]:
    if not problems:
        return
    yield "<section aria-labelledby='look'><h2 id='look'>Problems</h2>"
    yield "<ul class='problems'>"
    yield from map(_problem, problems[:_MOST_PROBLEMS])
    yield "</ul>"
    if len(problems) > _MOST_PROBLEMS:
        yield f"<p>And {len(problems) - _MOST_PROBLEMS:,} more, in the table below.</p>"
    yield "</section>"


def _problem(problem: Problem) -> str:
    limit = f"<code>{escape(one_line(problem.limit))}</code>: " if problem.limit else ""
    lines = escape("\n".join(map(one_line, problem.holders)))
    held = f"<details><summary>Who holds it</summary><pre>{lines}</pre></details>" if lines else ""
    return (
        f"<li><p><span class='verdict {_class(problem.verdict)}'>{problem.verdict}</span> "
        f"<code class='name'>{escape(one_line(problem.result.name))}</code></p>"
        f"<p>{limit}{escape(one_line(problem.sentence))}</p>{held}</li>"
    )


def _class(verdict: str) -> str:
    return re.sub(r"\W+", "-", verdict).strip("-").lower()


def _data(report: Report, adjective: str) -> dict[str, Any]:
    return {
        "notMeasured": adjective,
        "verdicts": summary.counts(report.results),
        "figures": [
            {"key": row.name, "title": row.column.capitalize()}
            for row in shown_columns(result.record for result in report.results)
        ],
        "columns": _FIELDS,
        "rows": [_row(result) for result in report.results],
    }


_FIELDS = (
    *("name", "verdict", "outcome", "worker"),
    *(figure.name for figure in COLUMNS),
    *("timeline", "step", "problems", "holders", "extra"),
)


def _row(result: Result) -> list[Any]:
    record = result.record
    points, step = _points(record.timeline)
    return [
        one_line(result.name),
        result.verdict,
        one_line(result.outcome),
        one_line(result.worker),
        *(getattr(record, figure.name) for figure in COLUMNS),
        points,
        step,
        [one_line(f"{one.limit}: {one.message}") for one in result.breaches]
        + [one_line(f"{one.limit}: {one.reason}") for one in result.unjudged],
        list(_held(record)),
        [
            one_line(f"{name}: {json.dumps(value, default=str)}"[:_MOST_EXTRA])
            for name, value in result.extra.items()
        ],
    ]


def _held(record: RegionRecord) -> Iterator[str]:
    groups = {
        "retained:": record.retained,
        "allocated and kept in several batches:": record.grown,
        "live at the peak:": record.at_peak,
        "retained on the host:": record.host_retained,
    }
    for title, holdings in groups.items():
        yield from [title] if holdings else []
        for holding in holdings:
            lines = holding_lines(holding, traced=holdings is not record.at_peak)
            yield from map(one_line, lines)


def _points(samples: Sequence[Sample]) -> tuple[list[list[int]], int]:
    """Return the highest live level and peak of every `step` batches, and that step."""
    step = -(-len(samples) // _MOST_POINTS) or 1
    if step == 1:
        return [[sample.allocated_bytes, sample.peak_bytes] for sample in samples], step
    groups = (samples[start : start + step] for start in range(0, len(samples), step))
    return [
        [max(s.allocated_bytes for s in group), max(s.peak_bytes for s in group)]
        for group in groups
    ], step


def _embedded(data: Any) -> str:
    """Return JSON for a script element, which a ``<`` in any text could otherwise end."""
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
