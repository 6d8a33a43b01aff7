"""Texts and data in HTML, and how placeholders such as ``{{TITLE}}`` of a template are filled.

Templates, styles and scripts are files beside this module.
"""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from pytest_cka_memory.reports.escapes import one_line

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


def embedded(data: Any) -> str:
    """Return JSON for a script element, which a ``<`` in any text could otherwise end."""
    # ASCII only, so that no text depends on how a browser decodes the page.
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
