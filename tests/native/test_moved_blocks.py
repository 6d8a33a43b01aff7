"""Blocks to which the bytes of older ones were moved, and blocks that are older than a region."""

from collections.abc import Iterator

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.blocks.counter import Counter

ADDRESSES = (64, 128, 192)
"""Nothing can be allocated so low in memory, so that a test may use these addresses."""


@pytest.fixture(autouse=True)
def _removed(counter: Counter) -> Iterator[None]:
    yield
    for address in ADDRESSES:
        counter.remove(address)


def test_older_tensor_that_grows_is_new_only_by_its_growth(probe: MemoryProbe) -> None:
    """A tensor that a region makes larger moves to another block, whose first bytes are old."""
    old = torch.zeros(100)
    with probe.measure() as region:
        old.resize_(150)
    assert (region.retained_bytes, region.net_bytes) == (200, 200)


def test_empty_tensor_that_grows_after_an_older_one_is_new(probe: MemoryProbe) -> None:
    """A tensor without bytes has nothing to move, also if another was moved just before."""
    old, empty = torch.zeros(100), torch.empty(0)
    with probe.measure() as region:
        old.resize_(150)
        empty.resize_(60)
    assert region.retained_bytes == 200 + 240


def test_block_that_only_continues_an_older_one_is_not_listed(counter: Counter) -> None:
    """A block that has no new bytes is no new allocation, and hides none that is."""
    older, new, moved = ADDRESSES
    counter.add(older, 50, is_new=True)
    origin = counter.origin_of(older)
    assert origin is not None
    counter.add(new, 10, is_new=True)
    counter.add(moved, 50, is_new=True)
    counter.inherit(moved, origin)
    found = counter.allocations_since(origin.serial)
    assert [(one.key, one.bytes) for one in found] == [(new, 10)]


def test_garbage_counts_by_what_the_region_allocated_of_it(counter: Counter) -> None:
    """Of what the collector frees, older blocks and the old bytes of moved ones are left out."""
    older, new, moved = ADDRESSES
    counter.add(older, 50, is_new=True)
    region = counter.open()
    origin = counter.origin_of(older)
    assert origin is not None
    counter.add(moved, 70, is_new=True)
    counter.inherit(moved, origin)
    counter.add(new, 3, is_new=True)
    counter.note_collection(begins=True)
    for address in ADDRESSES:
        counter.remove(address)
    counter.note_collection(begins=False)
    collected = region.collected()
    region.close()
    assert collected == 20 + 3


def test_last_block_before_a_region_is_among_its_older_ones(counter: Counter) -> None:
    """What was live before a region can be listed with addresses, including the last of it."""
    old = [torch.UntypedStorage(size) for size in (100, 200)]
    region = counter.open()
    new = torch.UntypedStorage(300)
    (group,) = [group for group in region.at_peak() if group.before_region]
    region.close()
    assert group.older is not None
    found = group.older()
    assert [found.get(block.data_ptr()) for block in (*old, new)] == [100, 200, None]
