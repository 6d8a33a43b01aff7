"""Memory laws: how a figure of memory grows with sizes, as exact polynomials.

This module itself has what laws are made of, the runs of the measured code: the level of memory at
each allocation, and the nearest polynomials. These are for figures that no polynomial fits exactly,
such as with workspaces.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, product
from typing import Any, NamedTuple

from pytest_cka_memory.laws.polynomials import Point, Polynomial, Solver, exponents, nearest

_MOST_LEVELS = 20_000
"""Levels that travel on a report; of more, the highest of each line."""


class Site(NamedTuple):
    """The line that allocates. Equal in every run, also in another process."""

    frames: tuple[str, ...]
    """Innermost first, as in :class:`~pytest_cka_memory.core.allocations.AllocationSite`."""
    code: str | None = None
    """The expression at the innermost frame, if known."""

    def __str__(self) -> str:
        line = self.frames[0] if self.frames else "outside Python code"
        return line if self.code is None else f"{line}: {self.code}"

    def __reduce__(self) -> str | tuple[Any, ...]:
        for name in ("WHOLE", "OLDER"):  # which are known by their identity
            if self is globals()[name]:
                return name
        return Site, tuple(self)


WHOLE = Site((), None)
"""Stands for a figure of which only one number is known, not the level at each moment."""
OLDER = Site(("memory from before the step, which the step frees",), None)
"""Stands for what was live before a run and was freed in it: counts as less than nothing."""


class Moment(NamedTuple):
    """A moment of the measured code that can be found again in a run with other sizes."""

    site: Site
    """The line that has just allocated."""
    number: int | None
    """Which of its allocations, from 0; from the last one if negative; None for that with the
    highest level."""

    def __str__(self) -> str:
        return str(self.site)


class Block(NamedTuple):
    """A block of memory that a run allocated or freed. Events are numbered from 1."""

    bytes: int
    begin: int
    """The event of its allocation; 0 for one that is older than the run."""
    end: int
    """The event of its release; 0 if it was live at the end."""
    site: Site


class Sample:
    """What one run needed, relative to the level at its start.

    Args:
        point: the sizes of the run.
        value: the figure, such as the peak in requested bytes.
        levels: the level at each allocation, by line and in order; by default only `value`.
    """

    def __init__(
        self, point: Point, value: int, levels: Mapping[Site, Sequence[int]] | None = None
    ) -> None:
        self.point, self.value = point, value
        self.levels: Mapping[Site, Sequence[int]] = levels or {WHOLE: (value,)}

    def at(self, moment: Moment) -> int:
        """Return the level at a moment."""
        levels = self.levels[moment.site]
        return max(levels) if moment.number is None else levels[moment.number]

    def composition(self, moment: Moment) -> Mapping[Site, int]:
        """Return the bytes of each line that were live at a moment; empty if not known."""
        return {}

    def blocks_at(self, moment: Moment) -> Sequence[int]:
        """Return the bytes of each block of the run that was live at a moment."""
        return ()


class RecordedSample(Sample):
    """The same of a run of which every allocation and release was recorded.

    Args:
        point: the sizes of the run.
        blocks: what it allocated and freed.
    """

    def __init__(self, point: Point, blocks: Iterable[Block]) -> None:
        self._sites: list[Site] = []
        numbers: dict[Site, int] = {}
        self._sizes, self._begins, self._ends = array("q"), array("q"), array("q")
        self._of_block = array("q")
        last = 0
        for block in blocks:
            number = numbers.setdefault(block.site, len(numbers))
            self._sizes.append(block.bytes)
            self._begins.append(block.begin)
            self._ends.append(block.end)
            self._of_block.append(number)
            last = max(last, block.begin, block.end)
        self._sites = list(numbers)
        changes = array("q", bytes(8 * (last + 1)))
        for size, begin, end in zip(self._sizes, self._begins, self._ends, strict=True):
            changes[begin] += size if begin else 0
            changes[end] -= size if end else 0
        self._level_after = array("q", accumulate(changes))
        super().__init__(point, max(self._level_after), self._levels())

    def to_dict(self) -> dict[str, Any]:
        """Return the levels and what the peak consists of, in builtin types."""
        is_much = sum(map(len, self.levels.values())) > _MOST_LEVELS
        levels = [
            [list(site.frames), site.code, [max(of_site)] if is_much else list(of_site)]
            for site, of_site in self.levels.items()
        ]
        at_peak: Mapping[Site, int] = {}
        if self.levels:
            highest = max(self.levels, key=lambda site: max(self.levels[site]))
            at_peak = self.composition(Moment(highest, None))
        return {
            "value": self.value,
            "levels": levels,
            "at_peak": [[list(site.frames), site.code, size] for site, size in at_peak.items()],
        }

    def _levels(self) -> Mapping[Site, Sequence[int]]:
        levels: dict[Site, list[int]] = defaultdict(list)
        for site, events in self._events.items():
            levels[site] = [self._level_after[event] for event in events]
        return levels

    @cached_property
    def _events(self) -> Mapping[Site, Sequence[int]]:
        """The events at which each line allocated, in their order."""
        of_site: dict[Site, list[int]] = defaultdict(list)
        for begin, number in zip(self._begins, self._of_block, strict=True):
            if begin:
                of_site[self._sites[number]].append(begin)
        return {site: sorted(events) for site, events in of_site.items()}

    def _event_of(self, moment: Moment) -> int:
        events = self._events[moment.site]
        if moment.number is None:
            return max(events, key=self._level_after.__getitem__)
        return events[moment.number]

    def _live_at(self, moment: Moment) -> Iterable[tuple[int, int, int]]:
        """Yield bytes, begin and site of each block that adds to the level, or lowers it."""
        if moment.site is WHOLE:  # it has allocated nothing
            return
        event = self._event_of(moment)
        for size, begin, end, number in zip(
            self._sizes, self._begins, self._ends, self._of_block, strict=True
        ):
            if not begin and end <= event:
                yield -size, begin, number
            elif begin and begin <= event and (event < end or not end):
                yield size, begin, number

    def composition(self, moment: Moment) -> Mapping[Site, int]:
        by_site: dict[Site, int] = defaultdict(int)
        for size, begin, number in self._live_at(moment):
            by_site[self._sites[number] if begin else OLDER] += size
        return dict(by_site)

    def blocks_at(self, moment: Moment) -> Sequence[int]:
        return [size for size, begin, _ in self._live_at(moment) if begin]


class ReportedSample(Sample):
    """A sample of another process, of which only the peak's composition is known.

    Args:
        point: the sizes of the run.
        data: what :meth:`RecordedSample.to_dict` has returned.
    """

    def __init__(self, point: Point, data: Mapping[str, Any]) -> None:
        levels = {_site_of(frames, code): of_site for frames, code, of_site in data["levels"]}
        super().__init__(point, data["value"], levels)
        self._at_peak = {_site_of(frames, code): size for frames, code, size in data["at_peak"]}

    def composition(self, moment: Moment) -> Mapping[Site, int]:
        return self._at_peak if self.at(moment) == self.value else {}


def _site_of(frames: Sequence[str], code: str | None) -> Site:
    return Site(tuple(frames), code)


def law_from_lines(
    names: Sequence[str], samples: Sequence[Sample], degrees: Point, moment: Moment
) -> Polynomial | None:
    """Return the exact laws of most lines at the peak, and the nearest one of the rest.

    The rest, such as workspaces of cuDNN, is taken to grow with the terms that the lines have.
    None if no line has a law.
    """
    points = [sample.point for sample in samples]
    solver = Solver(names, points, exponents(degrees))
    if any(moment.site not in sample.levels for sample in samples):
        return None
    compositions = [sample.composition(moment) for sample in samples]
    if not all(compositions) or not solver.is_determined or not solver.spare:
        return None
    exact: Polynomial | None = None
    for site in {site: None for known in compositions for site in known}:
        law = solver.solve([known.get(site, 0) for known in compositions])
        if law is not None:
            exact = law if exact is None else exact + law
    if exact is None or not exact.terms:
        return None
    rest = []
    for sample in samples:
        known_bytes = exact.at(sample.point)
        rest.append(sample.value - int(known_bytes))
    terms = sorted({(0,) * len(names), *(powers for powers, _ in exact.terms)})
    values = [sample.value for sample in samples]
    return exact + nearest(names, points, terms, rest, values)


def simplest_law(names: Sequence[str], samples: Sequence[Sample], degrees: Point) -> Polynomial:
    """Return the polynomial of the lowest degrees that is about as near as that of all degrees."""
    points, values = [it.point for it in samples], [it.value for it in samples]

    def off(law: Polynomial) -> float:
        return max(
            abs(float(law.at(point)) - value) for point, value in zip(points, values, strict=True)
        )

    most = nearest(names, points, exponents(degrees), values)
    enough = max(2 * off(most), 0.01 * (max(values) - min(values)))
    for lower in sorted(product(*(range(degree + 1) for degree in degrees)), key=sum):
        law = nearest(names, points, exponents(lower), values)
        if off(law) <= enough:
            return law
    return most


def moment_of_peak(samples: Sequence[Sample]) -> Moment:
    """Return the moment of the last sample's peak, by its number if all samples have that."""
    last = samples[-1]
    site = max(last.levels, key=lambda site: max(last.levels[site]))
    number = max(range(len(last.levels[site])), key=last.levels[site].__getitem__)
    is_common = all(number < len(sample.levels.get(site, ())) for sample in samples)
    if site is WHOLE or not is_common:
        return Moment(site, None)
    return Moment(site, number)


