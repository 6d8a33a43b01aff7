"""The largest size is searched near what the law says, with few runs."""

import pytest

from pytest_cka_memory.laws.answers import Limited, Search, highest


class Card:
    """Runs whose memory suffices up to a size."""

    def __init__(self, fits_up_to: int, multiple: int = 1) -> None:
        self.fits_up_to, self.multiple, self.runs = fits_up_to, multiple, []

    def run(self, size: int) -> Limited:
        if size % self.multiple:
            raise ValueError(f"{size} pixels cannot be halved")
        self.runs.append(size)
        return Limited(size <= self.fits_up_to, 1000 * size)


@pytest.mark.parametrize(
    ("truth", "by_law", "at_least"),
    [
        *[
            (100, 100, 101),
            (93, 100, 108),
            (100, 93, 108),
            (99, 100, 101),
            (3, 100, 101),
            (1, 1, 2),
        ],
        *[(102, 95, 96), (110, 95, 96), (101, 100, 101)],
    ],
)
def test_value_is_the_largest_that_ran(truth: int, by_law: int, at_least: int) -> None:
    """Whether the law says too much, because of fragmentation, or too little."""
    card = Card(truth)
    found = Search(card.run, 1).verified("batch", by_law, at_least, "the 9 MB of t4")
    assert found == truth
    assert found.is_verified
    assert (found.by_law, found.reserved_bytes) == (by_law, 1000 * truth)
    assert f"batch={truth} ran in the 9 MB of t4" in found.how
    assert f"batch={truth + 1} ran out of memory" in found.how
    assert len(card.runs) <= 14


def test_nothing_fits_if_not_even_one_runs() -> None:
    """0 is not verified, and says which sizes were tried."""
    found = Search(Card(0).run, 1).verified("batch", 10, 12, "the 9 MB of t4")
    assert (found, found.is_verified) == (0, False)
    assert found.how == "no batch that was tried ran in the 9 MB of t4; the smallest was 1"


def test_only_multiples_are_tried_if_the_code_takes_no_others() -> None:
    """A network that halves its pictures raises for odd ones."""
    found = Search(Card(1000, 32).run, 32).verified("px", 1010, 1100, "the 9 MB of t4")
    assert found == 992
    assert "px=1,024 ran out of memory; only multiples of 32 were tried" in found.how


@pytest.mark.parametrize(("truth", "by_law", "step"), [(100, 100, 4), (64, 64, 16), (96, 64, 32)])
def test_step_that_is_found_at_the_end_of_the_search_is_kept(
    truth: int, by_law: int, step: int
) -> None:
    """The law's size is a multiple, and the next one, which the law refuses, is none."""
    found = Search(Card(truth, step).run, step).verified("px", by_law, by_law + 1, "t4")
    assert found == truth
    assert f"px={truth + step} ran out of memory; only multiples of {step} were tried" in found.how


def test_other_errors_of_the_code_are_raised() -> None:
    """An error that is no lack of memory, at a size like those of the law."""
    with pytest.raises(ValueError, match="cannot be halved"):
        Search(Card(1000, 64).run, 32).verified("px", 1010, 1100, "the 9 MB of t4")


def test_few_runs_in_a_wide_range() -> None:
    """A million sizes are not all tried; the value ran all the same."""
    card = Card(1_632_857)
    found = Search(card.run, 1).verified("batch", 1_935_521, 2_000_000, "t4")
    assert found <= card.fits_up_to < found * 1.01
    assert len(card.runs) == 14


def test_highest_number_that_fits() -> None:
    """By doubling and bisection; every number is an error."""
    assert highest(lambda n: n <= 1234, "") == 1234
    assert highest(lambda _: False, "") == 0
    with pytest.raises(ValueError, match="every size"):
        highest(lambda _: True, "every size fits")
