"""The decoder of reports: numbers that no measurement can give are refused in every dataclass."""

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest

from pytest_cka_memory.core.decoder import MAX_NUMBER, ShapeError, decode, shown


@dataclass(frozen=True)
class Point:
    """Two numbers, which the decoder checks at once."""

    x: float
    y: float | None = None


@pytest.mark.parametrize("bad", [nan, inf, -inf, float(MAX_NUMBER), -float(2**63), True, "1"])
@pytest.mark.parametrize("name", ["x", "y"])
def test_bad_number_is_refused_at_every_place(name: str, bad: object) -> None:
    """NaN and other bad numbers are refused anywhere, since ``min`` and ``max`` pass over NaN."""
    with pytest.raises(ShapeError, match=rf"^point\.{name} is .*; expected a number$"):
        decode(Point, {"x": 5.0, "y": 5.0} | {name: bad}, "point")


@pytest.mark.parametrize("given", [Point(5.0, 2), Point(0, None), Point(-1.5, 0.0)])
def test_good_numbers_are_kept_as_they_are(given: Point) -> None:
    """Zero, a missing number and a whole number in place of a fraction are accepted."""
    assert decode(Point, {"x": given.x, "y": given.y}, "point") == given


@dataclass(frozen=True)
class Alone:
    """A single number, which is checked by itself."""

    x: int


@pytest.mark.parametrize("number", [0, 2**62, 2**63 - 1, 1 - 2**63])
def test_whole_number_is_kept_up_to_the_limit(number: int) -> None:
    """Numbers of less than 2**63 in size are accepted."""
    assert decode(Alone, {"x": number}, "") == Alone(number)


@pytest.mark.parametrize("number", [2**63, -(2**63)])
def test_whole_number_at_the_limit_is_refused(number: int) -> None:
    """A number of 2**63 is refused with either sign; a path without a start begins with the key."""
    with pytest.raises(ShapeError, match=rf"^x is {number}; expected a whole number$"):
        decode(Alone, {"x": number}, "")


def test_whole_number_between_two_floats_is_not_rounded() -> None:
    """A whole number in place of a fraction stays one: 2**53 + 1 has no float."""
    assert decode(Point, {"x": 2**53 + 1}, "").x == 2**53 + 1


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (dict[str, Any], {"a": [1, None], "b": {}}),
        (tuple[bool, ...], (True, False)),
        (type(None) | int, 3),
        (int | None, None),
    ],
    ids=str,
)
def test_value_of_a_plain_type_is_kept(kind: Any, data: object) -> None:
    """Any value, lists of one type, and values that may be missing are returned as they are."""
    assert decode(kind, data, "where") == data


def test_wrong_truth_value_is_named_with_what_belongs_there() -> None:
    """0 and 1 are no truth values in JSON."""
    with pytest.raises(ShapeError, match=r"^flags\[1\] is 1; expected true or false$"):
        decode(tuple[bool, ...], [True, 1], "flags")


def test_long_key_is_cut_in_a_path() -> None:
    """The first 80 characters of a key are shown, because a file may have keys of any length."""
    key = "".join(str(number % 10) for number in range(100))
    with pytest.raises(ShapeError) as refused:
        decode(dict[str, int], {key: "1"}, "counts")
    assert str(refused.value) == f"counts.{key[:80]} is '1'; expected a whole number"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([10**4] * 4 + [10**3] * 2, "[10000, 10000, 10000, 10000, 1000, 1000]"),
        ([10**4] * 5 + [10**3], "[10000, 10000, 10000, 10000, 10000, 1..."),
    ],
    ids=["40-characters", "41-characters"],
)
def test_shown_value_has_at_most_forty_characters(value: object, text: str) -> None:
    """A value of 40 characters is shown whole; a longer one ends in dots at that length."""
    assert shown(value) == text
    assert len(text) == 40


@dataclass(frozen=True)
class Level:
    """A dataclass with a field of the name of the quicker way to make a record."""

    of: str = "allocated"


@pytest.mark.parametrize(("data", "of"), [({}, "allocated"), ({"of": "reserved"}, "reserved")])
def test_field_named_as_the_quicker_way_is_a_field(data: dict[str, str], of: str) -> None:
    """Only a class method makes an object in place of the constructor."""
    assert decode(Level, data, "") == Level(of)
