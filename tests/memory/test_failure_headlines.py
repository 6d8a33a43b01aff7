"""The line about a failed test that summaries show."""

import pytest

from pytest_cka_memory.core.verdicts import Breach, Result
from pytest_cka_memory.reports.failure import headline


def _breach(**changes):
    given = {"limit": "max_peak_mb(1)", "allowed_bytes": 2**20, "measured_bytes": 3 * 2**20}
    given |= {"message": "a sentence", "figure": "peak_increase_bytes", **changes}
    return Breach(**given)


@pytest.fixture
def result_of(record):
    """Build a region with these broken limits."""
    return lambda *breaches, label="": Result("t.py::test", record(label=label), breaches=breaches)


def test_headline_names_limit_region_figure_and_excess(result_of):
    """The line says what is broken and by how much, and how many more limits are."""
    found = result_of(_breach(), _breach(), label="train")
    expected = "max_peak_mb(1) broken in 'train' (and 1 more): peak increase 3.00 MB, 2.00 MB"
    assert headline([found]) == f"{expected} too much"


def test_headline_of_a_limit_that_could_not_be_judged_is_its_sentence(result_of):
    """Without a measured figure the sentence says why."""
    assert headline([result_of(_breach(measured_bytes=None))]) == (
        "max_peak_mb(1) broken: a sentence"
    )


def test_limits_that_only_warn_have_no_headline(result_of):
    """The test does not fail for them."""
    assert headline([result_of(_breach(warns=True))]) == ""


def test_long_limits_and_labels_are_cut(result_of):
    """The line stays short, and the figure is still in it."""
    text = headline([result_of(_breach(limit="x" * 300), label="train " * 100)])
    assert len(text) <= 130
    assert text.endswith("peak increase 3.00 MB, 2.00 MB too much")
