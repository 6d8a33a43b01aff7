"""The law of a figure: it chooses the sizes to run, and finds a polynomial for each moment.

The peak of a run is the highest of the levels at its moments. The level at each moment is a
polynomial of the sizes as long as the code runs the same operations. So a law is found for every
moment, and the peak at any size is the highest of these polynomials: also where another moment
takes over that was never the peak in a run. Growth from batch to batch is in `core/retention.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import ceil, gcd, prod

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.laws import (
    WHOLE,
    Moment,
    Sample,
    Site,
    law_from_lines,
    laws_of,
    moment_of_peak,
    simplest_law,
)
from pytest_cka_memory.laws.polynomials import (
    Point,
    Polynomial,
    Solver,
    exponents,
    upper_envelope,
)

_DOUBLINGS = 16
MOST_VALUES = 6
"""Values of each size that are tried."""
_MOST_TOO_LARGE = 4
_CLOSE = 0.9
"""A line without a law matters if its level came so close to the peak."""
_FAR = 64
"""It matters too if it may be the peak at sizes so many times the largest."""


@dataclass(frozen=True)
class Piece:
    """A moment that can be the peak, and the law of its level."""

    moment: Moment
    polynomial: Polynomial


@dataclass(frozen=True)
class Fitted:
    """A law: the figure is the highest of its pieces."""

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    samples: tuple[Sample, ...]
    """All runs."""
    least: Point
    """The law holds where each size is at least that."""
    steps: Point
    """It was found from sizes that are multiples of these."""
    degrees: Point
    """The highest power of each size that was looked for."""
    switches: tuple[str, ...] = ()
    """Changes of the code's allocations between two sizes, in words."""
    unfollowed: tuple[str, ...] = ()
    """Moments that came close to the peak and have no law, in words."""
    is_exact: bool = True
    """Whether the pieces pass through every sample from `least` on."""
    too_large: tuple[Point, ...] = ()
    """Sizes for which the device had too little memory."""

    def value_at(self, point: Point) -> int:
        """Return the figure that the law gives."""
        return ceil(self.piece_at(point).polynomial.at(point))

    def piece_at(self, point: Point) -> Piece:
        """Return the piece that is the highest."""
        return max(self.pieces, key=lambda piece: piece.polynomial.at(point))

    def highest_pieces(self) -> Sequence[Piece]:
        """Return the pieces that are the highest somewhere, that at the largest run first.

        They are looked for at sizes that are doubled again and again, so one that is the highest
        only between two of these may be missing.
        """
        far = range(_DOUBLINGS if len(self.names) < 3 else _DOUBLINGS // len(self.names))
        axes = [sorted({low, *(low << shift for shift in far)}) for low in self.least]
        last = self.samples[-1].point
        points = [last, *(it.point for it in self.samples), *product(*axes)]
        return tuple(dict.fromkeys(self.piece_at(point) for point in points))

    def holds_at(self, point: Point) -> bool:
        """Whether no size is below those from which the law holds."""
        return all(value >= least for value, least in zip(point, self.least, strict=True))

    @property
    def residuals(self) -> Mapping[Point, int]:
        """Point -> by how many bytes a run differs from the law, where it should hold."""
        differences = {
            sample.point: sample.value - self.value_at(sample.point)
            for sample in self.samples
            if self.holds_at(sample.point)
        }
        return {point: value for point, value in differences.items() if value}


@dataclass
class _Trial:
    """What was found for some samples and degrees."""

    pieces: list[Piece] = field(default_factory=list)
    without_law: list[Moment] = field(default_factory=list)
    is_complete: bool = False
    """Whether the pieces give the value of each sample."""
    is_close: bool = False
    """Whether a line without a law came close to the peak."""

    @property
    def is_whole(self) -> bool:
        """Whether every moment that may become the peak has a law."""
        return self.is_complete and not self.without_law


def _try(
    names: Sequence[str], samples: Sequence[Sample], degrees: Point, needed_spare: int
) -> _Trial | None:
    """Return the laws of the moments of `samples`; None if these are too few for the degrees."""
    points = [sample.point for sample in samples]
    solver = Solver(names, points, exponents(degrees))
    if not solver.is_determined or solver.spare < needed_spare:
        return None
    trial = _Trial()
    moments: dict[Polynomial, Moment] = {}
    others: dict[Site, list[int]] = {}
    for site in {site: None for it in samples for site in it.levels}:
        laws = laws_of(site, samples, solver)
        for law, moment in laws.items():
            moments.setdefault(law, moment)
        highest = [max(it.levels.get(site, (0,))) for it in samples]
        # Then its laws do not give its highest level, and it may become the peak.
        if highest != [max((law.at(it.point) for law in laws), default=0) for it in samples]:
            others[site] = highest
    least = tuple(map(min, zip(*points, strict=True)))
    trial.pieces = [Piece(moments[law], law) for law in upper_envelope(moments, least)]
    trial.is_complete = bool(trial.pieces) and all(
        max(piece.polynomial.at(sample.point) for piece in trial.pieces) == sample.value
        for sample in samples
    )
    # A line without a law may be the peak far beyond the sizes that were run.
    far = tuple(
        size * _FAR if size != low else size for size, low in zip(points[-1], least, strict=True)
    )
    far_bytes = max((piece.polynomial.at(far) for piece in trial.pieces), default=0)
    for site, highest in others.items():
        close = any(level > _CLOSE * it.value for level, it in zip(highest, samples, strict=True))
        # It has no law, so how it grows is unknown: with the square, say.
        growth = max(0, highest[-1] - highest[-2])
        if close or highest[-1] + growth * _FAR**2 > far_bytes:
            trial.without_law.append(Moment(site, None))
        trial.is_close |= close
    return trial


class _Search:
    """Chooses sizes, runs the code there once, and keeps the samples."""

    def __init__(
        self,
        measure: Callable[[Point], Sample],
        sizes: Mapping[str, Sequence[int]],
        most_values: int,
        needed_spare: int,
    ) -> None:
        self._measure, self.most, self._spare = measure, most_values, needed_spare
        self.names = tuple(sizes)
        self.values = [sorted(set(values)) for values in sizes.values()]
        self.steps = tuple(gcd(*values) for values in self.values)
        self._known: dict[Point, Sample] = {}
        self.switches: dict[str, None] = {}
        self.too_large: dict[Point, RegionError] = {}

    @property
    def samples(self) -> list[Sample]:
        return [self._known[point] for point in sorted(self._known, key=lambda p: (sum(p), p))]

    def at(self, point: Point) -> Sample:
        if point in self.too_large:
            raise self.too_large[point]
        if point not in self._known:
            try:
                self._known[point] = self._measure(point)
            except RegionError as error:
                self.too_large[point] = error
                raise
        return self._known[point]

    def _axis(self, base: Sequence[int], index: int) -> list[Sample]:
        points = [(*base[:index], value, *base[index + 1 :]) for value in self.values[index]]
        return list(map(self.at, points))

    def _add_value(self, base: Sequence[int], index: int) -> bool:
        """Run one more value of a size: twice the largest first, then between two.

        So the larger sizes, for which the law is wanted, are enough even if the smaller ones run
        other kernels.
        """
        values, step = self.values[index], self.steps[index]
        low, high = values[-2:]
        middle = (low + high) // 2 // step * step
        between = middle if low < middle < high else (values[0] + step)
        is_wide = len(values) % 2 or high >= 4 * low or between in values
        for value in {2 * high: None, between: None} if is_wide else (between,):
            if value not in values and self._runs((*base[:index], value, *base[index + 1 :])):
                self.values[index] = sorted({*values, value})
                return True
        return False

    def _runs(self, point: Point) -> bool:
        """Whether the device has memory for these sizes."""
        with suppress(RegionError):
            self.at(point)
        return point in self._known

    def degree_and_least(self, base: Sequence[int], index: int) -> tuple[int, int] | None:
        """Return the degree in one size, and from where on; None if it has no law."""
        while True:
            axis = self._axis(base, index)
            degree = self._degree(axis, index)
            if degree is not None:
                return degree, axis[0].point[index]
            if len(axis) >= self.most or not self._add_value(base, index):
                break
        if len(axis) == 2:  # which any line fits
            raise next(reversed(self.too_large.values()))
        # Small sizes may run other kernels, so they are left out, as few as possible. Only after
        # that may a line without a law be left that is far below the peak.
        for is_strict in (True, False):
            for first in range(max(1, len(axis) - 1 - self._spare)):
                degree = self._degree(axis[first:], index, is_strict=is_strict)
                if degree is not None:
                    if first:
                        self.note_switch(axis[first - 1], axis[first])
                    return degree, axis[first].point[index]
        return None

    def _degree(self, axis: Sequence[Sample], index: int, *, is_strict: bool = True) -> int | None:
        """Return the lowest degree at which the moments of `axis` have laws; None if none is.

        If `is_strict` is false, a line of code needs no law if its level is far below the peak.
        """
        # A polynomial has one factor more than its degree; the spare samples verify it.
        for degree in range(len(axis) - self._spare):
            degrees = tuple(degree if at == index else 0 for at in range(len(self.names)))
            trial = _try(self.names, axis, degrees, self._spare)
            if trial is None or not trial.is_complete or trial.is_close:
                continue
            if not (is_strict and trial.without_law):
                return degree
        return None

    def verify(self, allowed: Sequence[Sequence[int]], grid: Sequence[Sequence[int]]) -> None:
        """Run the largest sizes together, outside a grid, that the device has memory for.

        Raises:
            RegionError: if it has none for those that are tried.
        """
        least, inside = [values[0] for values in allowed], set(product(*grid))
        outside = [point for point in product(*allowed) if point not in inside]
        # What was run with one size above the least says nothing of several together.
        points = [it for it in outside if len(it) == 1 or sum(map(int.__gt__, it, least)) > 1]
        points = sorted(points, key=prod)[-_MOST_TOO_LARGE:]
        if points and not any(map(self._runs, reversed(points))):
            raise self.too_large[points[-1]]

    def extend(self, index: int, count: int) -> None:
        """Add values beyond the largest, each twice the one before."""
        for _ in range(count):
            self.values[index].append(2 * self.values[index][-1])

    def note_switch(self, below: Sample, above: Sample) -> None:
        """Take note of what allocates differently in the larger of two samples."""
        lines = []
        for site in {**below.levels, **above.levels}:
            counts = len(below.levels.get(site, ())), len(above.levels.get(site, ()))
            if counts[0] != counts[1]:
                lines.append(f"{site} ({counts[0]:,} and {counts[1]:,} allocations)")
        pairs = list(zip(self.names, below.point, above.point, strict=True))
        low = ", ".join(f"{name}={a:,}" for name, a, b in pairs if a != b)
        high = ", ".join(f"{name}={b:,}" for name, a, b in pairs if a != b)
        what = f": {'; '.join(lines[:2])}" if lines else ""
        self.switches[f"between {low} and {high} the code allocates differently{what}"] = None


def fit(
    measure: Callable[[Point], Sample],
    sizes: Mapping[str, Sequence[int]],
    *,
    most_values: int = MOST_VALUES,
    needed_spare: int = 1,
) -> Fitted:
    """Return the law of what `measure` returns.

    Args:
        measure: runs the code at some sizes, once for each point.
        sizes: name -> values of it to begin with, two or more; further ones are chosen if needed.
        most_values: how many values of a size are tried at most.
        needed_spare: how many more values of each size than its terms need must follow the law.
    """
    search = _Search(measure, sizes, most_values, needed_spare)
    least = [values[0] for values in search.values]
    degrees = [0] * len(least)
    without: list[int] = []
    for _ in range(len(least) + 1):  # again if the law of a later size holds only from a value on
        before, without = list(least), []
        for index in range(len(least)):
            law_of_axis = search.degree_and_least(least, index)
            if law_of_axis is None:
                without.append(index)
            else:
                degrees[index], least[index] = law_of_axis
        if least == before:
            break
    if without:
        return _approximate(search, tuple(least), without)
    return _whole_law(search, tuple(degrees), tuple(least))


def law_through(names: Sequence[str], samples: Sequence[Sample], degrees: Point) -> Fitted | None:
    """Return the law of at most some degrees through given samples; None if there is none.

    Args:
        names: of the sizes.
        samples: in the order of their sizes.
        degrees: the highest power of each size; at least one sample must be left to verify it.
    """
    trial = _try(names, samples, degrees, needed_spare=1) if samples else None
    if trial is None or not trial.is_whole:
        return None
    least = tuple(map(min, zip(*(it.point for it in samples), strict=True)))
    steps = tuple(gcd(*values) for values in zip(*(it.point for it in samples), strict=True))
    return Fitted(tuple(names), tuple(trial.pieces), tuple(samples), least, steps, degrees)


def _whole_law(search: _Search, degrees: Point, least: Point) -> Fitted:
    """Return the law in all sizes, from runs at a grid and at the largest sizes together.

    If it does not hold at the largest sizes together, another kernel may run there, or another
    moment is the peak that the samples do not show. Then a law from those sizes on is tried.
    """
    trial = _at_grid(search, degrees, least)
    if len(least) == 1 or trial.is_whole:
        return _result(search, degrees, least, trial)
    corner = tuple(values[-1] for values in search.values)
    # A grid that begins at the corner needs, for each size, one value more than its degree.
    if all(
        len(values) + degree < search.most
        for values, degree in zip(search.values, degrees, strict=True)
    ):
        below = search.at(least)
        for index, degree in enumerate(degrees):
            search.extend(index, degree + 1)
        second = _Trial()
        with suppress(RegionError):
            second = _at_grid(search, degrees, corner)
        if second.is_whole:
            search.note_switch(below, search.at(corner))
            return _result(search, degrees, corner, second)
    return _result(search, degrees, least, trial)


def _at_grid(search: _Search, degrees: Point, least: Point) -> _Trial:
    allowed = [
        [value for value in values if value >= lowest]
        for values, lowest in zip(search.values, least, strict=True)
    ]
    grid = [values[: degree + 1] for values, degree in zip(allowed, degrees, strict=True)]
    list(map(search.at, product(*grid)))
    search.verify(allowed, grid)
    samples = [it for it in search.samples if all(map(int.__ge__, it.point, least))]
    # No spare samples are needed here: the law of each size alone was checked with spare ones.
    trial = _try(search.names, samples, degrees, needed_spare=0)
    assert trial is not None, "a grid determines all terms"
    return trial


def _result(search: _Search, degrees: Point, least: Point, trial: _Trial) -> Fitted:
    if trial.is_complete:
        return _fitted(search, least, degrees, trial.pieces, trial.without_law)
    return _approximate(search, least, (), degrees)


def _fitted(
    search: _Search,
    least: Point,
    degrees: Point,
    pieces: Sequence[Piece],
    unfollowed: Sequence[Moment] = (),
    *,
    is_exact: bool = True,
) -> Fitted:
    return Fitted(
        search.names,
        tuple(pieces),
        tuple(search.samples),
        least,
        search.steps,
        degrees,
        tuple(search.switches),
        tuple(dict.fromkeys(map(str, unfollowed))),
        is_exact,
        tuple(search.too_large),
    )


def _approximate(
    search: _Search, least: Point, without: Sequence[int], degrees: Point | None = None
) -> Fitted:
    """Return the nearest polynomial of the figure itself, whose residuals are reported."""
    if degrees is None:
        degrees = tuple(
            min(2, len(search.values[index]) - 2) if index in without else 1
            for index in range(len(least))
        )
    grid = [values[: degree + 1] for values, degree in zip(search.values, degrees, strict=True)]
    list(map(search.at, product(*grid)))
    with suppress(RegionError):
        search.verify(search.values, grid)
    samples = search.samples
    moment = moment_of_peak(samples)
    best = law_from_lines(search.names, samples, degrees, moment)
    if best is None:
        best = simplest_law(search.names, samples, degrees)
    least = tuple(min(sample.point[index] for sample in samples) for index in range(len(least)))
    return _fitted(
        search,
        least,
        tuple(degrees),
        [Piece(moment, best)],
        [moment] if moment.site is not WHOLE else (),
        is_exact=False,
    )