def candidates(samples: Sequence[Sample], site: Site) -> Iterator[Moment]:
    """Yield the moments of a line that can be found again in all samples.

    If it allocates more often at some sizes, because it is in a loop or another kernel runs there,
    its allocations are counted from the first and from the last one, and the highest counts too.
    """
    counts = {len(it.levels[site]) for it in samples}
    if len(counts) == 1:
        yield from (Moment(site, number) for number in range(*counts))
        return
    # Which of its allocations is the highest may depend on the sizes: that is a moment, too.
    yield Moment(site, None)
    for number in range(min(counts)):
        yield Moment(site, number)
        yield Moment(site, -1 - number)


def laws_of(site: Site, samples: Sequence[Sample], solver: Solver) -> dict[Polynomial, Moment]:
    """Return the laws of a line's moments."""
    laws: dict[Polynomial, Moment] = {}
    seen: set[tuple[int, ...]] = set()
    if all(site in it.levels for it in samples):
        for moment in candidates(samples, site):
            vector = tuple(it.at(moment) for it in samples)
            # Moments with equal levels have one law, and to solve for it takes long.
            if vector not in seen:
                seen.add(vector)
                law = solver.solve(vector)
                if law is not None and law.is_plausible:
                    laws.setdefault(law, moment)
    return laws
