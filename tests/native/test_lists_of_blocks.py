"""At a region's end nothing is done in Python for each live block: it counts, and never times."""

from collections import Counter as Counts

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.allocations import FramesSite
from pytest_cka_memory.meters.blocks import counter as counter_module
from pytest_cka_memory.meters.blocks import written
from pytest_cka_memory.meters.blocks.counter import BlockAllocations, Counter
from pytest_cka_memory.meters.blocks.written import PeakGroups

LIVE = 500


class Explains:
    """Asks for an explanation of the given figures."""

    draws_paths = False

    def __init__(self, *figures):
        self.figures = figures

    def figures_to_explain(self, record):
        return self.figures

    def named_values(self):
        return {}


@pytest.fixture
def calls(monkeypatch):
    """Return how often each function that describes a block or a stack was called."""
    counts = Counts()

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, counted)

    for kind in (BlockAllocations, PeakGroups):
        count(kind, "described")
    count(BlockAllocations, "__iter__")
    for module in (counter_module, written):
        count(module, "site_of")
    return counts


@pytest.mark.parametrize("figures", [(), ("growth_bytes_per_batch",)], ids=["none", "growth"])
def test_no_block_is_described_at_the_end_of_a_region_that_needs_no_explanation(
    meter, calls, figures
):
    """Blocks are read only if a figure that they explain is asked for, and each stack once."""
    probe = MemoryProbe(meter=meter, explainer=Explains(*figures))
    with probe.measure() as region:
        kept = [torch.empty(10) for _ in range(LIVE)]
    assert region.retained_bytes == 40 * len(kept)
    assert calls["described"] == 0
    assert (calls["__iter__"] > 0) is bool(figures)
    assert calls["site_of"] <= 4


def test_lists_of_blocks_are_the_same_in_columns_and_one_by_one(counter: Counter) -> None:
    """Addresses, sizes and stacks of all blocks are those of the blocks that are read."""
    since = counter.figures().serial
    region = counter.open()
    kept = [torch.empty(size) for size in range(1, 20)]
    other = torch.zeros(7)
    found = counter.allocations_since(since).blocks
    assert found.addresses == [block.address for block in found]
    assert found.sizes == [block.bytes for block in found]
    assert found.stacks == [block.stack for block in found]
    assert found.serials == [block.serial for block in found]
    described = counter.allocations_since(since)
    assert list(described) == [described[number] for number in range(len(described))]
    assert described.total_bytes() == sum(allocation.bytes for allocation in described)
    assert list(described.live()) == list(described)
    assert len(found) == len(kept) + 1
    assert found[0].address == found[-len(found)].address == other.data_ptr()
    assert [block.bytes for block in found[:3]] == [28, 76, 72]
    with pytest.raises(IndexError):
        found[len(found)]
    assert list(counter.allocations_since(counter.figures().serial)) == []
    del other
    assert list(described.live()) == list(described)[1:]
    assert [each.is_live() for each in described] == [False, *[True] * len(kept)]
    region.close()


def test_what_was_live_at_the_peak_can_be_read_after_the_region(counter: Counter) -> None:
    """Sums, places and the group of what is older are the same when they are read later."""
    level = counter.figures().level
    older = torch.empty(1000)
    region = counter.open()
    kept = [torch.empty(10) for _ in range(3)]
    groups = region.at_peak()
    region.close()
    assert len(kept) == len(groups) - 1
    assert groups[-1].before_region
    assert sum(group.bytes for group in groups) == level + older.nbytes + 120
    assert {group.recorded.readable().code for group in groups[:3]} != {None}


def test_a_stack_is_made_readable_once_for_all_its_allocations(counter: Counter, monkeypatch):
    """The line and code of 100,000 allocations of one loop are looked up once."""
    read = []
    readable = FramesSite.readable

    def counted(site):
        read.append(site)
        return readable(site)

    monkeypatch.setattr(FramesSite, "readable", counted)
    region = counter.open()
    kept = [torch.empty(10) for _ in range(LIVE)]
    allocations = counter.allocations_since(region.serial)
    sites = {allocation.site for allocation in allocations}
    region.close()
    assert len(allocations) == len(kept)
    assert len(read) == len(sites) == 1
