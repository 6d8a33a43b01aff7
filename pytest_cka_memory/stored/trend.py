"""The trend of each figure in a history, as text and as a picture."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import NamedTuple

from pytest_cka_memory.core.conditions import FACTS, USUAL, Conditions
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.core.verdicts import Tolerance
from pytest_cka_memory.reports import laid_out, one_line
from pytest_cka_memory.reports.tables import share_of_change, sparkline
from pytest_cka_memory.stored.history import HistoryDevice, HistorySession
from pytest_cka_memory.units import counted, format_with_unit


class SeriesKey(NamedTuple):
    """Identifies a series: figures of other devices and meters are not comparable."""

    device: str
    meter: str
    nodeid: str
    label: str
    figure: str
    conditions: Conditions = ()
    """The facts that the figure depends on: figures of other machines are other series."""

    varying: Conditions = ()
    """Those of them that are not the same in all sessions."""

    @property
    def name(self) -> str:
        """The figure as messages call it, and where it was measured if that varies."""
        on = ", ".join(f"{FACTS.get(fact, fact)} {value}" for fact, value in self.varying)
        return f"{COMPARED[self.figure].noun}{f' ({on})' if on else ''}"

    @property
    def region(self) -> str:
        """Test and label in one text."""
        return f"{self.nodeid} {self.label}".rstrip()


class Point(NamedTuple):
    """A figure in one session."""

    session: HistorySession
    size_bytes: int
    torch: str | None


@dataclass(frozen=True)
class Step:
    """A rise that the later sessions have kept."""

    before: Point
    """The last session with the old level."""
    after: Point
    """The first session with the new one."""
    confirmed: bool
    """Whether a later session has shown it again."""

    @property
    def rise_bytes(self) -> int:
        """By how much the figure rose."""
        return self.after.size_bytes - self.before.size_bytes


@dataclass(frozen=True)
class Series:
    """One figure of one region over all sessions that have it."""

    key: SeriesKey
    points: tuple[Point, ...]

    @property
    def sizes(self) -> list[int]:
        """The figure in each session, in bytes."""
        return [point.size_bytes for point in self.points]

    def steps(self, tolerance: Tolerance) -> Iterator[Step]:
        """Yield every rise by more than `tolerance` that no later session has undone.

        A single session that differs from both of its neighbours is an outlier and decides nothing:
        the median of three takes its place, which leaves steps where they are (Tukey 1977).
        """
        smooth = _without_outliers(self.sizes)
        lowest_later = _lowest_from_here(smooth)
        for number in range(1, len(smooth)):
            allowed = tolerance.allowed_bytes(smooth[number - 1])
            if smooth[number] > allowed and lowest_later[number] > allowed:
                yield self._step_at(number, allowed)

    def _step_at(self, number: int, allowed: int) -> Step:
        # An outlier just before the step may have moved it in the smooth series by one session.
        above = [n for n in range(number, len(self.points)) if self.sizes[n] > allowed]
        first = above[0]
        return Step(self.points[first - 1], self.points[first], confirmed=len(above) > 1)


def series_of(history: Iterable[HistorySession]) -> list[Series]:
    """Return every series with a known figure, by device and region, in the order of figures."""
    sessions, points = list(history), dict[SeriesKey, list[Point]]()
    varying = _varying(sessions)
    for session in sessions:
        for device in session.devices:
            for region in device.regions:
                for figure in COMPARED:
                    size = region.figures.get(figure)
                    if size is not None:
                        key = SeriesKey(
                            device.device,
                            device.meter,
                            region.nodeid,
                            region.label,
                            figure,
                            conditions := _conditions(device, figure),
                            tuple(fact for fact in conditions if fact[0] in varying),
                        )
                        points.setdefault(key, []).append(Point(session, size, device.torch))
    order = {figure: number for number, figure in enumerate(COMPARED)}
    keys = sorted(points, key=lambda key: (key[:4], order[key.figure], key.conditions))
    alone = Counter(key._replace(conditions=(), varying=()) for key in keys)
    return [
        Series(key, tuple(points[key]))
        for key in keys
        # A figure that may replace another shows nothing new on a single machine.
        if not (place := COMPARED[key.figure].in_place_of)
        or alone[key._replace(figure=place, conditions=(), varying=())] > 1
    ]


def _varying(sessions: Iterable[HistorySession]) -> set[str]:
    """Return the facts that are not the same in all sessions."""
    values: dict[str, set[str]] = {}
    known = [it.conditions for session in sessions for it in session.devices if it.conditions]
    for conditions in known:
        for fact in FACTS:
            values.setdefault(fact, set()).add(conditions.get(fact, USUAL))
    return {fact for fact, different in values.items() if len(different) > 1}


def _conditions(device: HistoryDevice, figure: str) -> Conditions:
    facts = COMPARED[figure].depends_on
    return tuple(
        (name, value) for name, value in (device.conditions or {}).items() if name in facts
    )


def _without_outliers(sizes: Sequence[int]) -> list[int]:
    inner = [int(median(sizes[n - 1 : n + 2])) for n in range(1, len(sizes) - 1)]
    return [*sizes[:1], *inner, *sizes[len(sizes) - 1 :]] if len(sizes) > 1 else list(sizes)


def _lowest_from_here(sizes: Sequence[int]) -> list[int]:
    lowest = list(sizes)
    for number in reversed(range(len(sizes) - 1)):
        lowest[number] = min(lowest[number], lowest[number + 1])
    return lowest


_BARS = 24


def as_text(sessions: Sequence[HistorySession], tolerance: Tolerance, *, every: bool) -> str:
    """Return every figure that changed with a sparkline, then the commits at which it rose.

    With `every`, also the figures that never changed.
    """
    every_series = series_of(sessions)
    changed = [series for series in every_series if len(set(series.sizes)) > 1]
    lines = [
        *_table(every_series if every else changed),
        *_rises(changed, tolerance),
        f"{counted(len(sessions), 'session')} from {sessions[0].day} to {sessions[-1].day}: "
        f"{len(changed)} of {counted(len(every_series), 'figure')} changed",
    ]
    return "\n".join([*lines, ""])


def _table(several: Sequence[Series]) -> Iterator[str]:
    rows = iter(laid_out([_cells(series) for series in several], "llrlrr"))
    for (device, meter), of_device in groupby(several, key=lambda series: series.key[:2]):
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


def _rises(several: Sequence[Series], tolerance: Tolerance) -> Iterator[str]:
    steps = [(series, step) for series in several for step in series.steps(tolerance)]
    steps.sort(key=lambda pair: (pair[1].after.session.date, -pair[1].rise_bytes))
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
