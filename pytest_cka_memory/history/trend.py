"""How the figures of a history developed, and at which commits they rose and stayed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pytest_cka_memory.core.conditions import FACTS, USUAL, Conditions
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.core.tolerance import Tolerance
from pytest_cka_memory.history.file import HistoryDevice, HistorySession


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


def series_of(found: Iterable[HistorySession]) -> list[Series]:
    """Return every series with a known figure, by device and region, in the order of figures."""
    sessions, points = list(found), dict[SeriesKey, list[Point]]()
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
                            on := _conditions(device, figure),
                            tuple(fact for fact in on if fact[0] in varying),
                        )
                        points.setdefault(key, []).append(Point(session, size, device.torch))
    order = {figure: number for number, figure in enumerate(COMPARED)}
    keys = sorted(points, key=lambda key: (key[:4], order[key.figure], key.conditions))
    alone = Counter(key._replace(conditions=(), varying=()) for key in keys)
    return [
        Series(key, tuple(points[key]))
        for key in keys
        # What stands in the place of another figure says nothing new on a single machine.
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
    return {fact for fact, found in values.items() if len(found) > 1}


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
