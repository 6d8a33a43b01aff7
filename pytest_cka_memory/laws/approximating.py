"""Laws of figures that no polynomial gives, such as with workspaces: the nearest ones."""

from collections.abc import Sequence
from itertools import product

from pytest_cka_memory.laws.polynomials import Point, Polynomial, Solver, exponents, nearest
from pytest_cka_memory.laws.samples import WHOLE, Moment, Sample


def from_lines(
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
    found = [sample.composition(moment) for sample in samples]
    if not all(found) or not solver.is_determined or not solver.spare:
        return None
    exact: Polynomial | None = None
    for site in {site: None for known in found for site in known}:
        law = solver.solve([known.get(site, 0) for known in found])
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


def simplest(names: Sequence[str], samples: Sequence[Sample], degrees: Point) -> Polynomial:
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
