"""Judge laws: by the powers that ``peak_law`` allows, and by a law that was committed before.

``peak_law`` limits how the peak grows over the sizes of a parametrized test. A committed law is
kept in a baseline, as builtin types.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from pytest_cka_memory.core.figure_rows import MOMENTS
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.laws import ReportedSample, Sample
from pytest_cka_memory.laws.answers import Term
from pytest_cka_memory.laws.fitting import Fitted, law_through
from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import (
    Point,
    Polynomial,
    exponents,
    nearest,
    number_text,
    polynomial,
    term_text,
)

_FIGURE = "peak_increase_bytes"
_MORE = 2
"""How many powers above the allowed one are tried."""
_MOST_LINES = 3
_NOISE = 0.01
"""Peaks follow a polynomial if it differs from them by at most this share of their range."""


@dataclass(frozen=True)
class PeakLaw(Limit):
    """The peak over tests of one function may grow with a power of each size at most.

    The test with the largest sizes is judged, when all have run.
    """

    degrees: Mapping[str, int]
    """Name of a size -> the power."""
    points: Mapping[str, Point] = field(default_factory=dict, compare=False)
    """Test -> its sizes."""
    find: Callable[[str, str], RegionRecord | None] = field(
        default=lambda nodeid, label: None, compare=False
    )
    """Returns the region of a test and label, if it has been measured here."""
    nodeid: str = ""

    @property
    def addition(self) -> str:
        return MOMENTS

    def judge(self, record: RegionRecord) -> Verdict:
        """Judge the region of the largest sizes, if all others are known."""
        if not self._is_judged_here:
            return None
        records = self._known(record)
        missing = len(self.points) - len(records)
        if missing:
            return Unjudged(self.text, f"{missing} of {len(self.points)} sizes have not run yet")
        return self._verdict(records)

    def pending(self, record: RegionRecord) -> dict[str, Any] | None:
        """Return what judges a region later, in builtin types; None if it was judged."""
        is_known = len(self._known(record)) == len(self.points)
        if not record.completed or not self._is_judged_here or is_known:
            return None
        return {
            "label": record.label,
            "text": self.text,
            "warns": self.warns,
            "later": f"{__name__}:later",
            "degrees": dict(self.degrees),
            "points": {nodeid: list(point) for nodeid, point in self.points.items()},
            "nodeid": self.nodeid,
        }

    def missing(self) -> Breach:
        """Return the breach of sizes that were not all measured."""
        return self._breach("cannot be judged: not all sizes were measured; run all of them")

    @property
    def _is_judged_here(self) -> bool:
        largest = max(self.points, key=lambda nodeid: (self.points[nodeid], nodeid), default="")
        return self.nodeid == largest

    def _known(self, record: RegionRecord) -> dict[Point, RegionRecord]:
        records = {}
        for nodeid, point in self.points.items():
            known = record if nodeid == self.nodeid else self.find(nodeid, record.label)
            if known is not None and known.completed:
                records[point] = known
        return records

    def _verdict(self, records: Mapping[Point, RegionRecord]) -> Verdict:
        names = tuple(self.degrees)
        for index, name in enumerate(names):
            values = sorted({point[index] for point in records})
            needed = self.degrees[name] + 2
            if len(values) < needed:
                return self._breach(
                    f"cannot be judged: {name} has {len(values)} values and {needed} are needed; "
                    f"parametrize the test with e.g. {needed} values, each twice the one before"
                )
        samples = [_sample(point, record) for point, record in sorted(records.items())]
        samples.sort(key=lambda sample: (sum(sample.point), sample.point))
        allowed = tuple(self.degrees.values())
        ways = sorted(product(range(_MORE + 1), repeat=len(names)), key=sum)
        # The first run may have allocated what later ones reuse, so it may be left out.
        for used in (samples, samples[1:]):
            for more in ways:
                degrees = tuple(a + b for a, b in zip(allowed, more, strict=True))
                fitted = law_through(names, used, degrees)
                if fitted is not None:
                    return self._of_law(fitted)
        return self._without_law(names, samples, allowed)

    def _without_law(
        self, names: Sequence[str], samples: Sequence[Sample], allowed: Point
    ) -> Verdict:
        """Judge peaks that no polynomial fits exactly, for example because of rounding."""
        points, values = [it.point for it in samples], [it.value for it in samples]
        near = nearest(names, points, exponents(allowed), values)
        off = max(
            abs(float(near.at(point)) - value) for point, value in zip(points, values, strict=True)
        )
        if off <= _NOISE * (max(values) - min(values)):
            return None
        return self._breach(
            "cannot be judged: no polynomial gives the peaks at all sizes; the nearest "
            f"one, {near}, is up to {off:,.0f} bytes off; add a size, choose larger sizes "
            "or multiples of a power of two, or call cka_memory.law(), which chooses sizes"
        )

    def _of_law(self, fitted: Fitted) -> Breach | None:
        law = Law(fitted)
        for name, allowed in self.degrees.items():
            if law.degree(name) > allowed:
                term = max(law.terms, key=lambda it: it.powers.get(name, 0))
                return self._breach(_grows(law, name, allowed, term))
        return None

    def _breach(self, message: str) -> Breach:
        return Breach(self.text, 0, None, message, _FIGURE, self.warns)


def _grows(law: Law, name: str, allowed: int, term: Term) -> str:
    power = term.powers[name]
    lines = [f"{line} ({number_text(share)})" for line, share in term.lines[:_MOST_LINES]]
    made = f"; it is made by {', '.join(lines)}" if lines else f"; at {term.piece}"
    piece = next(it for it in law.pieces if it.degree(name) == power)
    return (
        f"the peak grows with {name} to the power of {power}, allowed {allowed}: "
        f"peak = {piece} bytes. The term is {term}{made}"
    )


def _sample(point: Point, record: RegionRecord) -> Sample:
    if record.moments is not None:
        return ReportedSample(point, record.moments)
    return Sample(point, record.peak_increase_bytes)


def later(data: Mapping[str, Any]) -> PeakLaw:
    """Return the limit of :meth:`PeakLaw.pending`."""
    points = {nodeid: tuple(point) for nodeid, point in data["points"].items()}
    limit = PeakLaw(data["text"], data["degrees"], points, nodeid=data["nodeid"])
    return replace(limit, warns=data["warns"])


def peak_law(**degrees: object) -> PeakLaw:
    """Return a limit on how the peak grows over the sizes of a parametrized test.

    Args:
        **degrees: name of a parameter -> the highest power with which the peak may grow.

    Returns:
        The limit, still without sizes: they come from the tests of the function.

    Raises:
        LimitError: if no size is given, or a power is not a whole number, 0 or more.

    Example:
        >>> peak_law(batch=1, seq=2).text
        'peak_law(batch=1, seq=2)'
    """
    if not degrees:
        raise LimitError("no size is given; write e.g. peak_law(seq=1, batch=1)")
    known: dict[str, int] = {}
    for name, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or not 0 <= degree <= 4:
            raise LimitError(
                f"{name}={degree!r} is not a whole number from 0 to 4; write the highest power of "
                f"{name} with which the peak may grow, e.g. {name}=1"
            )
        known[name] = degree
    arguments = ", ".join(f"{name}={degree}" for name, degree in known.items())
    return PeakLaw(f"peak_law({arguments})", known)


def with_points(
    limit: PeakLaw,
    nodeid: str,
    points: Mapping[str, Sequence[object]],
    find: Callable[[str, str], RegionRecord | None],
) -> PeakLaw:
    """Return the limit for one test of a function, which knows the sizes of all others.

    Raises:
        LimitError: if the test is not parametrized by a size, or one is not a whole number, 1 or
            more.
    """
    checked: dict[str, Point] = {}
    for other, point in points.items():
        sizes = []
        for name, value in zip(limit.degrees, point, strict=True):
            if value is None:  # the test has no such parameter
                raise LimitError(
                    f"{limit.text}: the test is not parametrized by {name}; write e.g. "
                    f'@pytest.mark.parametrize("{name}", [128, 256, 512]) above it'
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LimitError(
                    f"{limit.text}: {name}={value!r} is not a whole number of at least 1; "
                    f"parametrize the test by {name}, e.g. with (128, 256, 512)"
                )
            sizes.append(value)
        checked[other] = tuple(sizes)
    return replace(limit, points=checked, find=find, nodeid=nodeid)


_MOST_KEPT = 6
"""Lines of a term that a baseline keeps."""
_LINE_NUMBER = re.compile(r":\d+( in |$|:)")


def to_dict(law: Law) -> dict[str, Any]:
    """Return the pieces that are the highest somewhere, with the lines of each term."""
    terms = iter(law.terms)
    pieces = []
    for piece in law.fitted.highest_pieces():
        own = [next(terms) for _ in piece.polynomial.terms]
        pieces.append(
            {
                "at": str(piece.moment),
                "terms": [
                    {
                        "powers": [term.powers.get(name, 0) for name in law.names],
                        "bytes": str(term.coefficient),
                        "lines": {line: str(share) for line, share in term.lines[:_MOST_KEPT]},
                    }
                    for term in own
                ],
            }
        )
    return {
        "of": law.figure,
        "sizes": list(law.names),
        "least": list(law.fitted.least),
        "exact": law.is_exact,
        **({"on": law.elsewhere} if law.elsewhere else {}),
        "pieces": pieces,
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return how a law is above a committed one, both side by side; empty if it is not.

    A law is above another if it has a piece that, from the least sizes on, is not always below one
    of the other's pieces. Laws that are not exact are compared by their degrees alone.

    Args:
        old: the committed law, as :func:`to_dict` has returned it.
        new: the law now.
    """
    if (old["of"], old["sizes"]) != (new["of"], new["sizes"]):
        return (
            f"the committed law is of the {old['of']} over {', '.join(old['sizes'])}, but the law "
            f"of the test is of the {new['of']} over {', '.join(new['sizes'])}: update the baseline"
        )
    if old.get("on") != new.get("on"):
        devices = [law.get("on", "the device of the session") for law in (old, new)]
        return (
            f"the committed law was measured on {devices[0]}, but this one on {devices[1]}: update "
            "the baseline"
        )
    least = [max(pair) for pair in zip(old["least"], new["least"], strict=True)]
    before, now = _pieces(old), _pieces(new)
    is_exact = old["exact"] and new["exact"]
    for number, piece in enumerate(now):
        same = _nearest(piece, before)
        if same is None:
            continue
        if is_exact and any(_is_above(other, piece, least) for other in before):
            continue
        if not is_exact and all(
            piece.degree(name) <= max(other.degree(name) for other in before)
            for name in piece.names
        ):
            continue
        terms = _changed_terms(old["pieces"][same], new["pieces"][number], new["sizes"])
        return (
            f"the law of the {new['of']} has changed. It was {before[same]}; now it is {piece}. "
            f"What rose: {'; '.join(terms)}"
        )
    return ""


