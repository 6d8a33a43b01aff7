"""Make any text safe for terminals, Markdown and GitHub: names may have any characters.

:mod:`.html.template` does the same for HTML.
"""

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BACKTICKS = re.compile(r"`+")
_PLAIN = re.compile(r"(?!.*(?:www\.|//))[A-Za-z0-9 ,.;:'()/%–-]*")


def one_line(text: str) -> str:
    """Return `text` with line breaks and control characters as escapes, safe for terminals."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def shorten(text: str, most: int) -> str:
    """Shorten `text` to `most` characters in its middle.

    A test's name begins with its file and ends with its parameters, so that both stay.
    """
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def code(text: str, most: int = 160) -> str:
    """Return `text` as a Markdown code span, so that it holds no markup, link or mention.

    Args:
        text: any text.
        most: characters; longer texts are shortened in the middle.

    Example:
        >>> code("a `b`")
        '`` a `b` ``'
    """
    shown = shorten(one_line(text), most)
    if not shown.strip():
        return repr(shown)
    marks = fence(shown)
    # Markdown removes one space at both ends of a span if it begins and ends with one.
    pad = " " if "`" in (shown[0], shown[-1]) or shown[0] == shown[-1] == " " else ""
    return f"{marks}{pad}{shown}{pad}{marks}"


def fence(text: str, least: int = 1) -> str:
    """Return a run of backticks longer than any in `text`."""
    longest = max(map(len, _BACKTICKS.findall(text)), default=0)
    return "`" * max(least, longest + 1)


def sentence(text: str, most: int = 400) -> str:
    """Return a sentence for Markdown: unchanged if it has no markup, otherwise as a code span."""
    return text if _PLAIN.fullmatch(text) and len(text) <= most else code(text, most)


def cell(text: str) -> str:
    """Return Markdown for a table cell, which a bar would end, even inside a code span."""
    return text.replace("|", "\\|")


def command_message(text: str) -> str:
    """Escape the message of a GitHub annotation (a workflow command), which must be one line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command_property(text: str) -> str:
    """Escape a property of a GitHub annotation, which a comma or a colon would end."""
    return command_message(text).replace(":", "%3A").replace(",", "%2C")
