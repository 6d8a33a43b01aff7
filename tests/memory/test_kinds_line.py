"""The line about kinds of memory at a peak."""

import pytest
from reports_made import record

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.retention import Holding

MB = 2**20
MADE = (
    Holding(bytes=61 * MB, count=1, kind="activations"),
    Holding(bytes=39 * MB - 1, count=1, kind="gradients"),
    Holding(bytes=1, count=1, kind="inputs"),
)
OLDER = Holding(bytes=100 * MB, count=0, kind="parameters", before_region=True)


def test_line_about_an_increase_leaves_out_what_is_older() -> None:
    """The line about an increase has the shares of what the region allocated, and zeros."""
    region = record(start_bytes=100 * MB, peak_bytes=200 * MB, at_peak=(*MADE, OLDER))
    assert sentences.kinds_line(region, "peak_increase_bytes") == (
        "at the peak, allocated in the region: activations 61 %, gradients 39 %, inputs < 1 %, "
        "optimiser 0"
    )


def test_line_about_a_level_has_what_is_older() -> None:
    """The line about the whole level has also the shares of what was live before the region."""
    region = record(start_bytes=100 * MB, peak_bytes=200 * MB, at_peak=(*MADE, OLDER))
    assert sentences.kinds_line(region, "peak_bytes") == (
        "at the peak, with memory from before the region: parameters 50 %, activations 30 %, "
        "gradients 19 %, inputs < 1 %, optimiser 0"
    )


def test_line_says_how_much_older_memory_was_freed_before_the_peak() -> None:
    """If older memory was freed before the peak, the increase is less than the sum, by so much."""
    region = record(start_bytes=110 * MB, peak_bytes=200 * MB, at_peak=(*MADE, OLDER))
    found = sentences.kinds_line(region, "peak_increase_bytes")
    assert found.endswith("optimiser 0; 10.00 MB of older memory was freed before the peak")


@pytest.mark.parametrize("kind", [None, "temporaries"])
def test_line_names_zeros_of_training_only_if_there_is_training(kind: str | None) -> None:
    """Without kinds there is no line; without activations and gradients it names no zeros."""
    region = record(start_bytes=0, peak_bytes=8, at_peak=(Holding(bytes=8, count=1, kind=kind),))
    expected = "" if kind is None else "at the peak, allocated in the region: temporaries 100 %"
    assert sentences.kinds_line(region, "peak_increase_bytes") == expected