def _pieces(law: Mapping[str, Any]) -> list[Polynomial]:
    return [
        polynomial(
            law["sizes"],
            {tuple(term["powers"]): Fraction(term["bytes"]) for term in piece["terms"]},
        )
        for piece in law["pieces"]
    ]


def _is_above(upper: Polynomial, lower: Polynomial, least: list[int]) -> bool:
    return all(factor >= 0 for _, factor in (upper - lower).shifted(least).terms)


def _nearest(piece: Polynomial, others: list[Polynomial]) -> int | None:
    """Return the index of the polynomial that differs from `piece` in the fewest terms."""
    if not others:
        return None
    return min(
        range(len(others)),
        key=lambda index: (
            len((piece - others[index]).terms),
            sum(abs(factor) for _, factor in (piece - others[index]).terms),
        ),
    )


def _changed_terms(
    old: Mapping[str, Any], new: Mapping[str, Any], names: list[str]
) -> Iterator[str]:
    """Yield each term whose coefficient rose, with the lines that changed, highest powers first."""
    before = {tuple(term["powers"]): term for term in old["terms"]}
    for term in new["terms"]:
        known = before.get(tuple(term["powers"]), {"bytes": "0", "lines": {}})
        rise = Fraction(term["bytes"]) - Fraction(known["bytes"])
        if rise > 0:
            text = term_text(names, tuple(term["powers"]), None)
            lines = ", ".join(_changed_lines(known["lines"], term["lines"]))
            made = f" ({lines})" if lines else ""
            yield f"{text}: {number_text(Fraction(known['bytes']))} -> " + (
                f"{number_text(Fraction(term['bytes']))} bytes{made}"
            )


def _changed_lines(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield lines with a larger share, also if the numbers of lines have changed."""
    before: dict[str, Fraction] = {}
    for line, share in old.items():
        name = _without_number(line)
        before[name] = before.get(name, Fraction(0)) + Fraction(share)
    now: dict[str, Fraction] = {}
    places: dict[str, str] = {}
    for line, share in new.items():
        name = _without_number(line)
        now[name] = now.get(name, Fraction(0)) + Fraction(share)
        places.setdefault(name, line)
    rises = {name: share - before.get(name, Fraction(0)) for name, share in now.items()}
    for name, rise in sorted(rises.items(), key=lambda pair: -pair[1])[:2]:
        if rise > 0:
            yield f"{places[name]}: +{number_text(rise)}"


def _without_number(line: str) -> str:
    return _LINE_NUMBER.sub(r"\1", line, count=1)
