"""What would lower the peaks of tests, as one HTML page with a picture of before and after."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cka_memory.reports import html
from pytest_cka_memory.reports.html.charts import axis, plot
from pytest_cka_memory.units import format_with_unit

Levels = Sequence[tuple[float, int]]
"""Pairs of how much of a run has passed, from 0 to 100, and the bytes that are live from there."""


def render(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of what a command has found for each test.

    Args:
        found: for each test its name as ``test`` (and as ``label`` what to show instead, such as
            a script with its arguments), its report as ``text`` or its ``error``, the
            ``budget_bytes``, and as ``pictures`` a name and the levels of each run, that of the
            test as it is first.
    """
    sections = "\n".join(line for each in found for line in _section(each))
    return html.plain_page("What lowers the peak", "", sections, html.text_of("repairs.css"))


def _section(found: Mapping[str, Any]) -> Iterator[str]:
    yield "<section>"
    yield f"<h2>{html.text(found.get('label') or found['test'])}</h2>"
    if found.get("pictures"):
        before, *others = found["pictures"]
        for after in others:
            yield from _picture(before, after, found.get("budget_bytes"))
    text = found.get("text") or found["error"]
    yield f"<pre>{html.lines(text)}</pre>"
    yield "</section>"


def _picture(
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
