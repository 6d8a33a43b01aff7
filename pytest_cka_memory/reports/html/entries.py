"""The broken limits of a page: each with its first cause in an open line, and its chart beside."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.reports.causes import Cause, Entry
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.html.charts import chart_of, owners, timeline
from pytest_cka_memory.units import counted, format_with_unit

_BREAKS = re.compile(r"(?<=/)|(?<=::)|(?<=_)|(?=\[)")
_MOST_ENTRIES = 50
_MOST_NAMED = 200


def section(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the section on problems; nothing if there are none."""
    if not entries:
        return
    yield "<section aria-labelledby='look'><h2 id='look'>Problems</h2>"
    yield "<ul class='problems'>"
    for entry in entries[:_MOST_ENTRIES]:
        yield from _entry(entry)
    yield "</ul>"
    if len(entries) > _MOST_ENTRIES:
        yield f"<p>And {len(entries) - _MOST_ENTRIES:,} more, in the table above.</p>"
    yield "</section>"


def css_class(verdict: str) -> str:
    """Return a verdict as the name of its style: ``not-judged``, ``known-xfail``."""
    return verdict.replace(" ", "-").replace("(", "").replace(")", "").lower()


def _entry(entry: Entry) -> Iterator[str]:
    verdict = entry.problems[0].verdict
    count = len(entry.results)
    yield "<li><div class='text'>"
    same = f" <span class='same'>{count:,} equal regions, the worst:</span>" if count > 1 else ""
    yield f"<p><span class='verdict {css_class(verdict)}'>{verdict}</span>{same} "
    yield f"<code class='name'>{_name(entry.result.name)}</code></p>"
    for problem in entry.problems:
        limit = f"<code>{_text(problem.limit)}</code>: " if problem.limit else ""
        yield f"<p>{limit}{_text(problem.sentence)}</p>"
    if entry.cause is not None:
        yield from _cause(entry.cause)
    yield from _details(entry)
    yield "</div>"
    figures = list(_figures(entry))
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


def _details(entry: Entry) -> Iterator[str]:
    lines = [_text(line) for problem in entry.problems for line in problem.holders]
    if lines:
        text = "\n".join(lines)
        yield f"<details><summary>Everything that is known</summary><pre>{text}</pre></details>"
    others = [result for result in entry.results if result is not entry.result]
    if others:
        names = [f"<li><code>{_name(result.name)}</code></li>" for result in others[:_MOST_NAMED]]
        more = len(others) - _MOST_NAMED
        yield f"<details><summary>{counted(len(others), 'other region')}</summary>"
        yield "<ul class='equal'>"
        yield from names
        yield f"<li>and {more:,} more, in the table above</li>" if more > 0 else ""
        yield "</ul></details>"


def _figures(entry: Entry) -> Iterator[str]:
    record = entry.result.record
    if not entry.breaches:
        return
    chart = chart_of(record, entry.breaches)
    if chart is not None:
        yield from timeline(chart)
    for breach in _owned(entry.breaches):
        if chart is None or breach.figure != "retained_bytes":
            yield from owners(breach, record)


def _owned(breaches: Sequence[Breach]) -> Iterator[Breach]:
    """Yield the limits whose bytes belong to owners: growth is a rise, and so it has none."""
    seen = set()
    for breach in breaches:
        if breach.figure in ("peak_increase_bytes", "retained_bytes") and breach.figure not in seen:
            seen.add(breach.figure)
            yield breach


def _name(name: str) -> str:
    """Return a name in which lines may break after a folder, a class or a word."""
    return "<wbr>".join(map(escape, _BREAKS.split(one_line(name))))


def _text(text: str) -> str:
    return escape(one_line(text))
