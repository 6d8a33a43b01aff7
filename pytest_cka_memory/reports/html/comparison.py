"""The comparison of two reports as an HTML page, without scripts: what is new at the peaks."""

from collections.abc import Iterator, Sequence
from html import escape

from pytest_cka_memory.core.peak_differences import PeakChange, PeakDifference
from pytest_cka_memory.core.two_reports import Change, Comparison
from pytest_cka_memory.reports import two_reports
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.html import template
from pytest_cka_memory.units import counted, format_size, format_with_unit

_MOST_ROWS = 1000
"""Of changed figures, and of lines for one region."""
_HEAD = ("Old", "New", "Change")


def render(found: Comparison, peaks: Sequence[PeakDifference], unknown: int) -> str:
    """Return the page as HTML.

    Args:
        found: the comparison of figures.
        peaks: what is new at the peaks.
        unknown: number of regions of which a report does not list what was live at the peak.
    """
    parts = {
        "VERDICT": _text(two_reports.verdict(found)),
        "STYLE": template.text_of("page.css"),
        "REMARKS": "".join(f"<li>{_text(text)}</li>" for text in two_reports.remarks(found)),
        "FIGURES": "\n".join(_figures(found.changes)),
        "PEAKS": "\n".join(part for peak in peaks for part in _peak(peak)),
        "UNKNOWN": _unknown(unknown, found.compared),
    }
    return template.fill("comparison.html", parts)


def _figures(changes: Sequence[Change]) -> Iterator[str]:
    for change in two_reports.cut(changes, _MOST_ROWS):
        noun, old, new, step, verdict = two_reports.cells(change)
        style = {"REGRESSION": "breach", "less": "ok"}.get(verdict, "no-limit")
        cells = zip(_HEAD, (old, new, step), strict=True)
        yield (
            f"<tr><td class='name'><code>{_text(change.key.name)}</code></td>"
            f"<td class='word' data-label='Figure'>{_text(noun)}</td>"
            f"{''.join(f'<td data-label={name}>{_text(value)}</td>' for name, value in cells)}"
            f"<td class='word' data-label='Verdict'><span class='verdict {style}'>"
            f"{_text(verdict)}</span></td></tr>"
        )
    if not changes:
        yield "<tr><td class='name' colspan='6'>No figure has changed.</td></tr>"
    elif len(changes) > _MOST_ROWS:
        yield f"<tr><td class='name' colspan='6'>and {len(changes) - _MOST_ROWS:,} more</td></tr>"


def _peak(peak: PeakDifference) -> Iterator[str]:
    old, new = format_with_unit(peak.old_bytes), format_with_unit(peak.new_bytes)
    yield f"<h3><code>{_text(peak.key.name)}</code></h3><p>peak {old}, now {new}</p>"
    heads = "".join(f"<th scope='col'>{name}</th>" for name in _HEAD)
    yield (
        "<div class='scroll'><table class='cards'><thead><tr>"
        f"<th scope='col' class='word'>Line and module</th><th scope='col' class='word'>Kind</th>"
        f"{heads}</tr></thead><tbody>"
    )
    yield from map(_row, peak.changes[:_MOST_ROWS])
    yield "</tbody></table></div>"


def _row(change: PeakChange) -> str:
    origin = change.origin
    code = f"<br><code>{_text(origin.code)}</code>" if origin.code else ""
    module = f"<br>in <code>{_text(origin.module)}</code>" if origin.module else ""
    is_new = not change.old_bytes
    step = "new" if is_new else "gone" if not change.new_bytes else ""
    rise = ("+" if change.rise_bytes > 0 else "-") + format_size(abs(change.rise_bytes))
    style = "breach" if change.rise_bytes > 0 else "ok"
    word = f" <span class='verdict {style}'>{step}</span>" if step else ""
    return (
        f"<tr><td class='name'><code>{_text(change.line)}</code>{code}{module}</td>"
        f"<td class='word' data-label='Kind'>{_text(origin.kind or '-')}</td>"
        f"<td data-label='Old'>{format_size(change.old_bytes)}</td>"
        f"<td data-label='New'>{format_size(change.new_bytes)}</td>"
        f"<td data-label='Change'>{rise}{word}</td></tr>"
    )


def _unknown(unknown: int, compared: int) -> str:
    if not unknown:
        return ""
    return (
        f"<p class='legend'>Not known for {unknown:,} of {counted(compared, 'region')}: reports "
        "list what was live at the peak for broken peak limits only; for every region if pytest "
        "ran with <code>--cka-memory-explain</code>.</p>"
    )


def _text(text: str) -> str:
    return escape(one_line(text))
