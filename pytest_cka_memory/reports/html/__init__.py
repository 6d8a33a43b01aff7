"""Results as HTML pages that load nothing from elsewhere and are readable without scripts.

This module itself has what all pages need: texts, tables and data in HTML, and how placeholders
such as ``{{TITLE}}`` are filled. Templates, styles and scripts are files beside it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pytest_cka_memory.reports import one_line

_FOLDER = Path(__file__).parent


def text(plain: str) -> str:
    """Return any text as HTML on one line, for content and for attributes."""
    return escape(one_line(plain))


def lines(plain: str) -> str:
    """Return text of several lines as HTML."""
    return "\n".join(text(line) for line in plain.splitlines())


def text_of(name: str) -> str:
    """Return the text of a file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def fill(name: str, parts: Mapping[str, str]) -> str:
    """Return a template with its placeholders replaced.

    Works in one pass, so that text from tests is never searched for placeholders.

    Args:
        name: a file beside this module.
        parts: HTML for each placeholder, which may have more than the template needs.

    Raises:
        KeyError: if `parts` lacks a placeholder of the template.
    """
    head, *rest = text_of(name).split("{{")
    filled = [head]
    for text_after in rest:
        placeholder, _, following = text_after.partition("}}")
        filled += [parts[placeholder], following]
    return "".join(filled)


def plain_page(heading: str, verdict: str, main: str, style: str = "") -> str:
    """Return a page without scripts.

    Args:
        heading: what the page is about.
        verdict: the outcome in one line, below the heading; empty if there is none.
        main: the content, as HTML.
        style: styles beside those of all pages.
    """
    parts = {
        "TITLE": text(f"{heading}: {verdict}" if verdict else heading),
        "STYLE": f"{text_of('page.css')}{style}",
        "HEADING": heading,
        "HEADLINE": f'<p class="headline">{text(verdict)}</p>' if verdict else "",
        "MAIN": main,
    }
    return fill("plain.html", parts)


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Return a table whose rows are shown as cards on a narrow page, one card for each row.

    Args:
        columns: title -> the class of its cells: ``name`` for what names a row, ``word`` and
            ``result`` for text, empty for figures.
        rows: HTML for each cell of each row.
        note: the last row, as text; empty if there is none.
    """
    heads = (
        f"<th scope='col'{' class=word' if kind else ''}>{title}</th>"
        for title, kind in columns.items()
    )
    lines = [f"<tr>{''.join(map(_cell, columns.items(), row))}</tr>" for row in rows]
    if note:
        lines.append(f"<tr><td class='name' colspan='{len(columns)}'>{note}</td></tr>")
    top = (
        f"<div class='scroll'><table class='cards'><thead><tr>{''.join(heads)}</tr></thead><tbody>"
    )
    return "\n".join([top, *lines, "</tbody></table></div>"])


def _cell(column: tuple[str, str], content: str) -> str:
    title, kind = column
    style = f" class='{kind}'" if kind else ""
    label = "" if kind == "name" else f" data-label='{title}'"
    return f"<td{style}{label}>{content}</td>"


def embedded(data: Any) -> str:
    """Return JSON for a script element, which a ``<`` in any text could otherwise end."""
    # ASCII only, so that no text depends on how a browser decodes the page.
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
