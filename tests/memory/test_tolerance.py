"""Tolerances: what is accepted, what is refused, and the exact boundary."""

from fractions import Fraction
from math import nan

import pytest

from pytest_cka_memory import LimitError
from pytest_cka_memory.core.verdicts import Difference, Tolerance, differences, parse_tolerance


@pytest.mark.parametrize(
    ("text", "share", "slack_bytes"),
    [
        ("5%", Fraction(1, 20), 0),
        ("0%", Fraction(0), 0),
        (" 0.1 % ", Fraction(1, 1000), 0),
        ("250%", Fraction(5, 2), 0),
        ("64 KiB", Fraction(0), 65536),
        ("0 B", Fraction(0), 0),
        ("5% + 64 KiB", Fraction(1, 20), 65536),
        ("1 MB+10%", Fraction(1, 10), 2**20),
    ],
)
def test_a_share_a_size_or_their_sum_is_accepted(
    text: str, share: Fraction, slack_bytes: int
) -> None:
    """A tolerance is a share, a size or their sum, in any order, with or without spaces."""
    tolerance = parse_tolerance(text)
    assert (tolerance.share, tolerance.slack_bytes) == (share, slack_bytes)


def test_a_tolerance_is_shown_as_it_was_written() -> None:
    """A tolerance is shown as it was written except for extra spaces, as failures quote it."""
    assert parse_tolerance(" 5%  + 64 KiB ").text == "5% + 64 KiB"


@pytest.mark.parametrize(
    "value",
    [
        *("5", "", " ", "%", "-5%", "+5%", "5%%", "5% +", "5% + 5%", "1 MB + 2 MB", "5% - 1 MB"),
        *("5% + 1 MB + 1 MB", "nan%", "1e3%", "inf", "5 percent", "2KBanana"),
        *(5, 0.05, None, True, b"5%"),
    ],
)
def test_any_other_tolerance_is_refused(value: object) -> None:
    """A number alone is refused as a tolerance, because it could mean percent, bytes or MB."""
    with pytest.raises(LimitError) as caught:
        parse_tolerance(value)
    assert str(caught.value) == (
        f"cannot read {value!r} as a tolerance; write '5%', '64 KiB' or '5% + 64 KiB'"
    )


@pytest.mark.parametrize(
    ("text", "old", "allowed_bytes"),
    [
        ("5%", 100, 105),
        ("5%", 10**18, 105 * 10**16),
        ("5%", 19, 19),
        ("5%", 0, 0),
        ("10%", 2**53 + 1, 9_907_919_180_215_092),
        ("64 KiB", 0, 65536),
        ("5% + 1 B", 100, 106),
        ("5%", -100, 0),
        ("0%", 0.5, 0),
    ],
)
def test_the_boundary_is_exact_to_the_byte(text: str, old: float, allowed_bytes: int) -> None:
    """A tolerance allows its exact value and not one byte more; a share of 0 is 0."""
    tolerance = parse_tolerance(text)
    assert tolerance.allowed_bytes(old) == allowed_bytes
    for new_bytes, broken in ((allowed_bytes, False), (allowed_bytes + 1, True), (nan, True)):
        assert Difference("retained_bytes", old, new_bytes, allowed_bytes).broken is broken


def test_a_tolerance_without_share_and_bytes_allows_no_rise() -> None:
    """The defaults of a tolerance add nothing to the old figure."""
    assert Tolerance("none").allowed_bytes(100) == 100


def test_differences_are_the_compared_figures_that_changed() -> None:
    """Differences leave out figures that are equal, were unknown before, or are not compared."""
    old = {
        "peak_increase_bytes": 100,
        "retained_bytes": 100,
        "growth_bytes_per_batch": 0,
        "reserved_increase_bytes": None,
        "net_bytes": 1,
    }
    new = {**old, "peak_increase_bytes": 106, "retained_bytes": 90, "reserved_increase_bytes": 5}
    found = differences(old, {**new, "net_bytes": 2}, parse_tolerance("5%"))
    assert found == [
        Difference("peak_increase_bytes", 100, 106, 105),
        Difference("retained_bytes", 100, 90, 105),
    ]
    assert [difference.broken for difference in found] == [True, False]


def test_a_figure_that_is_missing_from_the_new_report_is_broken() -> None:
    """A figure that the new report lacks is broken: a loop cut to few batches must not pass."""
    (difference,) = differences({"growth_bytes_per_batch": 0}, {}, parse_tolerance("5%"))
    assert difference.new_bytes is None
    assert difference.broken
