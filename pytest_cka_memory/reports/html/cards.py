"""The table of tests and cards as an HTML page, without scripts and loading nothing."""

from collections.abc import Iterator, Sequence
from html import escape

from pytest_cka_memory.core.card_uses import FITS, OUT_OF_MEMORY, SKIPPED, CardUse
from pytest_cka_memory.reports import cards
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.html import template

_WORDS = 3
"""Columns of text; figures follow."""


def render(uses: Sequence[CardUse]) -> str:
    """Return the page as HTML, with one row for each test and card."""
    ordered = cards.by_test(uses)
    titles = cards.head(uses)
    parts = {
        "VERDICT": escape(cards.verdict(uses)),
        "STYLE": template.text_of("page.css"),
        "HEAD": "".join(_head(titles)),
        "ROWS": "\n".join(_row(use, titles) for use in ordered),
        "FAILED": "\n".join(_failed(ordered)),
        "LEGEND": escape(cards.legend(uses)),
    }
    return template.fill("cards.html", parts)


def _head(titles: Sequence[str]) -> Iterator[str]:
    for place, title in enumerate(titles):
        yield f"<th scope='col'{' class=word' if place < _WORDS else ''}>{title.capitalize()}</th>"


def _row(use: CardUse, titles: Sequence[str]) -> str:
    cells = [
        f"<td class='name'><code>{_text(use.test)}</code></td>",
        f"<td class='word' data-label='Card'>{_text(use.card)}</td>",
        f"<td class='result' data-label='Result'>{_result(use)}{_bar(use)}</td>",
        *(
            f"<td data-label='{title.capitalize()}'>{figure}</td>"
            for title, figure in zip(titles[_WORDS:], cards.figures(use, titles), strict=True)
        ),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _result(use: CardUse) -> str:
    if use.result == OUT_OF_MEMORY:
        return f"<span class='verdict breach'>does not fit</span> {cards.missing(use)}"
    style = {FITS: "ok", SKIPPED: "no-limit"}.get(use.result, "breach")
    return f"<span class='verdict {style}'>{use.result}</span>"


def _bar(use: CardUse) -> str:
    """Return the shares of the card's memory that were live and in reserve; empty if unknown."""
    if use.result != FITS:
        return ""
    live = 100 * use.peak_bytes / use.usable_bytes
    reserve = 100 * max(0, use.reserved_bytes - use.peak_bytes) / use.usable_bytes
    return (
        f"<span class='bar' aria-hidden='true'><i style='width:{live:.2f}%'></i>"
        f"<i class='base' style='width:{reserve:.2f}%'></i></span>"
    )


def _failed(uses: Sequence[CardUse]) -> Iterator[str]:
    failed = [use for use in uses if use.result not in (FITS, OUT_OF_MEMORY)]
    if not failed:
        return
    yield "<h2>Tests that failed or were skipped</h2><ul>"
    for use in failed:
        yield f"<li>{_text(use.card)}, <code>{_text(use.test)}</code>: {_text(use.message)}</li>"
    yield "</ul>"


def _text(text: str) -> str:
    return escape(one_line(text))
