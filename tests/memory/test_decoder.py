"""The decoder of reports: numbers that no measurement can give are refused in every dataclass."""

from dataclasses import dataclass
from math import inf, nan

import pytest

from pytest_cka_memory.core.decoder import MAX_NUMBER, ShapeError, decode


@dataclass(frozen=True)
class Point:
    """Two numbers, which the decoder checks at once."""

    x: float
    y: float | None = None


@pytest.mark.parametrize("bad", [nan, inf, -inf, float(MAX_NUMBER), True, "1"])
@pytest.mark.parametrize("name", ["x", "y"])
def test_bad_number_is_refused_at_every_place(name: str, bad: object) -> None:
    """NaN and other bad numbers are refused anywhere, since ``min`` and ``max`` pass over NaN."""
    with pytest.raises(ShapeError, match=rf"^point\.{name} is .*; expected a number$"):
        decode(Point, {"x": 5.0, "y": 5.0} | {name: bad}, "point")


@pytest.mark.parametrize("given", [Point(5.0, 2), Point(0, None), Point(-1.5, 0.0)])
def test_good_numbers_are_kept_as_they_are(given: Point) -> None:
    """Zero, a missing number and a whole number in place of a fraction are accepted."""
    assert decode(Point, {"x": given.x, "y": given.y}, "point") == given
