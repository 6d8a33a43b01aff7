"""The simulated caching allocator, rule by rule, from what PyTorch documents of its own."""

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
BOTH = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])


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
    """What was asked for is counted beside them."""
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
def test_segments_come_in_the_sizes_of_the_driver_calls(allocator, size, segment):
    """2 MiB for small blocks, 20 MiB below 10 MiB, then whole steps of 2 MiB."""
    allocator.allocate(size)
    assert segment_bytes(size) == segment
    assert allocator.reserved.current == segment


def test_small_and_large_blocks_share_no_segment(allocator):
    """A small block does not go into the free rest of a large segment."""
    allocator.allocate(2 * MB)
    allocator.allocate(512)
    assert allocator.reserved.current == 22 * MB


@pytest.mark.parametrize(
    ("size", "block"),
    [
        pytest.param(11 * MB, 12 * MB, id="rest-of-1-MiB-stays"),
        pytest.param(11 * MB - 512, 11 * MB - 512, id="rest-above-is-split-off"),
    ],
)
def test_a_large_block_keeps_a_rest_of_up_to_1_mib(allocator, size, block):
    """So allocated may be up to 1 MiB above requested."""
    allocator.free(allocator.allocate(12 * MB))
    assert allocator.allocate(size).size == block
    assert allocator.reserved.current == 12 * MB


def test_a_small_block_is_split_down_to_512_bytes(allocator):
    """A segment of 2 MiB holds 4,096 of them."""
    for _ in range(4096):
        allocator.allocate(1)
    assert allocator.reserved.current == 2 * MB
    allocator.allocate(1)
    assert allocator.reserved.current == 4 * MB


def test_the_smallest_free_block_that_fits_is_taken(allocator):
    """Not the first, and not the last that was freed."""
    wide, narrow, _ = (allocator.allocate(size * MB) for size in (16, 12, 14))
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(11 * MB) is narrow


def test_of_equal_free_blocks_the_one_at_the_lowest_address_is_taken(allocator):
    """Whatever was freed last."""
    first, _, third, _ = (allocator.allocate(512) for _ in range(4))
    allocator.free(third)
    allocator.free(first)
    assert allocator.allocate(512).address == first.address


def test_free_neighbours_of_one_segment_are_joined(allocator):
    """Both ways, so that a larger block fits where smaller ones were."""
    blocks = [allocator.allocate(4 * MB) for _ in range(5)]
    for at in (1, 3, 2):
        allocator.free(blocks[at])
    assert allocator.allocate(12 * MB).address == blocks[1].address
    assert allocator.reserved.current == 20 * MB


