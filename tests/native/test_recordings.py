"""A region that records it knows when each block was allocated and freed."""

import sys
from collections.abc import Callable, Iterable

import pytest
import torch

from pytest_cka_memory.core.memory_timeline import RecordedBlock, Recording
from pytest_cka_memory.meters.blocks.counter import Counter
from pytest_cka_memory.meters.blocks.written import notes_modules


def levels(blocks: Iterable[RecordedBlock], start: int, events: int) -> list[int]:
    """Return the level after each event, from the start on."""
    changes = [0] * (events + 1)
    for block in blocks:
        if block.begin:
            changes[block.begin] += block.bytes
        if block.end:
            changes[block.end] -= block.bytes
    found = [start]
    for change in changes[1:]:
        found.append(found[-1] + change)
    return found


def highest(recording: Recording) -> tuple[int, int]:
    """Return the highest level that the recorded blocks give, and the event at which it was."""
    found = levels(recording.blocks, recording.start_bytes, recording.events)
    return max(found), found.index(max(found))


def training_step(net: torch.nn.Module, kept: list[torch.Tensor]) -> None:
    out = net(torch.ones(16, 64))
    out.sum().backward()
    kept.append(out.detach())


def test_recorded_blocks_add_up_to_the_peak(counter: Counter) -> None:
    """The blocks live at the peak add up to the region's peak to the byte, at the same event."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    old, kept = torch.ones(1000), list[torch.Tensor]()
    region = counter.open()
    assert region.record()
    del old
    for _ in range(3):
        training_step(net, kept)
    recording = region.recorded()
    assert recording is not None
    assert highest(recording) == (region.read().peak, recording.peak_event)
    assert recording.peak_bytes == region.read().peak > recording.start_bytes
    region.close()


def test_each_release_belongs_to_its_allocation(counter: Counter) -> None:
    """A block has the events of its allocation and release; one that is live has no release."""
    region = counter.open()
    region.record()
    first, second = torch.UntypedStorage(100), torch.UntypedStorage(200)
    del first
    third = torch.UntypedStorage(300)
    recording = region.recorded()
    assert recording is not None
    found = [(block.bytes, block.begin, block.end) for block in recording.blocks]
    assert found == [(100, 1, 3), (200, 2, 0), (300, 4, 0)]
    region.close()
    assert second.nbytes() + third.nbytes() == 500


def test_release_of_an_older_block_is_recorded(counter: Counter) -> None:
    """A block from before the region has no allocation in it, only its release."""
    old = torch.UntypedStorage(100)
    region = counter.open()
    region.record()
    new = torch.UntypedStorage(50)
    del old
    recording = region.recorded()
    assert recording is not None
    assert [(block.bytes, block.begin, block.end) for block in recording.blocks] == [
        (50, 1, 0),
        (100, 0, 2),
    ]
    assert recording.peak_event == 1
    region.close()
    assert new.nbytes() == 50


def test_recorded_block_has_its_line(counter: Counter) -> None:
    """The stack of a recorded block leads to the line that allocated it."""
    region = counter.open()
    region.record()
    torch.UntypedStorage(100)
    recording = region.recorded()
    assert recording is not None
    (block,) = recording.blocks
    site = recording.site_of(block.stack)
    assert site is not None
    assert "in test_recorded_block_has_its_line" in site.readable().frames[0]
    region.close()


def test_nested_regions_record_for_themselves(counter: Counter) -> None:
    """A region records from its own start on, while a region around it goes on recording."""
    outer = counter.open()
    outer.record()
    torch.UntypedStorage(100)
    inner = counter.open()
    inner.record()
    torch.UntypedStorage(200)
    recorded = [region.recorded() for region in (inner, outer)]
    sizes = [[block.bytes for block in found.blocks] for found in recorded if found]
    assert sizes == [[200], [100, 200]]
    inner.close()
    outer.close()


def test_nothing_is_recorded_unless_it_is_asked_for(counter: Counter) -> None:
    """A region that was not asked to record has no recording."""
    region = counter.open()
    torch.UntypedStorage(100)
    assert region.recorded() is None
    region.close()


def test_small_blocks_are_merged_if_there_are_too_many(counter: Counter) -> None:
    """Beyond the limit short-lived small blocks are merged; none is lost, and the peak is exact."""
    region = counter.open()
    region.record(most_blocks=2048)
    kept = [torch.UntypedStorage(10_000 * n) for n in range(1, 10)]
    for n in range(20_000):
        torch.UntypedStorage(n % 1000 + 1)
    large = torch.UntypedStorage(500_000)
    kept.append(torch.UntypedStorage(5))
    del large
    for n in range(20_000):
        torch.UntypedStorage(n % 1000 + 1)
    recording = region.recorded()
    assert recording is not None
    blocks = list(recording.blocks)
    assert len(blocks) <= 2048
    assert recording.lost == 0
    assert recording.events == 2 * 40_000 + len(kept) + 2
    assert sum(block.allocations for block in blocks) == 40_000 + len(kept) + 1
    assert recording.merged == sum(block.allocations for block in blocks if block.allocations > 1)
    at_peak = [b for b in blocks if b.begin <= recording.peak_event < (b.end or 2**32)]
    assert sum(b.bytes for b in at_peak) == recording.peak_bytes - recording.start_bytes
    assert all(block.allocations == 1 for block in at_peak)
    region.close()


def test_allocations_that_do_not_fit_are_counted(counter: Counter) -> None:
    """If live blocks alone are more than the limit, the rest is counted as lost."""
    region = counter.open()
    region.record(most_blocks=100)
    kept = [torch.UntypedStorage(1) for _ in range(150)]
    recording = region.recorded()
    assert recording is not None
    assert (len(list(recording.blocks)), recording.lost) == (100, 50)
    region.close()
    assert len(kept) == 150


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.relu(x)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def paths_of(recording: Recording) -> list[str]:
    """Return the paths of the modules that allocated, in the order of their first allocation."""
    sites = [recording.site_of(block.stack) for block in recording.blocks]
    modules = dict.fromkeys(site.readable().module for site in sites if site is not None)
    return [recording.module_path(module) for module in modules if module]


def recorded_while(counter: Counter, run: Callable[[], object]) -> list[str]:
    region = counter.open()
    region.record()
    run()
    recording = region.recorded()
    assert recording is not None
    found = paths_of(recording)
    region.close()
    return found


def test_paths_of_modules_are_known_after_the_network_was_freed(counter: Counter) -> None:
    """Paths are noted while modules run, from the outermost running one on."""
    if not notes_modules():
        pytest.skip("the modules of stacks are not noted in this interpreter")
    x = torch.ones(4, 8)
    assert recorded_while(counter, lambda: Net()(x)) == [
        *("blocks.0.linear", "blocks.0", "blocks.1.linear", "blocks.1", "head.0"),
    ]
    assert recorded_while(counter, lambda: torch.nn.Sequential(torch.nn.Linear(8, 8))(x)) == [
        "Sequential.0"
    ]
    assert recorded_while(counter, lambda: torch.nn.Linear(8, 8)(x)) == ["Linear"]


def test_path_begins_again_where_a_module_is_not_a_part_of_its_caller(counter: Counter) -> None:
    """A module that another calls without having it begins a path of its own."""
    if not notes_modules():
        pytest.skip("the modules of stacks are not noted in this interpreter")

    class Caller(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Net()(x)

    found = recorded_while(counter, lambda: Caller()(torch.ones(4, 8)))
    assert found[:2] == ["Caller", "blocks.0.linear"]  # which creates it, and then calls it


class Calling(torch.nn.Module):
    """Calls a network that is not a part of it."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.networks = [network]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.networks[0](x)


