"""What keeps memory, as pictures: the references from a name to each group, from top to bottom.

A picture is as wide as a narrow phone and grows downward, so that its text keeps its size there.
"""

from collections.abc import Iterator, Sequence
from html import escape

from pytest_cka_memory.core.holdings import Holding, Link
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import summary
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.units import counted, format_with_unit

_MOST_REGIONS = 50
_MOST_GROUPS = 10
_WIDTH = 336
_LINE = 18
"""Height of a line of text."""
_PADDING = 8
_ARROW = 14
"""Height of the line below the text of a reference, with its head."""
_BOX_CHARACTERS = 38
_REFERENCE_CHARACTERS = 36


def section(results: Sequence[Result]) -> Iterator[str]:
    """Yield the section with all pictures; nothing if no path was asked for or found."""
    known = [(result, groups) for result in results if (groups := _groups(result))]
    if not known:
        return
    yield "<section id='holders' aria-labelledby='holders-title'>"
    yield "<h2 id='holders-title'>What keeps memory</h2>"
    for result, groups in summary.cut(known, _MOST_REGIONS, lambda each: each[0].nodeid):
        yield f"<h3><code class='name'>{_text(result.name)}</code></h3>"
        for title, holding in groups[:_MOST_GROUPS]:
            yield from figure(holding, title)
        yield from _left_out(len(groups) - _MOST_GROUPS, "smaller group")
    yield from _left_out(len(known) - _MOST_REGIONS, "more region")
    yield "</section>"


def figure(holding: Holding, title: str) -> Iterator[str]:
    """Yield the paths to the largest tensor of a group, with what must go to free it."""
    made = f", made at <code>{_text(holding.made_at)}</code>" if holding.created_at else ""
    yield "<figure class='paths'><figcaption>"
    yield f"<b>{format_with_unit(holding.bytes)}</b> {title}{made}"
    if len(holding.paths) > 1:
        count = "Two" if len(holding.paths) == 2 else f"{len(holding.paths)}"
        every = "both" if len(holding.paths) == 2 else "all"
        yield f"<br>{count} things keep it: {every} must go to free it."
    yield "</figcaption>"
    for path in holding.paths:
        yield f"<div class='path'>{''.join(picture(path))}</div>"
    yield "</figure>"


def picture(path: Sequence[Link]) -> Iterator[str]:
    """Yield the SVG of a path: a box for each object, an arrow for each reference."""
    parts: list[str] = []
    top = 1
    for number, link in enumerate(path):
        if number:
            drawn, top = _arrow(link.reference, top)
            parts += drawn
        style = "root" if number == 0 else "held" if number == len(path) - 1 else "object"
        drawn, top = _box(link.object, top, style)
        parts += drawn
    yield f"<svg viewBox='0 0 {_WIDTH} {top + 1}' role='img' aria-label='{_text(sentence(path))}'>"
    yield from parts
    yield "</svg>"


def sentence(path: Sequence[Link]) -> str:
    """Return a path as text, for those who do not see the picture."""
    first, *rest = path
    steps = (f"{link.reference or 'on'} to {link.object}" for link in rest)
    return ", then ".join([f"From {first.object}", *steps])


def _groups(result: Result) -> list[tuple[str, Holding]]:
    record = result.record
    named = {
        "retained": record.retained,
        "allocated and kept in several batches": record.grown,
        "retained on the host": record.host_retained,
    }
    found: dict[object, tuple[str, Holding]] = {}
    for title, holdings in named.items():
        for holding in holdings:
            if holding.paths:  # what grows is retained, too, and one picture of it is enough
                found.setdefault((holding.paths, holding.created_at), (title, holding))
    return list(found.values())


def _box(text: str, top: int, style: str) -> tuple[list[str], int]:
    lines = _lines(text, _BOX_CHARACTERS)
    height = len(lines) * _LINE + 2 * _PADDING
    drawn = [
        f"<g class='{style}'><rect x='1' y='{top}' width='{_WIDTH - 2}' height='{height}' rx='5'/>",
        *_written(lines, 12, top + _PADDING),
        "</g>",
    ]
    return drawn, top + height


def _arrow(text: str, top: int) -> tuple[list[str], int]:
    lines = _lines(text, _REFERENCE_CHARACTERS) if text else []
    bottom = top + max(len(lines), 1) * _LINE + _ARROW
    drawn = [
        f"<path d='M18,{top}V{bottom - 6}'/>",
        f"<path class='head' d='M13,{bottom - 8}L18,{bottom}L23,{bottom - 8}z'/>",
        *_written(lines, 32, top + _ARROW // 2, "link"),
    ]
    return drawn, bottom


def _written(lines: Sequence[str], left: int, top: int, style: str = "") -> Iterator[str]:
    named = f" class='{style}'" if style else ""
    for number, line in enumerate(lines):
        baseline = top + number * _LINE + 13
        yield f"<text{named} x='{left}' y='{baseline}'>{escape(line)}</text>"


def _lines(text: str, width: int) -> list[str]:
    """Return `text` in lines; code has few spaces, so that a line may end after any character."""
    text = one_line(text)
    return [text[start : start + width] for start in range(0, len(text), width)] or [""]


def _left_out(count: int, noun: str) -> Iterator[str]:
    if count > 0:
        yield f"<p class='notice'>{counted(count, noun)} not drawn.</p>"


def _text(text: str) -> str:
    return escape(one_line(text), quote=True)
