"""Polynomials with exact coefficients, through exact integer samples.

Nothing here knows about memory. A polynomial that does not pass through every sample is not
returned: bytes are exact, so a residual is a fact to report and not noise to average.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import comb, lcm, prod

Point = tuple[int, ...]
"""A value of each size, in the order of the names."""
Exponents = tuple[int, ...]
"""The power of each size in a term."""

_MOST_PARTS = 12
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, repr=False)
class Polynomial:
    """A sum of terms, such as ``2,794,512 + 1,200,408 · batch · seq``."""

    names: tuple[str, ...]
    """The names of the sizes."""
    terms: tuple[tuple[Exponents, Fraction], ...]
    """Powers and coefficient of each term that is not 0, lowest powers first."""

    def at(self, point: Sequence[int]) -> Fraction:
        """Return its value at a point.

        Args:
            point: a value of each size, in the order of :attr:`names`.

        Returns:
            The exact value.

        Example:
            >>> area = polynomial(("batch", "seq"), {(0, 0): 5, (1, 2): 8})
            >>> area.at((2, 10))
            Fraction(1605, 1)
        """
        return sum(
            (factor * prod(map(pow, point, powers)) for powers, factor in self.terms), Fraction(0)
        )

    @property
    def is_plausible(self) -> bool:
        """Whether its coefficients could be those of code that allocates whole bytes.

        Such coefficients are whole numbers, fractions such as halves and sixths if a loop adds up
        sizes, or have a power of 2 as denominator, such as one bit for each item. A polynomial
        through points that follow another law usually has other fractions.
        """
        return all(
            factor.denominator <= _MOST_PARTS or factor.denominator & (factor.denominator - 1) == 0
            for _, factor in self.terms
        )

    def degree(self, name: str) -> int:
        """Return the highest power of one size.

        Args:
            name: of the size.

        Returns:
            The power, 0 if no term has the size.

        Raises:
            ValueError: if there is no such size.

        Example:
            >>> area = polynomial(("batch", "seq"), {(0, 0): 5, (1, 2): 8})
            >>> area.degree("seq")
            2
        """
        index = self.names.index(name)
        return max((powers[index] for powers, _ in self.terms), default=0)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        factors = dict(self.terms)
        for powers, factor in other.terms:
            factors[powers] = factors.get(powers, Fraction(0)) + factor
        return polynomial(self.names, factors)

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        factors = dict(self.terms)
        for powers, factor in other.terms:
            factors[powers] = factors.get(powers, Fraction(0)) - factor
        return polynomial(self.names, factors)

    def shifted(self, point: Sequence[int]) -> "Polynomial":
        """Return the polynomial of how far each size is above `point`.

        Args:
            point: a value of each size, in the order of :attr:`names`.

        Returns:
            A polynomial whose value at 0 is that of this one at `point`.

        Example:
            >>> polynomial(("n",), {(1,): 3}).shifted((10,))
            30 + 3 · n
        """
        factors: dict[Exponents, Fraction] = {}
        for powers, factor in self.terms:
            for lower in product(*(range(power + 1) for power in powers)):
                ways = prod(map(comb, powers, lower))
                rest = prod(map(pow, point, (p - q for p, q in zip(powers, lower, strict=True))))
                factors[lower] = factors.get(lower, Fraction(0)) + factor * ways * rest
        return polynomial(self.names, factors)

    def __str__(self) -> str:
        text = ""
        for powers, factor in self.terms:
            sign = "-" if factor < 0 else "+"
            word = term_text(self.names, powers, abs(factor))
            text = (f"-{word}" if factor < 0 else word) if not text else f"{text} {sign} {word}"
        return text or "0"

    __repr__ = __str__


def polynomial(names: Sequence[str], terms: Mapping[Exponents, Fraction | int]) -> Polynomial:
    """Return the polynomial with these coefficients, without terms that are 0."""
    known = ((powers, Fraction(factor)) for powers, factor in terms.items() if factor)
    return Polynomial(tuple(names), tuple(sorted(known, key=lambda term: _order(term[0]))))


def _order(powers: Exponents) -> tuple[int, tuple[int, ...]]:
    return sum(powers), tuple(-power for power in powers)


def term_text(names: Sequence[str], powers: Exponents, factor: Fraction | int | None) -> str:
    """Return a term as text: ``1,200,408 · batch · seq²``; without a factor only the sizes."""
    sizes = [
        name + (str(power).translate(_SUPERSCRIPTS) if power > 1 else "")
        for name, power in zip(names, powers, strict=True)
        if power
    ]
    if factor is None:
        return " · ".join(sizes) or "constant"
    if factor == 1 and sizes:
        return " · ".join(sizes)
    return " · ".join([number_text(factor), *sizes])


def number_text(value: Fraction | int) -> str:
    """Return a number with separators: ``1,200,408``, ``4,097/2``, or ``12.25`` if rounded."""
    exact = Fraction(value)
    if exact.denominator >= 10 and not 10**12 % exact.denominator:
        return f"{float(exact):,}"
    text = f"{exact.numerator:,}"
    return text if exact.denominator == 1 else f"{text}/{exact.denominator:,}"


def exponents(degrees: Sequence[int]) -> tuple[Exponents, ...]:
    """Return the powers of all terms of at most these degrees in each size."""
    return tuple(sorted(product(*(range(degree + 1) for degree in degrees)), key=_order))


class Solver:
    """Finds the polynomial of some terms through values at some points.

    The equations are solved once, for all values that were measured at the same points.

    >>> solver = Solver(("n",), [(1,), (2,), (4,)], exponents((1,)))
    >>> str(solver.solve([15, 25, 45]))
    '5 + 10 · n'
    >>> solver.solve([15, 25, 46]) is None
    True

    Args:
        names: of the sizes.
        points: where values are known, each once.
        terms: the powers of the terms, such as :func:`exponents` returns.
    """

    def __init__(
        self, names: Sequence[str], points: Sequence[Point], terms: Sequence[Exponents]
    ) -> None:
        self._names, self._terms = tuple(names), tuple(terms)
        self._pivots, self._inverse, self._rest = _reduced(tuple(points), self._terms)

    @property
    def is_determined(self) -> bool:
        """Whether the points suffice to find every coefficient."""
        return len(self._pivots) == len(self._terms)

    @property
    def spare(self) -> int:
        """How many of the points only verify the polynomial."""
        return len(self._rest)

    def solve(self, values: Sequence[int]) -> Polynomial | None:
        """Return the polynomial through all of `values`; None if there is none.

        Args:
            values: one for each point, in their order.
        """
        if not self.is_determined:
            return None
        chosen = [values[row] for row in self._pivots]
        for row, (weights, divisor) in self._rest.items():
            if sum(map(int.__mul__, weights, chosen)) != values[row] * divisor:
                return None
        return polynomial(
            self._names,
            {
                term: Fraction(sum(map(int.__mul__, weights, chosen)), divisor)
                for term, (weights, divisor) in zip(self._terms, self._inverse, strict=True)
            },
        )


_Row = tuple[tuple[int, ...], int]
"""Whole numbers and what their sum is divided by."""


@lru_cache(maxsize=64)
def _reduced(
    points: tuple[Point, ...], terms: tuple[Exponents, ...]
) -> tuple[tuple[int, ...], tuple[_Row, ...], dict[int, _Row]]:
    """Return rows that determine all coefficients, the coefficients by their values, and the
    value of each other row by these values.
    """
    matrix = [[Fraction(prod(map(pow, point, powers))) for powers in terms] for point in points]
    pivots: list[int] = []
    reduced: list[tuple[int, list[Fraction]]] = []
    for number, row in enumerate(matrix):
        left = _eliminated(row, reduced)
        column = next((index for index, value in enumerate(left) if value), None)
        if column is not None:
            pivots.append(number)
            reduced.append((column, [value / left[column] for value in left]))
        if len(pivots) == len(terms):
            break
    if len(pivots) < len(terms):
        return tuple(pivots), (), {}
    inverse = _inverse([matrix[number] for number in pivots])
    rest = {}
    for number, row in enumerate(matrix):
        if number not in pivots:
            columns = zip(*inverse, strict=True)
            rest[number] = _whole(sum(map(Fraction.__mul__, row, column)) for column in columns)
    return tuple(pivots), tuple(map(_whole, inverse)), rest


def _eliminated(
    row: Sequence[Fraction], reduced: Sequence[tuple[int, list[Fraction]]]
) -> list[Fraction]:
    left = list(row)
    for column, known in reduced:
        if factor := left[column]:
            left = [value - factor * other for value, other in zip(left, known, strict=True)]
    return left


def _inverse(matrix: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    """Return the inverse of a square matrix by Gauss-Jordan elimination."""
    size = len(matrix)
    rows = [[*row, *(Fraction(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i in range(size):
            if i != column and (factor := rows[i][column]):
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]


def _whole(values: Iterable[Fraction | int]) -> _Row:
    exact = [Fraction(value) for value in values]
    divisor = lcm(*(value.denominator for value in exact))
    return tuple(int(value * divisor) for value in exact), divisor


def nearest(
    names: Sequence[str],
    points: Sequence[Point],
    terms: Sequence[Exponents],
    values: Sequence[int],
    scales: Sequence[int] | None = None,
) -> Polynomial:
    """Return the polynomial of least squares; only for figures that no polynomial describes.

    Its coefficients have six digits.

    Args:
        names: of the sizes.
        points: where values are known.
        terms: the powers of the terms.
        values: one for each point.
        scales: what a difference at each point is compared with; by default all count the same.

    Raises:
        ValueError: if the points do not determine it.
    """
    weights = [Fraction(1, max(1, abs(scale))) for scale in scales or [1] * len(points)]
    rows = [
        [weight * prod(map(pow, point, powers)) for powers in terms]
        for point, weight in zip(points, weights, strict=True)
    ]
    columns = list(zip(*rows, strict=True))
    normal = [[sum(map(Fraction.__mul__, a, b), Fraction(0)) for b in columns] for a in columns]
    try:
        inverse = _inverse(normal)
    except StopIteration:
        raise ValueError(
            f"{len(points)} measured sizes do not determine a law of {len(terms)} terms; measure "
            "more sizes that differ, or fit fewer terms"
        ) from None
    weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
    right = [sum(map(Fraction.__mul__, column, weighted), Fraction(0)) for column in columns]
    factors = (sum(map(Fraction.__mul__, row, right), Fraction(0)) for row in inverse)
    rounded = (Fraction(f"{float(factor):.6g}") for factor in factors)
    return polynomial(names, dict(zip(terms, rounded, strict=True)))


def upper_envelope(
    polynomials: Iterable[Polynomial], least: Sequence[int]
) -> tuple[Polynomial, ...]:
    """Return those that are not below another one wherever all sizes are `least` or more.

    What is left out is surely never the highest; what is kept may not be either.
    """
    shifted = [(each, each.shifted(least)) for each in dict.fromkeys(polynomials)]
    far = [4 * value + 4 for value in least]
    shifted.sort(key=lambda pair: -pair[1].at(far))
    kept: list[tuple[Polynomial, Polynomial]] = []
    for each, moved in shifted:
        if not any(_is_below(moved, other) for _, other in kept):
            kept = [pair for pair in kept if not _is_below(pair[1], moved)]
            kept.append((each, moved))
    return tuple(each for each, _ in kept)


def _is_below(lower: Polynomial, upper: Polynomial) -> bool:
    return all(factor >= 0 for _, factor in (upper - lower).terms)