def test_blocks_of_two_segments_are_never_joined(allocator):
    """Even if the driver put them side by side."""
    for block in [allocator.allocate(10 * MB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(20 * MB)
    assert allocator.reserved.current == 40 * MB


def test_streams_share_no_blocks(allocator):
    """What one stream has freed, another may still be reading."""
    allocator.free(allocator.allocate(512, stream=0))
    allocator.allocate(512, stream=1)
    assert allocator.reserved.current == 4 * MB


def test_freed_memory_stays_reserved_until_the_cache_is_emptied(allocator):
    """And then goes back whole."""
    allocator.free(allocator.allocate(30 * MB))
    assert (allocator.allocated.current, allocator.reserved.current) == (0, 30 * MB)
    allocator.empty_cache()
    assert allocator.reserved.current == 0


def test_a_segment_in_use_anywhere_is_not_given_back(allocator):
    """512 bytes hold 2 MiB."""
    freed, _ = allocator.allocate(MB), allocator.allocate(1)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved.current == 2 * MB


@BOTH
@pytest.mark.parametrize("size", [pytest.param(40 * MB, id="equal")])
def test_a_card_can_be_filled_to_the_last_byte(kind, size):
    """Its capacity is what can be reserved."""
    allocator = kind(40 * MB)
    allocator.allocate(size)
    with pytest.raises(CapacityError):
        allocator.allocate(1)


@BOTH
def test_a_full_card_refuses_and_stays_as_it_was(kind):
    """The error says what was asked for; nothing was allocated."""
    allocator = kind(40 * MB)
    kept = allocator.allocate(20 * MB)
    with pytest.raises(CapacityError) as caught:
        allocator.allocate(30 * MB)
    assert caught.value.args == (30 * MB,)
    assert allocator.allocated.current == 20 * MB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved.current == 0


@BOTH
def test_a_full_card_gives_its_cache_back_before_it_refuses(kind):
    """Two free segments of 20 MiB make room for one of 40."""
    allocator = kind(40 * MB)
    for block in [allocator.allocate(20 * MB, stream) for stream in (0, 1)]:
        allocator.free(block)
    allocator.allocate(40 * MB)
    assert allocator.reserved.current == 40 * MB


def test_peaks_are_kept_until_reset(allocator):
    """And then start from the present level."""
    allocator.free(allocator.allocate(10 * MB))
    assert (allocator.allocated.peak, allocator.requested.peak) == (10 * MB, 10 * MB)
    allocator.empty_cache()
    assert allocator.reserved.peak == 10 * MB
    allocator.reset_peak()
    assert (allocator.allocated.peak, allocator.reserved.peak) == (0, 0)


@pytest.mark.parametrize(("size", "page"), [(512, 2 * MB), (2 * MB, 20 * MB)])
def test_an_expandable_segment_grows_by_pages(size, page):
    """Pages are as large as the segments would be; a block may lie across them."""
    allocator = ExpandableAllocator()
    allocator.allocate(size)
    assert allocator.reserved.current == page
    allocator.allocate(page)
    # A small page is a large block, in the other pool.
    assert allocator.reserved.current == (22 * MB if size == 512 else 40 * MB)


def test_an_expandable_segment_is_reused_where_segments_would_be_added():
    """Blocks that grow a little each time are what expandable segments are for."""
    reserved = []
    for allocator in (CachingAllocator(), ExpandableAllocator()):
        for size in range(20 * MB, 40 * MB, 4 * MB):
            allocator.free(allocator.allocate(size))
        reserved.append(allocator.reserved.current)
    assert reserved == [(20 + 24 + 28 + 32 + 36) * MB, 40 * MB]


def test_an_expandable_block_is_split_down_to_512_bytes():
    """No rest of up to 1 MiB is kept, as it is in segments of their own."""
    allocator = ExpandableAllocator()
    allocator.free(allocator.allocate(20 * MB))
    assert allocator.allocate(20 * MB - 512).size == 20 * MB - 512


def test_an_expandable_segment_gives_back_whole_pages():
    """Around a block in use, the pages that it touches stay."""
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


def test_the_page_that_a_free_block_begins_within_stays():
    """Its part before the pages given back is the next block, without a page more."""
    allocator = ExpandableAllocator()
    kept, freed = allocator.allocate(30 * MB), allocator.allocate(50 * MB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved.current == 40 * MB
    assert allocator.allocate(10 * MB).address == kept.end
    assert allocator.reserved.current == 40 * MB


def test_pages_given_back_are_taken_again():
    """At their old addresses, before the segment grows at its end."""
    allocator = ExpandableAllocator()
    freed, _ = allocator.allocate(40 * MB), allocator.allocate(20 * MB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.allocate(40 * MB).address == freed.address
    assert allocator.reserved.current == 60 * MB


def test_an_expandable_segment_fills_its_middle_before_its_end():
    """Of two blocks that fit, the one that has no room to grow."""
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


@BOTH
@settings(deadline=None)
@given(steps=steps, capacity=st.sampled_from((None, 64 * MB, 200 * MB)))
def test_whatever_happens_the_books_balance(kind, steps, capacity):
    """No two live blocks overlap; reserved is at least allocated, that at least requested; and all
    is zero once all is freed.
    """
    allocator = kind(capacity)
    live = []
    for what, *told in steps:
        if what == "allocate":
            try:
                live.append(allocator.allocate(*told))
            except CapacityError:
                assert capacity is not None
        elif what == "free" and live:
            allocator.free(live.pop(told[0] % len(live)))
        elif what == "empty":
            allocator.empty_cache()
        spans = sorted((block.address, block.end) for block in live)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
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
