"""Levels and reserves of an accelerator, as its allocator would report them."""

from collections.abc import Iterator

import pytest

from pytest_cka_memory.meters.blocks import UNKNOWN
from pytest_cka_memory.meters.blocks.counter import Counter

ADDRESS = 64
"""Nothing can be allocated so low in memory."""


@pytest.fixture
def device() -> Iterator[Counter]:
    """The counter of a device that no machine has: the test says what its allocator reports."""
    counter = Counter(20 << 8 | 4)
    counter.set_level(0, 0)
    counter.reset_peak()
    yield counter
    counter.set_level(0, 0)


def test_reserve_has_a_peak_that_starts_again_with_that_of_the_level(device: Counter) -> None:
    """The highest reserve is kept until a new peak is started, from the reserve at that moment."""
    device.set_level(10, 100)
    device.set_level(10, 50)
    figures = device.figures()
    assert (figures.reserved, figures.peak_reserved) == (50, 100)
    device.reset_peak()
    assert device.figures().peak_reserved == 50


def test_region_has_the_highest_reserve_since_it_began(device: Counter) -> None:
    """A region has the reserve at its start and the highest since, though it is lower now."""
    device.set_level(0, 300)
    device.set_level(0, 40)
    region = device.open()
    device.set_level(0, 100)
    device.set_level(0, 60)
    levels = region.read()
    region.close()
    assert (region.start_reserved, levels.reserved, levels.peak_reserved) == (40, 60, 100)


def test_level_that_is_set_alone_leaves_the_reserve(device: Counter) -> None:
    """A level whose reserve is not known changes the level only."""
    device.set_level(10, 100)
    device.set_level(20, UNKNOWN)
    figures = device.figures()
    assert (figures.level, figures.reserved, figures.peak_reserved) == (20, 100, 100)


def test_blocks_at_one_address_of_two_devices_are_two(counter: Counter, device: Counter) -> None:
    """Each device has addresses of its own: a block of one is not taken for one of the other."""
    since = counter.figures().serial
    assert counter.add(ADDRESS, 10, is_new=True)
    assert device.add(ADDRESS, 20, is_new=True)
    assert (counter.retained_since(since), device.retained_since(since)) == (10, 20)
    counter.remove(ADDRESS)
    assert (counter.retained_since(since), device.retained_since(since)) == (0, 20)
    device.remove(ADDRESS)
    assert device.retained_since(since) == 0
