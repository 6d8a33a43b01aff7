"""What a recording keeps of the blocks that it merges, and which it never merges."""

from collections.abc import Iterator

import pytest
import torch

from pytest_cka_memory.core.memory_timeline import RecordedBlock
from pytest_cka_memory.meters.blocks.counter import Counter, RegionCounter

MOST = 2048
MANY = 20_000
"""So many temporary blocks that those of one line are merged: some 80 in each of 256 windows."""
LARGE = 500_000


@pytest.fixture
def region(counter: Counter) -> Iterator[RegionCounter]:
    """A region that records, with room for few blocks."""
    region = counter.open()
    region.record(most_blocks=MOST)
    yield region
    region.close()


def blocks_of(region: RegionCounter) -> list[RecordedBlock]:
    recording = region.recorded()
    assert recording is not None
    return list(recording.blocks)


def test_merged_blocks_last_from_the_first_to_the_last_with_their_average(
    region: RegionCounter,
) -> None:
    """A merged block spans all that it stands for, and has the bytes that they had on average."""
    for _ in range(MANY):
        torch.UntypedStorage(1000)
    merged = [block for block in blocks_of(region) if block.allocations > 20]
    assert merged
    for block in merged:  # each was live at every second event
        assert block.end - block.begin == 2 * block.allocations - 1
        assert 480 < block.bytes < 530


def test_larger_blocks_are_not_merged_while_merging_small_ones_is_enough(
    region: RegionCounter,
) -> None:
    """Large temporary blocks stay as they are as long as merging the small ones makes room."""
    for number in range(MANY):
        torch.UntypedStorage(10)
        if number % 40 == 0:
            torch.UntypedStorage(LARGE)
    large = [block for block in blocks_of(region) if block.bytes == LARGE]
    assert [block.allocations for block in large] == [1] * (MANY // 40)


def test_peak_among_merged_blocks_of_one_line_is_exact(region: RegionCounter) -> None:
    """Neither a small block that is live at the peak nor those around it change its bytes."""
    for number in range(MANY):
        small = torch.UntypedStorage(number % 1000 + 1)
        if number == MANY // 2:
            torch.UntypedStorage(LARGE)
        del small
    recording = region.recorded()
    assert recording is not None
    live = [b for b in recording.blocks if b.begin <= recording.peak_event < (b.end or 2**32)]
    assert [block.bytes for block in live] == [MANY // 2 % 1000 + 1, LARGE]


def test_older_blocks_that_are_freed_soon_keep_their_bytes(counter: Counter) -> None:
    """Blocks from before the recording are not merged, as the level at its start needs each."""
    old = [torch.UntypedStorage(100) for _ in range(50)]
    region = counter.open()
    region.record(most_blocks=MOST)
    old.clear()
    torch.UntypedStorage(LARGE)  # otherwise the peak is the start, when they all are live
    for _ in range(MANY):
        torch.UntypedStorage(10)
    older = [block for block in blocks_of(region) if not block.begin]
    region.close()
    assert [(block.bytes, block.end) for block in older] == [(100, end) for end in range(1, 51)]


def test_release_of_a_block_that_was_lost_is_not_that_of_another(region: RegionCounter) -> None:
    """If a block that found no room is freed, a later one that is live stays live."""
    torch.UntypedStorage(LARGE)
    for _ in range(MANY):
        torch.UntypedStorage(10)
    kept = [torch.UntypedStorage(1) for _ in range(MOST)]
    while len(kept) > MOST // 2:
        kept.pop(-2)  # newest first, so that there is room when the last ones are merged
    later = torch.UntypedStorage(7)
    kept.pop()
    recording = region.recorded()
    assert recording is not None
    assert recording.lost > 0
    assert [block.end for block in recording.blocks if block.bytes == 7] == [0]
    assert later.nbytes() == 7
