"""The report as one HTML page, and a page of what would lower the peaks of tests.

The problems are plain HTML with their charts, and so are the pictures of what keeps memory. The
regions and their memory over time are embedded as JSON, from which scripts draw a table and
further charts. Templates, styles and scripts are files beside this module.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import COLUMNS, FIGURES, RegionRecord
from pytest_cka_memory.core.record_parts import OTHER_LEVELS
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import Breach, Result
from pytest_cka_memory.reports import excess, html, one_line, summary
from pytest_cka_memory.reports.failure import WIDTH, holding_lines, is_reserve_the_cause
from pytest_cka_memory.reports.html import charts, stacks
from pytest_cka_memory.reports.html.charts import axis, plot
from pytest_cka_memory.reports.summary import Cause, ProblemGroup
from pytest_cka_memory.reports.tables import known_columns, legend_of, provenance_of
from pytest_cka_memory.units import counted, format_with_unit

_MOST_PROBLEMS = 50
_MOST_NAMED = 200
_MOST_HOLDING_REGIONS = 50
_MOST_GROUPS = 10
"""Pictures of what keeps memory, for one region."""
_MOST_DRAWN = 50
"""Regions whose memory over time is in a page: each may have 200 KB."""
_MOST_HOLDERS = 5
_MOST_EXTRA = 400
"""Characters of what another plugin has added to a region."""
_BREAKS = re.compile(r"(?<=/)|(?<=::)|(?<=_)|(?=\[)")
_NOT_RECORDED = (
    "<section id='over-time'><p class='notice'>Memory over time is not drawn: this meter counts "
    "tensors, and only the blocks of an allocator are recorded.</p></section>"
)
_GROUPS = {
    "retained": ("retained", "retained_bytes"),
    "allocated and kept in several batches": ("grown", "growth_bytes_per_batch"),
    "live at the peak": ("at_peak", "peak_bytes"),
    "retained on the host": ("host_retained", "host_retained_bytes"),
    "garbage in reference cycles": ("garbage", ""),
    "private pools": ("pools", "pools_increase_bytes"),
}
"""Title -> the field of a record with such groups, and the figure that they explain."""
_SEARCHED = ("retained", "grown", "host_retained")
"""The fields of groups to which references are searched for."""
_FIELDS = (
    *("name", "verdict", "outcome", "worker"),
    *(figure.name for figure in COLUMNS),
    *("timeline", "step", "chart", "cause", "broken", "group", "problems", "holders", "extra"),
)
"""What :func:`_row` returns of a region; ``page.js`` reads it by these names."""


def render(report: Report) -> str:
    """Return the page as HTML."""
    provenance = provenance_of(report.session)
    columns = known_columns(report.results)
    groups = summary.problem_groups(report.results)
    timeline = timeline_section(report)
    holders = "\n".join(holder_section(report.results))
    more = {"timeline.css": timeline, "paths.css": holders}
    # A page without these sections is much smaller without their styles.
    styles = ["page.css", *(name for name, part in more.items() if part)]
    links = {
        '<a href="#regions">All regions</a> ': report.results,
        '<a href="#holders">What keeps memory</a> ': holders,
        '<a href="#over-time">Memory over time</a> ': timeline,
    }
    notice = [f"<p class='notice'>{provenance.notice}</p>"] if provenance.notice else []
    failed = (
        f"<p class='notice breach'>FAILED: {html.text(problem)}</p>" for problem in report.problems
    )
    facts = (
        f"<dt>{html.text(name)}</dt><dd>{html.text(fact)}</dd>"
        for name, fact in summary.facts(report)
    )
    parts = {
        "TITLE": provenance.heading,
        "VERDICT": html.text(summary.verdict(report)),
        "NOTICES": "\n".join([*notice, *failed]),
        "NAVIGATION": "".join(link for link, part in links.items() if part),
        "TIMELINE": timeline,
        "PROBLEMS": "\n".join(problem_section(groups)),
        "HOLDERS": holders,
        "FACTS": "\n".join(facts),
        "LEGEND": html.text(legend_of(columns)),
        "STYLE": "".join(map(html.text_of, styles)),
        "DATA": html.embedded(_data(report, groups, columns)),
        "SIZES": html.text_of("sizes.js"),
        "SCRIPT": html.text_of("page.js"),
    }
    return html.fill("page.html", parts)


def _data(
    report: Report, groups: Sequence[ProblemGroup], columns: Sequence[Figure]
) -> dict[str, Any]:
    # By identity, not by name, because a test may have measured the same region twice.
    numbers = {
        id(result): number
        for number, group in enumerate(groups)
        for result in group.results
        if group.breaches and len(group.results) > 1
    }
    return {
        "verdicts": summary.counts(report.results),
        "figures": [{"key": row.name, "title": row.column.capitalize()} for row in columns],
        "columns": _FIELDS,
        "rows": [_row(result, numbers.get(id(result))) for result in report.results],
    }


def _row(result: Result, group: int | None) -> list[Any]:
    record = result.record
    points = charts.points(record.timeline)
    chart = charts.chart_of(record, result.breaches)
    cause = summary.first_cause(result)
    broken = (FIGURES.get(breach.figure) for breach in result.breaches)
    problems = [(each.limit, each.message) for each in result.breaches]
    problems += [(each.limit, each.reason) for each in result.unjudged]
    extra = (f"{key}: {json.dumps(value, default=str)}" for key, value in result.extra.items())
    return [
        one_line(result.name),
        result.verdict,
        one_line(result.outcome),
        one_line(result.worker),
        *(figure.shown_value(record) for figure in COLUMNS),
        list(zip(points.levels, points.peaks, strict=True)),
        points.step,
        None if chart is None else chart.data,
        "" if cause is None else one_line(cause.line),
        sorted({row.shown_as or row.name for row in broken if row is not None}),
        group,
        [one_line(f"{limit}: {text}") for limit, text in problems],
        list(_held(record)),
        [one_line(text[:_MOST_EXTRA]) for text in extra],
    ]


def _held(record: RegionRecord) -> Iterator[str]:
    for title, (field, figure) in _GROUPS.items():
        holdings = getattr(record, field)
        if holdings:
            yield f"{title}:"
        at_peak = figure == "peak_bytes"
        if at_peak and (line := sentences.kinds_line(record, "peak_bytes")):
            yield line
        for holding in holdings:
            yield from map(one_line, holding_lines(holding, traced=not at_peak))
        if holdings and (line := sentences.sentence(record, figure)):
            yield line
    if record.reserve:
        yield "the reserve:"
        yield from map(one_line, excess.reserve_explanation(record, WIDTH))


def problem_section(groups: Sequence[ProblemGroup]) -> Iterator[str]:
    """Yield the section on problems; nothing if there are none."""
    if not groups:
        return
    yield "<section aria-labelledby='look'><h2 id='look'>Problems</h2>"
    yield "<ul class='problems'>"
    for group in summary.cut(groups, _MOST_PROBLEMS, lambda group: group.result.nodeid):
        yield from _problem(group)
    yield "</ul>"
    if len(groups) > _MOST_PROBLEMS:
        yield f"<p>And {len(groups) - _MOST_PROBLEMS:,} more, in the table above.</p>"
    yield "</section>"


def _problem(group: ProblemGroup) -> Iterator[str]:
    verdict = group.problems[0].verdict
    style = verdict.replace(" ", "-").replace("(", "").replace(")", "").lower()  # known-xfail
    count = len(group.results)
    same = f" <span class='same'>{count:,} equal regions, the worst:</span>" if count > 1 else ""
    yield "<li><div class='text'>"
    yield f"<p><span class='verdict {style}'>{verdict}</span>{same} "
    yield f"<code class='name'>{_name(group.result.name)}</code></p>"
    for problem in group.problems:
        limit = f"<code>{html.text(problem.limit)}</code>: " if problem.limit else ""
        yield f"<p>{limit}{html.text(problem.sentence)}</p>"
    if group.cause is not None:
        yield from _cause(group.cause)
    yield from _details(group)
    yield "</div>"
    figures = list(_figures(group))
    yield from ["<div class='figures'>", *figures, "</div>"] if figures else []
    yield "</li>"


def _cause(cause: Cause) -> Iterator[str]:
    parts = (
        f"{words} <code>{html.text(code)}</code>" if code else words for words, code in cause.parts
    )
    size = f"<b>{format_with_unit(cause.holding.bytes)}</b>"
    yield f"<p class='cause'>{', '.join([size, *parts])}</p>"
    if cause.holding.hint:
        yield f"<p class='hint'>What to do: {html.text(cause.holding.hint)}</p>"


def _details(group: ProblemGroup) -> Iterator[str]:
    lines = [html.text(line) for problem in group.problems for line in problem.holders]
    if lines:
        text = "\n".join(lines)
        yield f"<details><summary>Everything that is known</summary><pre>{text}</pre></details>"
    others = [result for result in group.results if result is not group.result]
    if others:
        yield f"<details><summary>{counted(len(others), 'other region')}</summary>"
        yield "<ul class='equal'>"
        for result in summary.cut(others, _MOST_NAMED, lambda result: result.nodeid):
            yield f"<li><code>{_name(result.name)}</code></li>"
        more = len(others) - _MOST_NAMED
        yield f"<li>and {more:,} more, in the table above</li>" if more > 0 else ""
        yield "</ul></details>"


def _figures(group: ProblemGroup) -> Iterator[str]:
    record = group.result.record
    if not group.breaches:
        return
    for other in charts.charts_of_other_levels(record, group.breaches):
        yield from charts.timeline(other)
    chart = charts.chart_of(record, group.breaches)
    if chart is not None and not all(breach.figure in OTHER_LEVELS for breach in group.breaches):
        yield from charts.timeline(chart)
    for breach in _owned(group.breaches):
        if chart is None or FIGURES[breach.figure].explained_by == "at_peak":
            yield from stacks.owners(breach, record)
    if any(is_reserve_the_cause(breach, record) for breach in group.breaches):
        yield from stacks.reserve(record)
        yield from stacks.segments(record)


def _owned(breaches: Sequence[Breach]) -> Iterator[Breach]:
    """Yield the limits whose bytes belong to owners: growth is a rise, and so it has none."""
    seen = set()
    for breach in breaches:
        figure = FIGURES.get(breach.figure)
        if figure is not None and figure.above_entry and breach.figure not in seen:
            seen.add(breach.figure)
            yield breach


def _name(name: str) -> str:
    """Return a name in which lines may break after a folder, a class or a word."""
    return "<wbr>".join(map(html.text, _BREAKS.split(one_line(name))))


def holder_section(results: Sequence[Result]) -> Iterator[str]:
    """Yield the section on what keeps memory; nothing if no path was asked for or found."""
    known = [(result, groups) for result in results if (groups := _groups_with_paths(result))]
    if not known:
        return
    yield "<section id='holders' aria-labelledby='holders-title'>"
    yield "<h2 id='holders-title'>What keeps memory</h2>"
    for result, groups in summary.cut(known, _MOST_HOLDING_REGIONS, lambda each: each[0].nodeid):
        yield f"<h3><code class='name'>{html.text(result.name)}</code></h3>"
        for title, holding in groups[:_MOST_GROUPS]:
            yield from charts.paths_of(holding, title)
        yield from _not_drawn(len(groups) - _MOST_GROUPS, "smaller group")
    yield from _not_drawn(len(known) - _MOST_HOLDING_REGIONS, "more region")
    yield "</section>"


def _groups_with_paths(result: Result) -> list[tuple[str, Holding]]:
    """Return title and group of each picture of a region."""
    groups: dict[object, tuple[str, Holding]] = {}
    for title, (field, _) in _GROUPS.items():
        for holding in getattr(result.record, field) if field in _SEARCHED else ():
            if holding.paths:  # what grows is retained, too, and one picture of it is enough
                groups.setdefault((holding.paths, holding.created_at), (title, holding))
    return list(groups.values())


def _not_drawn(count: int, noun: str) -> Iterator[str]:
    if count > 0:
        yield f"<p class='notice'>{counted(count, noun)} not drawn.</p>"


def timeline_section(report: Report) -> str:
    """Return the section on memory over time; empty if no region has recorded it."""
    pictures = [(result, result.record.memory_timeline) for result in report.results]
    drawn = [result for result, picture in pictures if picture and picture["memories"]]
    if not drawn:
        return _NOT_RECORDED if any(picture is not None for _, picture in pictures) else ""
    by_peak = sorted(drawn, key=lambda result: -result.record.peak_increase_bytes)
    chosen = summary.cut(by_peak, _MOST_DRAWN, lambda result: result.nodeid)
    device = str(report.session.get("device") or "the device")
    left = len(drawn) - len(chosen)
    more = (
        f"<p class='notice'>{counted(left, 'more region')} with lower peaks "
        f"{'is' if left == 1 else 'are'} not drawn: choose tests with "
        "<code>--cka-memory-timeline=PATTERN</code>.</p>"
        if left
        else ""
    )
    parts = {
        "CHOICE": "Region",
        "WHAT": "region",
        "MORE": more,
        "DATA": html.embedded([_picture(result, device) for result in chosen]),
        "SCRIPT": html.text_of("timeline.js"),
    }
    return html.fill("timeline.html", parts)


def _picture(result: Result, device: str) -> dict[str, Any]:
    """Return a region's memory over time for the script, with what holds it, as safe texts."""
    picture = dict(result.record.memory_timeline or {})
    holders = _holders_by_line(result.record)
    picture["name"] = one_line(result.name)
    picture["memories"] = [
        {
            **memory,
            "name": "the host" if memory["host"] else device,
            "views": {
                view: [[one_line(label), runs] for label, runs in bands]
                for view, bands in memory["views"].items()
            },
            "places": [
                [*map(one_line, texts), [*map(one_line, callers)], holders.get(texts[0], [])]
                for *texts, callers in memory["places"]
            ],
        }
        for memory in picture["memories"]
    ]
    return picture


