"""The trends of a history as text, and as a picture."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from tabulate import tabulate

from pytest_cka_memory.core.tolerance import Tolerance
from pytest_cka_memory.history.file import HistorySession
from pytest_cka_memory.history.trend import Series, Step, series_of
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.reports.tables import share_of_change, sparkline
from pytest_cka_memory.units import counted, format_with_unit

_BARS = 24
_ALIGN = ("left", "left", "right", "left", "right", "right")


def as_text(sessions: Sequence[HistorySession], tolerance: Tolerance, *, every: bool) -> str:
    """Return every figure that changed with a sparkline, then the commits at which it rose.

    With `every`, also the figures that never changed.
    """
    found = series_of(sessions)
    changed = [series for series in found if len(set(series.sizes)) > 1]
    lines = [
        *_table(found if every else changed),
        *_rises(changed, tolerance),
        f"{counted(len(sessions), 'session')} from {sessions[0].day} to {sessions[-1].day}: "
        f"{len(changed)} of {counted(len(found), 'figure')} changed",
    ]
    return "\n".join([*lines, ""])


def _table(found: Sequence[Series]) -> Iterator[str]:
    rows = iter(
        tabulate(
            [_cells(series) for series in found],
            tablefmt="plain",
            disable_numparse=True,
            colalign=_ALIGN,
        ).splitlines()
        if found
        else []
    )
    for (device, meter), of_device in groupby(found, key=lambda series: series.key[:2]):
        yield one_line(f"on {device} ({meter})")
        for region, of_region in groupby(of_device, key=lambda series: series.key.region):
            yield f"  {one_line(region)}"
            yield from (f"    {next(rows)}".rstrip() for _ in of_region)
        yield ""


def _cells(series: Series) -> list[str]:
    first, last = series.sizes[0], series.sizes[-1]
    return [
        series.key.name,
        sparkline(series.sizes, _BARS),
        format_with_unit(first),
        "->",
        format_with_unit(last),
        share_of_change(first, last) if first and first != last else "",
    ]


def _rises(found: Sequence[Series], tolerance: Tolerance) -> Iterator[str]:
    steps = [(series, step) for series in found for step in series.steps(tolerance)]
    steps.sort(key=lambda pair: (pair[1].after.session.date, -_rise(pair[1])))
    for session, group in groupby(steps, key=lambda pair: pair[1].after.session):
        rises = list(group)
        yield one_line(f"rose at {session.name} ({session.day}){_notes(rises[0][1])}:")
        yield from (f"  {one_line(_sentence(series, step))}" for series, step in rises)
    if steps:
        yield ""


def _sentence(series: Series, step: Step) -> str:
    old, new = step.before.size_bytes, step.after.size_bytes
    share = f" ({share_of_change(old, new)})" if old else ""
    stayed = "and stayed" if step.confirmed else "in the newest session"
    return (
        f"{series.key.region}: {series.key.name} "
        f"{format_with_unit(old)} -> {format_with_unit(new)}{share} {stayed}"
    )


def _notes(step: Step) -> str:
    before, after = step.before, step.after
    parts = []
    if before.session.commit == after.session.commit:
        parts.append("the commit of the session before")
    elif before.session.commit is not None:
        parts.append(f"last measured at {before.session.name}")
    if before.torch != after.torch:
        parts.append(f"torch {before.torch} -> {after.torch}")
    return "".join(f", {part}" for part in parts)


def _rise(step: Step) -> int:
    return step.after.size_bytes - step.before.size_bytes


_ROW, _LEFT, _WIDTH, _PLOT = 44, 16, 880, 400
_STYLE = (
    "text{font:13px sans-serif;fill:#1f2328}.small{font-size:11px;fill:#59636e}"
    "svg{background:#fff}polyline{fill:none;stroke:#0969da;stroke-width:1.5}"
    ".step{fill:#cf222e}"
    "@media(prefers-color-scheme:dark){svg{background:#0d1117}text{fill:#f0f6fc}"
    ".small{fill:#9198a1}polyline{stroke:#4493f8}.step{fill:#ff7b72}}"
)


def as_svg(sessions: Sequence[HistorySession], tolerance: Tolerance) -> str:
    """Return a picture with a line per figure that changed, and a dot where one rose and stayed."""
    changed = [series for series in series_of(sessions) if len(set(series.sizes)) > 1]
    height = _ROW * max(1, len(changed)) + 2 * _LEFT
    body = [part for n, series in enumerate(changed) for part in _row(n, series, tolerance)]
    body = body or [f'<text x="{_LEFT}" y="32">no figure changed</text>']
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}"><style>{_STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _row(number: int, series: Series, tolerance: Tolerance) -> Iterator[str]:
    top = _LEFT + number * _ROW
    low, high = min(series.sizes), max(series.sizes)
    left, right = _LEFT + _PLOT, _WIDTH - 160
    places = [
        (
            left + (right - left) * index / (len(series.sizes) - 1),
            top + (_ROW - 16) * (1 - (size - low) / (high - low)) + 4,
        )
        for index, size in enumerate(series.sizes)
    ]
    key = series.key
    name = one_line(key.region)
    shown = name if len(name) <= 56 else f"…{name[-55:]}"
    yield f'<text x="{_LEFT}" y="{top + 14}">{escape(shown)}</text>'
    device = f"{key.name} on {key.device}"
    yield f'<text class="small" x="{_LEFT}" y="{top + 29}">{escape(one_line(device))}</text>'
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    for step in series.steps(tolerance):
        x, y = places[series.points.index(step.after)]
        title = escape(one_line(f"{step.after.session.name}: {_sentence(series, step)}"))
        dot = f'<circle class="step" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        yield f"{dot}<title>{title}</title></circle>"
    sizes = f"{format_with_unit(series.sizes[0])} → {format_with_unit(series.sizes[-1])}"
    yield f'<text class="small" x="{right + 10}" y="{top + 20}">{sizes}</text>'
