"""Wait until a card has free memory, with a scripted card."""

import pytest

from pytest_cka_memory import MemoryProbe, SizeError
from pytest_cka_memory.measure import system
from pytest_cka_memory.testing import ScriptedMeter

MB = 2**20


@pytest.fixture
def card() -> ScriptedMeter:
    return ScriptedMeter(has_reserve=True, total_bytes=100 * MB)


def test_reserve_of_this_process_is_returned_first(card, monkeypatch):
    """What is only reserved counts as free after cleaning, without waiting."""
    monkeypatch.setattr(system.time, "sleep", lambda seconds: pytest.fail("it waits"))
    card.free(card.allocate(90 * MB))
    assert MemoryProbe(meter=card).wait_until_free(50) == 100


def test_it_waits_until_others_have_returned_their_memory(card, monkeypatch):
    """Other programs end while it waits; it returns how many MB are free then."""
    card.outside_bytes = 90 * MB

    def sleep(seconds: float) -> None:
        card.outside_bytes -= 30 * MB

    monkeypatch.setattr(system.time, "sleep", sleep)
    assert MemoryProbe(meter=card).wait_until_free("50 MB", timeout=1e6) == 70


def test_timeout_says_what_is_in_use(card):
    """The message has what is free, what was wanted, and how much this process has."""
    card.outside_bytes = 90 * MB
    card.allocate(4 * MB)
    text = r"cpu has 6.00 MB free after 0 s, not 50.00 MB: of 94.00 MB in use, .* has 4.00 MB"
    with pytest.raises(TimeoutError, match=text):
        MemoryProbe(meter=card).wait_until_free(50, timeout=0)


def test_sizes_that_can_never_be_free_are_refused(card):
    """More than the card has, and what is no size, are errors at once."""
    probe = MemoryProbe(meter=card)
    with pytest.raises(ValueError, match=r"has 100.00 MB in total, so 101.00 MB can never"):
        probe.wait_until_free(101)
    with pytest.raises(SizeError, match="'much'"):
        probe.wait_until_free("much")


def test_figures_of_the_driver(card):
    """Highest values are those at boundaries and the end; the reserve is not outside."""
    card.outside_bytes = 10 * MB
    with MemoryProbe(meter=card, also=["driver"]).measure() as region:
        card.allocate(20 * MB)
        card.outside_bytes = 30 * MB
        region.batch_done()
        card.outside_bytes = 15 * MB
    figures = region.driver_start_mb, region.driver_peak_mb, region.driver_end_mb
    assert figures == (10, 50, 35)
    assert (region.outside_start_mb, region.outside_peak_mb) == (10, 30)
    assert region.outside_increase_mb == 20
