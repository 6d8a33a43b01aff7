"""The largest size that fits on a device, with its allocator and a limit on its reserve."""

import pytest

from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


def test_largest_size_fills_the_device(probe, allocate, segments, limit_reserve):
    """Of blocks of 10 MB and more, the allocator reserves multiples of 2 MB: 20 of 41 MB fit."""
    limit_reserve(41 * MB)
    assert probe.largest(lambda n: allocate(2 * MB * n)) == 20
    assert probe.records == []


def test_reserve_of_earlier_calls_is_returned(probe, allocate, segments, limit_reserve):
    """Each call finds an empty cache: 3 blocks of 12 MB fit beside no block of an earlier call."""
    limit_reserve(41 * MB)
    assert probe.largest(lambda n: [allocate(12 * MB) for _ in range(n)]) == 3


def test_tensors_in_the_traceback_are_freed(probe, allocate, limit_reserve):
    """A call that ran out of memory leaves nothing for the next one, nor after the search."""
    limit_reserve(41 * MB)

    def step(size):
        held = [allocate(20 * MB)]
        held.append(allocate(2 * MB * size))

    before = probe.snapshot().allocated_bytes
    with probe.measure() as region:
        assert probe.largest(step) == 10
    assert region.retained_bytes == 0
    assert probe.snapshot().allocated_bytes == before
