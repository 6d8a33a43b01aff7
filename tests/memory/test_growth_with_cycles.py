"""Growth of loops that leave garbage in reference cycles, compared with a collection per batch."""

from functools import partial

import pytest
from growth_programs import WAYS, KeepsOne, LeavesOne, check_random_loops, growth

from pytest_cka_memory import MemoryProbe

LENGTHS = (5, 8, 10, 11, 12, 13, 15, 19, 27, 28, 40, 41, 50, 66, 80)


@pytest.fixture
def lengths(is_native: bool) -> tuple[int, ...]:
    """Numbers of batches; a region of the ledger takes a second or more."""
    return LENGTHS if is_native else (11,)


@pytest.mark.parametrize("way", WAYS)
def test_what_an_object_in_a_cycle_keeps_is_growth_at_every_length(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """What an object in a cycle keeps is growth if it was in use at all boundaries, though garbage
    later.
    """
    for batches in lengths:
        assert growth(cpu, lambda: [KeepsOne("cpu")], batches, way) == 4096, batches


@pytest.mark.parametrize("way", WAYS)
def test_garbage_that_waits_for_the_collector_is_no_growth(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """Garbage that waits for the collector is no growth, also if it begins late in the loop."""
    for batches in lengths:
        for keeps_last in (False, True):
            make = partial(LeavesOne, "cpu", keeps_last=keeps_last)
            assert growth(cpu, lambda: [make()], batches, way) == 0, batches  # noqa: B023


@pytest.mark.parametrize("way", WAYS)
def test_growth_beside_garbage_is_exact(
    cpu: MemoryProbe, lengths: tuple[int, ...], way: str
) -> None:
    """A loop that keeps 4096 bytes per batch beside as much garbage has that growth."""
    for batches in lengths:
        parts = lambda: [KeepsOne("cpu"), LeavesOne("cpu", keeps_last=True)]  # noqa: E731
        assert growth(cpu, parts, batches, way) == 4096, batches


def test_growth_of_random_loops_is_true_to_the_byte(cpu: MemoryProbe, is_native: bool) -> None:
    """Random loops, with cycles made in and around 5 to 40 batches, grow to the exact byte.

    72 have each number of batches without collections of their own, and with them.
    """
    check_random_loops(cpu, "cpu", range(72 if is_native else 3))