def test_path_that_begins_again_has_nothing_of_the_caller(counter: Counter) -> None:
    """Neither the caller's path nor its class is in that of a network which it does not have."""
    if not notes_modules():
        pytest.skip("the modules of stacks are not noted in this interpreter")
    x = torch.ones(4, 8)
    nested = torch.nn.Sequential(Calling(Net()))
    assert recorded_while(counter, lambda: nested(x))[0] == "blocks.0.linear"
    other = Calling(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    assert recorded_while(counter, lambda: other(x)) == ["Sequential.0"]


class Repeating(torch.nn.Module):
    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        return self(x, times - 1) if times else x * 2


def test_module_that_calls_itself_keeps_its_path(counter: Counter) -> None:
    """A module that runs several times at once has one path, from the network around it."""
    if not notes_modules():
        pytest.skip("the modules of stacks are not noted in this interpreter")
    net = torch.nn.Sequential(Repeating())
    assert recorded_while(counter, lambda: net(torch.ones(4, 8))) == ["Sequential.0"]


def test_unusual_children_do_not_stop_a_path(counter: Counter) -> None:
    """A child that is None, a module inside itself and a name of any length are no problem."""
    if not notes_modules():
        pytest.skip("the modules of stacks are not noted in this interpreter")
    net = Net()
    net.register_module("nothing", None)
    net._modules["itself"] = net
    net._modules["long" * 500] = torch.nn.Linear(8, 8)
    x = torch.ones(4, 8)
    assert recorded_while(counter, lambda: net(x))[0] == "blocks.0.linear"
    del net._modules["itself"]


def test_memory_of_the_host_is_recorded_beside_another_device() -> None:
    """A region of another device records the blocks of the CPU too, marked as the host's."""
    if "emulated_cuda.loading" in sys.modules:
        pytest.skip("an emulated device computes values on the host, which is not recorded then")
    host, device = Counter(), Counter(20 << 8 | 3)
    level = host.figures().level
    region = device.open()
    region.record()
    kept = torch.UntypedStorage(100)
    recording = region.recorded()
    assert recording is not None
    assert [(block.bytes, block.on_host) for block in recording.blocks] == [(100, True)]
    assert (recording.host_start_bytes, recording.peak_event) == (level, 0)
    region.close()
    assert kept.nbytes() == 100
