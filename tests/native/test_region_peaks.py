"""Each region has its own peak, and knows what was live at it."""

from types import CodeType

import torch

from pytest_cka_memory.meters.blocks.counter import Counter

# In Python 3.10, which does not record the columns of instructions, code is a whole line.
HAS_COLUMNS = hasattr(CodeType, "co_positions")


def temporary(size: int) -> None:
    torch.UntypedStorage(size)


def test_nested_regions_have_their_own_peaks(counter: Counter) -> None:
    """Of two nested regions, the outer one's peak is the highest level of both."""
    level = counter.figures().level
    outer = counter.open()
    temporary(100)
    inner = counter.open()
    temporary(10)
    assert [region.read().peak - level for region in (outer, inner)] == [100, 10]
    temporary(1000)
    assert [region.read().peak - level for region in (outer, inner)] == [1000, 1000]
    inner.close()
    temporary(2000)
    assert outer.read().peak - level == 2000
    outer.close()


def test_the_region_that_opened_first_may_close_first(counter: Counter) -> None:
    """Of two overlapping regions, as two threads have them, the first may close first."""
    level = counter.figures().level
    first = counter.open()
    temporary(100)
    second = counter.open()
    temporary(10)
    first.close()
    temporary(50)
    assert second.read().peak - level == 50
    second.close()


def test_a_closed_region_may_be_closed_again(counter: Counter, open_regions) -> None:
    """A closed region may be closed again, because its owner may do so after an exception."""
    region = counter.open()
    region.close()
    region.close()
    assert open_regions() == 0


def test_a_sample_has_the_peak_since_the_last_one(counter: Counter) -> None:
    """A sample has the peak since the last sample, and the region's own peak goes on."""
    level = counter.figures().level
    region = counter.open()
    found = []
    for size in (100, 10, 50):
        temporary(size)
        found.append(region.read(sample=True).sample_peak - level)
    assert found == [100, 10, 50]
    assert region.read().peak - level == 100
    region.close()


def test_the_start_of_a_region_is_its_first_peak(counter: Counter) -> None:
    """A region's peak is at least its start: freeing older memory in it does not lower the peak."""
    old = torch.UntypedStorage(100)
    level = counter.figures().level
    region = counter.open()
    del old
    temporary(50)
    assert region.read().peak == level
    assert region.at_peak()[0].before_region
    region.close()


def test_what_was_live_at_the_peak_is_known_by_stack(counter: Counter) -> None:
    """Blocks live at the peak are known by stack, also if freed since; later ones are left out."""
    old = torch.UntypedStorage(10)
    level = counter.figures().level
    region = counter.open()
    temporary(30)
    kept = torch.UntypedStorage(100)
    freed = [torch.UntypedStorage(40) for _ in range(3)]
    del freed
    later = torch.UntypedStorage(5)
    groups = region.at_peak()
    region.close()
    assert [(group.bytes, group.count) for group in groups if not group.before_region] == [
        (100, 1),
        (120, 3),
    ]
    (older,) = [group for group in groups if group.before_region]
    assert older.bytes == level
    codes = [str(group.recorded.readable().code) for group in groups[:2]]
    if HAS_COLUMNS:
        assert codes == ["torch.UntypedStorage(100)", "torch.UntypedStorage(40)"]
    else:
        assert codes[0] == "kept = torch.UntypedStorage(100)"
        assert codes[1] == "freed = [torch.UntypedStorage(40) for _ in range(3)]"
    del old, kept, later


def test_a_new_peak_forgets_what_was_live_at_the_one_before(counter: Counter) -> None:
    """When a new peak comes, blocks that were freed since the last peak are left out of it."""
    region = counter.open()
    temporary(100)
    first = torch.UntypedStorage(60)
    second = torch.UntypedStorage(60)
    found = sorted(group.bytes for group in region.at_peak() if not group.before_region)
    assert found == [60, 60]
    del first, second
    region.close()


def test_an_inner_region_leaves_out_what_the_outer_one_has_allocated(counter: Counter) -> None:
    """Of nested regions, each lists the blocks since its own beginning, and sums up the rest."""
    level = counter.figures().level
    outer = counter.open()
    kept = torch.UntypedStorage(100)
    inner = counter.open()
    temporary(10)
    found = [
        sum(group.bytes for group in region.at_peak() if not group.before_region)
        for region in (outer, inner)
    ]
    assert found == [110, 10]
    sums = [sum(group.bytes for group in region.at_peak()) for region in (outer, inner)]
    assert sums == [level + 110, level + 110]
    inner.close()
    outer.close()
    del kept


def test_of_equal_peaks_the_first_counts(counter: Counter) -> None:
    """If a level is reached again, what is reported was live when it was reached first."""
    region = counter.open()
    first = [torch.UntypedStorage(50) for _ in range(2)]
    first.clear()
    again = torch.UntypedStorage(100)
    found = [(group.bytes, group.count) for group in region.at_peak() if not group.before_region]
    region.close()
    assert found == [(100, 2)]
    assert again.nbytes() == 100


def test_blocks_of_one_line_are_apart_if_they_were_freed_in_different_ways(
    counter: Counter,
) -> None:
    """Of blocks that one line has allocated, only those are workspaces that a library had kept."""
    region = counter.open()
    made = [torch.UntypedStorage(40) for _ in range(3)]
    made.pop()
    with counter.dropping_workspaces():
        made.clear()
    groups = [group for group in region.at_peak() if not group.before_region]
    region.close()
    found = {(group.inside, group.bytes, group.count) for group in groups}
    assert found == {(None, 40, 1), ("workspace of a library", 80, 2)}