def _holders_by_line(record: RegionRecord) -> dict[str, list[str]]:
    """Return line -> expressions that hold what it allocated, as far as they were searched for."""
    holders: dict[str, list[str]] = {}
    for holding in (*record.retained, *record.grown, *record.host_retained):
        if holding.created_at and holding.held_by:
            of_line = holders.setdefault(holding.created_at[0], [])
            if holding.held_by not in of_line and len(of_line) < _MOST_HOLDERS:
                of_line.append(one_line(holding.held_by))
    return holders


Levels = Sequence[tuple[float, int]]
"""Pairs of how much of a run has passed, from 0 to 100, and the bytes that are live from there."""


def render_repairs(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of what a command has found for each test.

    Args:
        found: for each test its name as ``test`` (and as ``label`` what to show instead, such as
            a script with its arguments), its report as ``text`` or its ``error``, the
            ``budget_bytes``, and as ``pictures`` a name and the levels of each run, that of the
            test as it is first.
    """
    sections = "\n".join(line for each in found for line in _repair_section(each))
    return html.plain_page("What lowers the peak", "", sections, html.text_of("repairs.css"))


def _repair_section(found: Mapping[str, Any]) -> Iterator[str]:
    yield "<section>"
    yield f"<h2>{html.text(found.get('label') or found['test'])}</h2>"
    if found.get("pictures"):
        before, *others = found["pictures"]
        for after in others:
            yield from _runs(before, after, found.get("budget_bytes"))
    text = found.get("text") or found["error"]
    yield f"<pre>{html.lines(text)}</pre>"
    yield "</section>"


def _runs(
    before: Mapping[str, Any], after: Mapping[str, Any], budget_bytes: int | None
) -> Iterator[str]:
    """Yield a figure of two runs, each stretched to the whole width."""
    runs = (("was", before), ("now", after))
    limits = [] if budget_bytes is None else [budget_bytes]
    sizes = [level for _, run in runs for _, level in run["levels"]]
    scale = axis([0, *sizes, *limits])
    highest = (max(level for _, level in run["levels"]) for _, run in runs)
    peaks = [
        f"{run['name']}: {format_with_unit(peak)}"
        for (_, run), peak in zip(runs, highest, strict=True)
    ]
    drawn = []
    for style, run in runs:
        # Each level lasts to the moment of the next.
        ends = [*(moment for moment, _ in run["levels"][1:]), 100.0]
        steps = zip(ends, (level for _, level in run["levels"]), strict=True)
        spots = (f"{100 - scale.share(level):.2f}H{end:.2f}" for end, level in steps)
        drawn.append(f"<path class='{style}' d='M0,{'V'.join(spots)}'/>")
    for limit in limits:
        drawn.append(f"<path class='limit' d='M0,{100 - scale.share(limit):.2f}h100'/>")
    yield f"<figure class='chart over-time'><p class='unit'>{scale.unit}</p>"
    yield from plot(scale, html.text("; ".join(peaks)), drawn)
    yield "<p class='axis'><span>first allocation</span><span>last release</span></p><figcaption>"
    for (style, _), peak in zip(runs, peaks, strict=True):
        yield f"<span class='key {style}'>{html.text(peak)}</span> "
    for limit in limits:
        yield f"<span class='key limit'>budget: {format_with_unit(limit)}</span> "
    yield "</figcaption></figure>"
