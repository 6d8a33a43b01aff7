"""The broken limits of a page: each with its first cause in an open line, and its chart beside."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.reports import summary
from pytest_cka_memory.reports.causes import Cause, ProblemGroup
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.html.charts import chart_of, owners, timeline
from pytest_cka_memory.units import counted, format_with_unit

_BREAKS = re.compile(r"(?<=/)|(?<=::)|(?<=_)|(?=\[)")
_MOST_GROUPS = 50
_MOST_NAMED = 200


def section(groups: Sequence[ProblemGroup]) -> Iterator[str]:
    """Yield the section on problems; nothing if there are none."""
    if not groups:
        return
    yield "<section aria-labelledby='look'><h2 id='look'>Problems</h2>"
    yield "<ul class='problems'>"
    for group in summary.cut(groups, _MOST_GROUPS, lambda group: group.result.nodeid):
        yield from _group(group)
    yield "</ul>"
    if len(groups) > _MOST_GROUPS:
        yield f"<p>And {len(groups) - _MOST_GROUPS:,} more, in the table above.</p>"
    yield "</section>"


def _css_class(verdict: str) -> str:
    """Return a verdict as the name of its style: ``not-judged``, ``known-xfail``."""
    return verdict.replace(" ", "-").replace("(", "").replace(")", "").lower()


def _group(group: ProblemGroup) -> Iterator[str]:
    verdict = group.problems[0].verdict
    count = len(group.results)
    yield "<li><div class='text'>"
    same = f" <span class='same'>{count:,} equal regions, the worst:</span>" if count > 1 else ""
    yield f"<p><span class='verdict {_css_class(verdict)}'>{verdict}</span>{same} "
    yield f"<code class='name'>{_name(group.result.name)}</code></p>"
    for problem in group.problems:
        limit = f"<code>{_text(problem.limit)}</code>: " if problem.limit else ""
        yield f"<p>{limit}{_text(problem.sentence)}</p>"
    if group.cause is not None:
        yield from _cause(group.cause)
    yield from _details(group)
    yield "</div>"
    figures = list(_figures(group))
    yield from ["<div class='figures'>", *figures, "</div>"] if figures else []
    yield "</li>"


def _cause(cause: Cause) -> Iterator[str]:
    parts = (
        f"{words} <code>{_text(code)}</code>" if code else words for words, code in cause.parts
    )
    size = f"<b>{format_with_unit(cause.holding.bytes)}</b>"
    yield f"<p class='cause'>{', '.join([size, *parts])}</p>"
    if cause.holding.hint:
        yield f"<p class='hint'>What to do: {_text(cause.holding.hint)}</p>"


def _details(group: ProblemGroup) -> Iterator[str]:
    lines = [_text(line) for problem in group.problems for line in problem.holders]
    if lines:
        text = "\n".join(lines)
        yield f"<details><summary>Everything that is known</summary><pre>{text}</pre></details>"
    others = [result for result in group.results if result is not group.result]
    if others:
        named = summary.cut(others, _MOST_NAMED, lambda result: result.nodeid)
        names = [f"<li><code>{_name(result.name)}</code></li>" for result in named]
        more = len(others) - _MOST_NAMED
        yield f"<details><summary>{counted(len(others), 'other region')}</summary>"
        yield "<ul class='equal'>"
        yield from names
        yield f"<li>and {more:,} more, in the table above</li>" if more > 0 else ""
        yield "</ul></details>"


def _figures(group: ProblemGroup) -> Iterator[str]:
    record = group.result.record
    if not group.breaches:
        return
    chart = chart_of(record, group.breaches)
    if chart is not None:
        yield from timeline(chart)
    for breach in _owned(group.breaches):
        if chart is None or FIGURES[breach.figure].explained_by == "at_peak":
            yield from owners(breach, record)


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
    return "<wbr>".join(map(escape, _BREAKS.split(one_line(name))))


def _text(text: str) -> str:
    return escape(one_line(text))
