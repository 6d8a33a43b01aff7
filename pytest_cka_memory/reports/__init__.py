"""Results to text: every module here takes plain results and returns lines or strings.

This module itself has what all of them do with a text. Names may have any characters, so a text is
made safe for terminals, Markdown and GitHub (:mod:`.html` does the same for HTML).
Sentences and names are fitted into the width of a terminal, and the cells of a table are aligned.
Which columns there is room for is decided in :mod:`.terminal`.

Names stay different if they are shortened; code and places in files stay whole if there is room.
"""

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.figures import RegionRecord

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


_LEAST = 40
_TOGETHER = re.compile(r"`[^`]*`|\S+:\d+ in \S+")
"""A code span, or a line of a file and its function."""
_JOINT = re.compile(r"(?=[.[])|(?<=/)|(?<=::)")
_GLUE = "\ue000"
"""A character in place of a space at which a line does not end."""
_BREAK = "\v"
"""A character that textwrap treats as a space and that no name has."""
_WORD_START = re.compile(r"(?<=[\[\]\-_:/. ,])")


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


def kinds_lines(record: RegionRecord, figure: str, width: int, indent: str = "  ") -> Iterator[str]:
    """Yield the shares of the kinds of memory at the peak, as lines that end after a percentage.

    Args:
        record: the region.
        figure: the figure that is explained, as for :func:`.sentences.kinds_line`.
        width: characters of a line.
        indent: start of the first line.
    """
    # Lines are not wrapped at a no-break space, so that a number and its sign stay together.
    joined = sentences.kinds_line(record, figure).replace(" %", "\N{NO-BREAK SPACE}%")
    for text in wrapped(joined, width, indent):
        yield text.replace("\N{NO-BREAK SPACE}", " ")


def laid_out(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return a table as lines, with two spaces between its columns.

    Args:
        rows: the cells of each row. The names of the columns are a row like the others, because
            tabulate widens columns for a header.
        align: ``l`` or ``r`` for each column, which is then aligned to the left or the right.
    """
    if not rows:
        return []
    from tabulate import tabulate  # takes 20 ms, so only for a table

    sides = [{"l": "left", "r": "right"}[side] for side in align]
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=sides).splitlines()


def fitted(names: Sequence[str], room: int) -> list[str]:
    """Shorten names that are too long; names that differ stay different.

    Args:
        names: names of regions, in the order in which they are returned.
        room: characters of a name; at least 8 are used.
    """
    room = max(8, room)
    shown = {name: name for name in names if len(name) <= room}
    used = set(shown.values())
    for name, text in _cut([name for name in dict.fromkeys(names) if len(name) > room], room):
        number, unique = 1, text
        while unique in used:
            number += 1
            unique = f"{text[: room - len(str(number)) - 1]}~{number}"
        shown[name] = unique
        used.add(unique)
    return [shown[name] for name in names]


def _cut(names: Iterable[str], room: int, start: int = 0) -> list[tuple[str, str]]:
    """Return each name with its text from `start` on, without a part of its middle.

    If several texts are equal, the part in which their names begin to differ is shown instead.
    """
    names_of_text = defaultdict(list)
    for name in names:
        names_of_text[_shortened(name if start == 0 else f"…{name[start:]}", room)].append(name)
    pairs = []
    for text, equal in names_of_text.items():
        if len(equal) == 1:
            pairs.append((equal[0], text))
            continue
        first, last = min(equal), max(equal)
        letters = enumerate(zip(first, last, strict=False))
        differs = next((n for n, (letter, other) in letters if letter != other), len(first))
        # Begin with a word, if one begins shortly before the difference.
        words = (match.start() for match in _WORD_START.finditer(equal[0], 0, differs))
        pairs += _cut(equal, room, max(1, differs - (room // 3 - 2), *words))
    return pairs


def _shortened(name: str, room: int) -> str:
    """Leave out a part in the middle, if possible before the parameters of a test."""
    if len(name) <= room:
        return name
    bracket = name.find("[")
    end = max(room // 2, min(len(name) - bracket, room * 2 // 3)) if bracket > 0 else room // 2
    return f"{name[: room - end - 1]}…{name[-end:]}"
