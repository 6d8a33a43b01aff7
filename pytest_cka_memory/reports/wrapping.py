"""Wrap lines for a terminal between words; code and places in files stay whole if they fit."""

import re
import textwrap

_LEAST = 40
_TOGETHER = re.compile(r"`[^`]*`|\S+:\d+ in \S+")
"""A code span, or a line of a file and its function."""
_JOINT = re.compile(r"(?=[.[])|(?<=/)|(?<=::)")
_GLUE = "\ue000"
"""A character in place of a space at which a line does not end."""
_BREAK = "\v"
"""A character that textwrap takes for a space and that no name has."""


def wrapped(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return `text` as lines of at most `width` characters; at least 40 are used.

    A word that is longer than a line is broken at dots, brackets, slashes and colons.

    Args:
        text: one line.
        width: characters of a line, with its indentation.
        indent: start of the first line.
        hanging: start of the other lines; by default two spaces more than the first.
    """
    hanging = f"{indent}  " if hanging is None else hanging
    width = max(_LEAST, width)
    room = width - max(len(indent), len(hanging))

    def glued(part: re.Match[str]) -> str:
        return part[0].replace(" ", _GLUE) if len(part[0]) < room else part[0]

    long_word = re.compile(rf"\S{{{room},}}")
    marked = long_word.sub(lambda word: _JOINT.sub(_BREAK, word[0]), _TOGETHER.sub(glued, text))
    lines = textwrap.wrap(
        marked,
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [line.replace(_BREAK, "").replace(_GLUE, " ") for line in lines]
