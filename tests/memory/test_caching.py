"""The simulated caching allocator follows the rules of PyTorch's CUDA allocator."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_cka_memory.errors import CapacityError
from pytest_cka_memory.meters.predicted.allocator import (
    CachingAllocator,
    block_bytes,
    segment_bytes,
)
from pytest_cka_memory.meters.predicted.expandable_allocator import ExpandableAllocator

KB, MB = 2**10, 2**20
both_allocators = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])


@pytest.fixture
def allocator():
    return CachingAllocator()


@pytest.mark.parametrize(
    ("size", "block"),
    [
        pytest.param(1, 512, id="least"),
        pytest.param(512, 512, id="equal"),
        pytest.param(513, 1024, id="one-byte-above"),
        pytest.param(MB + 1, MB + 512, id="large"),
    ],
)
def test_blocks_are_multiples_of_512_bytes(allocator, size, block):
    """Requested bytes are counted beside the blocks."""
    allocator.allocate(size)
    assert block_bytes(size) == block
    assert (allocator.allocated.current, allocator.requested.current) == (block, size)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        pytest.param(512, 2 * MB, id="small"),
        pytest.param(MB, 2 * MB, id="largest-small"),
        pytest.param(MB + 512, 20 * MB, id="smallest-large"),
        pytest.param(10 * MB - 512, 20 * MB, id="largest-shared"),
        pytest.param(10 * MB, 10 * MB, id="smallest-own"),
        pytest.param(10 * MB + 512, 12 * MB, id="own-rounded-to-2-MiB"),
        pytest.param(13 * MB, 14 * MB, id="own-odd"),
    ],
)
def test_segment_sizes_follow_the_rules_of_pytorch(allocator, size, segment):
    """2 MiB for small blocks, 20 MiB for blocks below 10 MiB, then multiples of 2 MiB."""
    allocator.allocate(size)
    assert segment_bytes(size) == segment
    assert allocator.reserved.current == segment


def test_small_and_large_blocks_do_not_share_a_segment(allocator):
    """A small block is not allocated in the free part of a large segment."""
    allocator.allocate(2 * MB)
    allocator.allocate(512)
    assert allocator.reserved.current == 22 * MB


@pytest.mark.parametrize(
    ("size", "block"),
    [
        pytest.param(11 * MB, 12 * MB, id="remainder-of-1-MiB-stays"),
        pytest.param(11 * MB - 512, 11 * MB - 512, id="larger-remainder-is-split-off"),
    ],
)
def test_large_block_keeps_a_remainder_of_up_to_1_mib(allocator, size, block):
    """So the allocated bytes may exceed the requested bytes by up to 1 MiB."""
    allocator.free(allocator.allocate(12 * MB))
    assert allocator.allocate(size).size == block
    assert allocator.reserved.current == 12 * MB


def test_small_block_is_split_down_to_512_bytes(allocator):
    """A segment of 2 MiB holds 4,096 small blocks."""
    for _ in range(4096):
        allocator.allocate(1)
    assert allocator.reserved.current == 2 * MB
    allocator.allocate(1)
    assert allocator.reserved.current == 4 * MB


def test_smallest_free_block_that_fits_is_used(allocator):
    """Neither the first block nor the last freed one is used."""
    wide, narrow, _ = (allocator.allocate(size * MB) for size in (16, 12, 14))
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(11 * MB) is narrow


def test_lowest_address_is_used_if_free_blocks_have_equal_sizes(allocator):
    """The order in which they were freed does not matter."""
    first, _, third, _ = (allocator.allocate(512) for _ in range(4))
    allocator.free(third)
    allocator.free(first)
    assert allocator.allocate(512).address == first.address


def test_adjacent_free_blocks_of_one_segment_are_merged(allocator):
    """With the block before and the block after, so that a larger block fits there."""
    blocks = [allocator.allocate(4 * MB) for _ in range(5)]
    for at in (1, 3, 2):
        allocator.free(blocks[at])
    assert allocator.allocate(12 * MB).address == blocks[1].address
    assert allocator.reserved.current == 20 * MB


def test_blocks_of_different_segments_are_never_merged(allocator):
    """Even if the driver placed the segments side by side."""
    for block in [allocator.allocate(10 * MB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(20 * MB)
    assert allocator.reserved.current == 40 * MB


def test_streams_do_not_share_blocks(allocator):
    """Another stream may still read what one stream has freed."""
    allocator.free(allocator.allocate(512, stream=0))
    allocator.allocate(512, stream=1)
    assert allocator.reserved.current == 4 * MB


def test_freed_memory_stays_reserved_until_the_cache_is_emptied(allocator):
    """Emptying the cache returns whole segments."""
    allocator.free(allocator.allocate(30 * MB))
    assert (allocator.allocated.current, allocator.reserved.current) == (0, 30 * MB)
    allocator.empty_cache()
    assert allocator.reserved.current == 0


def test_empty_cache_keeps_segments_with_a_live_block(allocator):
    """A live block of 512 bytes keeps a segment of 2 MiB."""
    freed, _ = allocator.allocate(MB), allocator.allocate(1)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved.current == 2 * MB


@both_allocators
@pytest.mark.parametrize("size", [pytest.param(40 * MB, id="equal")])
def test_card_can_be_filled_to_the_last_byte(kind, size):
    """The capacity limits the reserved memory."""
    allocator = kind(40 * MB)
    allocator.allocate(size)
    with pytest.raises(CapacityError):
        allocator.allocate(1)


@both_allocators
def test_refused_allocation_changes_nothing(kind):
    """The error has the requested size; nothing was allocated."""
    allocator = kind(40 * MB)
    kept = allocator.allocate(20 * MB)
    with pytest.raises(CapacityError) as caught:
        allocator.allocate(30 * MB)
    assert caught.value.args == (30 * MB,)
    assert allocator.allocated.current == 20 * MB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved.current == 0


@both_allocators
def test_full_card_empties_its_cache_before_it_refuses(kind):
    """Two free segments of 20 MiB are returned, and one of 40 MiB is reserved."""
    allocator = kind(40 * MB)
    for block in [allocator.allocate(20 * MB, stream) for stream in (0, 1)]:
        allocator.free(block)
    allocator.allocate(40 * MB)
    assert allocator.reserved.current == 40 * MB


def test_peaks_are_kept_until_reset(allocator):
    """After the reset they start from the current figures."""
    allocator.free(allocator.allocate(10 * MB))
    assert (allocator.allocated.peak, allocator.requested.peak) == (10 * MB, 10 * MB)
    allocator.empty_cache()
    assert allocator.reserved.peak == 10 * MB
    allocator.reset_peak()
    assert (allocator.allocated.peak, allocator.reserved.peak) == (0, 0)


@pytest.mark.parametrize(("size", "page"), [(512, 2 * MB), (2 * MB, 20 * MB)])
def test_expandable_segment_grows_by_pages(size, page):
    """Pages have the size that segments would have; a block may cross page boundaries."""
    allocator = ExpandableAllocator()
    allocator.allocate(size)
    assert allocator.reserved.current == page
    allocator.allocate(page)
    # A block of the size of a small page is a large block and goes to the other pool.
    assert allocator.reserved.current == (22 * MB if size == 512 else 40 * MB)


def test_expandable_segment_grows_instead_of_adding_segments():
    """Expandable segments are made for blocks that are a little larger each time."""
    reserved = []
    for allocator in (CachingAllocator(), ExpandableAllocator()):
        for size in range(20 * MB, 40 * MB, 4 * MB):
            allocator.free(allocator.allocate(size))
        reserved.append(allocator.reserved.current)
    assert reserved == [(20 + 24 + 28 + 32 + 36) * MB, 40 * MB]


def test_expandable_block_is_split_down_to_512_bytes():
    """It keeps no remainder of up to 1 MiB, unlike a large block in an ordinary segment."""
    allocator = ExpandableAllocator()
    allocator.free(allocator.allocate(20 * MB))
    assert allocator.allocate(20 * MB - 512).size == 20 * MB - 512


def test_empty_cache_returns_whole_pages_of_an_expandable_segment():
    """The pages that a live block touches stay reserved."""
    allocator = ExpandableAllocator()
    before, kept, after = (allocator.allocate(30 * MB) for _ in range(3))
    assert allocator.reserved.current == 100 * MB
    allocator.free(before)
    allocator.free(after)
    allocator.empty_cache()
    assert allocator.reserved.current == 40 * MB  # the pages from 20 to 60 MiB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved.current == 0


def test_empty_cache_keeps_a_page_that_a_live_block_shares_with_a_free_one():
    """The part of the free block in that page is used again without a new page."""
    allocator = ExpandableAllocator()
    kept, freed = allocator.allocate(30 * MB), allocator.allocate(50 * MB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved.current == 40 * MB
    assert allocator.allocate(10 * MB).address == kept.end
    assert allocator.reserved.current == 40 * MB


def test_returned_pages_are_mapped_again():
    """They are mapped at their old addresses before the segment grows at its end."""
    allocator = ExpandableAllocator()
    freed, _ = allocator.allocate(40 * MB), allocator.allocate(20 * MB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.allocate(40 * MB).address == freed.address
    assert allocator.reserved.current == 60 * MB


def test_expandable_segment_uses_a_gap_before_its_end():
    """Of two free blocks that fit, the one that cannot grow is used."""
    allocator = ExpandableAllocator()
    middle, _, last = (allocator.allocate(20 * MB) for _ in range(3))
    allocator.free(last)
    allocator.free(middle)
    assert allocator.allocate(2 * MB).address == middle.address


sizes = st.one_of(
    st.integers(1, 64 * MB),
    st.sampled_from((1, 512, 513, MB, MB + 1, 10 * MB - 1, 10 * MB, 20 * MB + 1)),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 2**16)),
        st.tuples(st.just("empty")),
    ),
    max_size=60,
)


@both_allocators
@settings(deadline=None)
@given(steps=steps, capacity=st.sampled_from((None, 64 * MB, 200 * MB)))
def test_counters_are_consistent_after_any_sequence_of_calls(kind, steps, capacity):
    """Live blocks never overlap, and all counters are 0 after all blocks are freed.

    Reserved bytes are never below allocated bytes, and these never below requested bytes.
    """
    allocator = kind(capacity)
    live = []
    for action, *details in steps:
        if action == "allocate":
            try:
                live.append(allocator.allocate(*details))
            except CapacityError:
                assert capacity is not None
        elif action == "free" and live:
            allocator.free(live.pop(details[0] % len(live)))
        elif action == "empty":
            allocator.empty_cache()
        ranges = sorted((block.address, block.end) for block in live)
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        assert allocator.allocated.current == sum(block.size for block in live)
        assert allocator.requested.current == sum(block.requested for block in live)
        levels = allocator.reserved, allocator.allocated, allocator.requested
        assert levels[0].current >= levels[1].current >= levels[2].current
        assert capacity is None or allocator.reserved.peak <= capacity
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    levels = allocator.reserved, allocator.allocated, allocator.requested
    assert [level.current for level in levels] == [0, 0, 0]
