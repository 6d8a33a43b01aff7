"""Polynomials have exact coefficients, and none is found through values that do not fit."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cka_memory.laws.polynomials import (
    Solver,
    exponents,
    nearest,
    polynomial,
    upper_envelope,
)

GRID = [(a, b) for a in (1, 2, 4) for b in (8, 16, 32, 64)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-(2**60), 2**60), min_size=12, max_size=12))
def test_every_coefficient_is_found_exactly(factors: list[int]) -> None:
    """Also if it is too large for a float."""
    expected = polynomial(("a", "b"), dict(zip(exponents((2, 3)), factors, strict=True)))
    solver = Solver(("a", "b"), GRID, exponents((2, 3)))
    assert solver.solve([int(expected.at(point)) for point in GRID]) == expected


def test_a_byte_beside_the_polynomial_is_no_fit() -> None:
    """One byte of a million million is not smoothed away."""
    solver = Solver(("n",), [(1,), (2,), (4,)], exponents((1,)))
    values = [10**12 + 7, 2 * 10**12 + 7, 4 * 10**12 + 7]
    found = solver.solve(values)
    assert str(found) == "7 + 1,000,000,000,000 · n"
    assert solver.solve([*values[:2], values[2] + 1]) is None


def test_points_that_do_not_determine_the_terms_give_no_polynomial() -> None:
    """Two points cannot show a square; nor can points on one line show two sizes."""
    assert not Solver(("n",), [(1,), (2,)], exponents((2,))).is_determined
    diagonal = Solver(("a", "b"), [(1, 1), (2, 2), (3, 3), (4, 4)], exponents((1, 1)))
    assert not diagonal.is_determined
    assert diagonal.solve([1, 2, 3, 4]) is None


def test_fractions_are_shown_as_such() -> None:
    """The n (n + 1) / 2 pairs have a law with halves."""
    solver = Solver(("n",), [(1,), (2,), (3,), (4,)], exponents((2,)))
    assert str(solver.solve([1, 3, 6, 10])) == "1/2 · n + 1/2 · n²"


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({}, "0"),
        ({(0, 0): 2_794_512, (1, 1): 1_200_408}, "2,794,512 + 1,200,408 · batch · seq"),
        ({(0, 0): -5, (1, 0): 1, (0, 2): -3}, "-5 + batch - 3 · seq²"),
    ],
)
def test_polynomials_read_as_in_the_issue(terms: dict[tuple[int, int], int], text: str) -> None:
    """Terms come by their degree, with separators and powers."""
    assert str(polynomial(("batch", "seq"), terms)) == text


def test_shifted_polynomial_has_the_same_values() -> None:
    """p(x) is q(x - 3, y - 5)."""
    law = polynomial(("x", "y"), {(0, 0): 7, (2, 1): 3, (0, 3): Fraction(1, 2)})
    moved = law.shifted((3, 5))
    assert all(law.at((x, y)) == moved.at((x - 3, y - 5)) for x in (3, 9) for y in (5, 6, 50))


def test_the_envelope_keeps_what_may_be_the_highest() -> None:
    """10 + n is always below 11 + n; n² is above both from 4 on."""
    low = polynomial(("n",), {(0,): 10, (1,): 1})
    high = polynomial(("n",), {(0,): 11, (1,): 1})
    square = polynomial(("n",), {(2,): 1})
    assert set(upper_envelope([low, high, square], (1,))) == {high, square}
    assert upper_envelope([low, square], (100,)) == (square,)


def test_nearest_has_the_least_squares() -> None:
    """The mean, for a polynomial of degree 0."""
    assert str(nearest(("n",), [(1,), (2,), (3,)], [(0,)], [1, 2, 6])) == "3"
    with pytest.raises(ValueError, match="1 measured sizes do not determine a law of 2 terms"):
        nearest(("n",), [(1,)], exponents((1,)), [1])
