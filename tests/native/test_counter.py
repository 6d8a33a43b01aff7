"""Level, peak, serial numbers and live blocks, as the C library keeps them."""

import re
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch

from pytest_cka_memory.meters.blocks import NOT_LIVE
from pytest_cka_memory.meters.blocks.counter import Counter

LARGE = 2**26
"""Bytes of a block that malloc maps for itself, so that its address is soon returned again."""
FIRST_ADDRESS = 64
"""Nothing can be allocated so low in memory, so that a test may use these addresses."""


EXHAUSTED = """
import resource
from pytest_cka_memory.meters.blocks.counter import Counter
counter = Counter()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
for number in range(1, 200_000):
    counter.add(16 * number, 1, is_new=True)
try:
    counter.figures()
except MemoryError as error:
    print(error)
"""
"""A table of so many blocks needs 16 MB, of which 1 MB may be allocated.

It runs in a new interpreter, because a forked one has so much to reuse.
"""


class Model:
    """The same counting in Python, as simple as possible."""

    def __init__(self, level: int, serial: int) -> None:
        self.level, self.serial = level, serial
        self.live: dict[int, tuple[int, int]] = {}
        """Address -> bytes and serial number."""
        self.regions: list[ModelRegion] = []

    def add(self, address: int, size: int) -> None:
        self.serial += 1
        self.live[address] = size, self.serial
        self.level += size
        for region in self.regions:
            region.rise(self)

    def remove(self, address: int) -> None:
        self.level -= self.live.pop(address)[0]

    def since(self, serial: int) -> list[tuple[int, int, int]]:
        """Return address, bytes and serial number of younger blocks, newest first."""
        found = [(at, size, number) for at, (size, number) in self.live.items() if number > serial]
        return sorted(found, key=lambda block: -block[2])


class ModelRegion:
    def __init__(self, model: Model) -> None:
        self.serial = model.serial
        self.peak = self.sample_peak = model.level
        self.new_at_peak = 0

    def rise(self, model: Model) -> None:
        self.sample_peak = max(self.sample_peak, model.level)
        if model.level > self.peak:
            self.peak = model.level
            self.new_at_peak = sum(block[1] for block in model.since(self.serial))


@pytest.fixture
def addresses(counter: Counter) -> Iterator[list[int]]:
    """Addresses for blocks that the test adds; none of them stays in the table."""
    unused = [FIRST_ADDRESS + 16 * number for number in range(20_000)]
    yield list(unused)
    for address in unused:
        counter.remove(address)


def test_an_allocation_raises_level_peak_and_serial(counter: Counter) -> None:
    """An allocation raises level, peak and serial number; freeing it lowers the level only."""
    counter.reset_peak()
    before = counter.figures()
    kept = torch.UntypedStorage(1000)
    during = counter.figures()
    del kept
    after = counter.figures()
    assert (during.level - before.level, during.peak - before.level) == (1000, 1000)
    assert (after.level - before.level, after.peak - before.level) == (0, 1000)
    assert [during.serial - before.serial, after.serial - before.serial] == [1, 1]


def test_reading_the_figures_keeps_the_peak(counter: Counter) -> None:
    """A peak stays the same however often it is read, until a new one is started."""
    counter.reset_peak()
    torch.UntypedStorage(1000)
    figures = [counter.figures() for _ in range(3)]
    assert [one.peak - one.level for one in figures] == [1000] * 3


def test_an_allocation_that_fails_is_not_counted(counter: Counter) -> None:
    """An allocation for which there is no memory changes no figure."""
    before = counter.figures()
    with pytest.raises(RuntimeError, match="allocate"):
        torch.UntypedStorage(2**60)
    assert counter.figures() == before


@pytest.mark.slow
def test_allocations_for_which_the_table_has_no_room_are_an_error(
    run_code: Callable[..., str],
) -> None:
    """If the counter itself finds no memory, it says how many allocations it has not recorded."""
    assert re.match(r"\d+ allocations could not be recorded", run_code(EXHAUSTED))


def test_a_tensor_without_bytes_is_not_a_block(counter: Counter) -> None:
    """A tensor without bytes asks nothing of the allocator and is not a block."""
    serial = counter.figures().serial
    kept = torch.empty(0)
    assert counter.figures().serial == serial
    del kept


def test_live_blocks_are_listed_newest_first(counter: Counter) -> None:
    """Live blocks are listed newest first, also if some between them have been freed."""
    since = counter.figures().serial
    kept = [torch.UntypedStorage(size) for size in (1, 2, 3, 4, 5)]
    del kept[2]
    allocations = counter.allocations_since(since)
    assert [one.bytes for one in allocations] == [5, 4, 2, 1]
    assert [one.key for one in allocations] == [storage.data_ptr() for storage in kept[::-1]]
    assert [one.serial - since for one in allocations] == [5, 4, 2, 1]
    assert counter.retained_since(since) == 12
    assert counter.retained_since(since + 2) == 9
    assert all(one.is_live() for one in allocations)
    del kept[0]
    assert [one.is_live() for one in allocations] == [True, True, True, False]


def test_a_block_at_a_reused_address_is_another_one(counter: Counter) -> None:
    """A new block at the address of a freed one has another serial number."""
    addresses = set()
    for _ in range(200):
        since = counter.figures().serial
        storage = torch.UntypedStorage(LARGE)
        (block,) = counter.allocations_since(since)
        assert counter.retained_since(since) == LARGE
        assert counter.retained_since(block.serial) == 0
        addresses.add(storage.data_ptr())
        del storage
        assert not block.is_live()
    assert len(addresses) < 200


def test_a_freed_address_has_no_serial_number(counter: Counter) -> None:
    """A freed address has no serial number: `NOT_LIVE` is not the number of any allocation."""
    storage = torch.UntypedStorage(40)
    address = storage.data_ptr()
    assert counter.serial_of(address) == counter.figures().serial
    del storage
    assert counter.serial_of(address) == NOT_LIVE


def test_a_block_that_was_freed_unseen_is_replaced(counter: Counter) -> None:
    """An allocation at an address where a block seems to be live proves that it was freed."""
    level = counter.figures().level
    storage = torch.UntypedStorage(LARGE)
    address = storage.data_ptr()
    del storage
    counter.add(address, 10 * LARGE, is_new=True)
    kept = [torch.UntypedStorage(LARGE)]
    while kept[-1].data_ptr() != address:
        assert len(kept) < 1000
        kept.append(torch.UntypedStorage(LARGE))
    assert counter.figures().level - level == len(kept) * LARGE
    del kept
    assert counter.figures().level == level


def test_known_blocks_are_not_added_again(counter: Counter) -> None:
    """A block that the search for storages finds again is known already and is not added."""
    storage = torch.UntypedStorage(40)
    before = counter.figures()
    counter.add(storage.data_ptr(), 40, is_new=True)
    counter.add(storage.data_ptr(), 40, is_new=False)
    assert counter.figures() == before


def test_an_older_block_is_not_younger_than_anything(
    counter: Counter, addresses: list[int]
) -> None:
    """What was live before counting began is part of the level, and is not listed as new."""
    before = counter.figures()
    counter.add(addresses[0], 50, is_new=False)
    assert counter.figures().level - before.level == 50
    assert counter.serial_of(addresses[0]) == 0
    assert addresses[0] not in [one.key for one in counter.allocations_since(0)]
    assert counter.retained_since(before.serial) == 0
    counter.remove(addresses[0])
    assert counter.figures().level == before.level


def test_many_blocks_are_all_known(counter: Counter, addresses: list[int]) -> None:
    """After many allocations, when the table has grown several times, every block is known."""
    before = counter.figures()
    for size, address in enumerate(addresses, 1):
        counter.add(address, size, is_new=True)
    total = len(addresses) * (len(addresses) + 1) // 2
    assert counter.figures().level - before.level == total
    assert counter.retained_since(before.serial) == total
    found = counter.allocations_since(before.serial)
    assert [one.key for one in found] == addresses[::-1]
    for address in addresses[::2]:
        counter.remove(address)
    found = counter.allocations_since(before.serial)
    assert [one.key for one in found] == addresses[1::2][::-1]


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_agree_with_a_model(
    counter: Counter, addresses: list[int], seed: int
) -> None:
    """The counter agrees with a model, whatever the order of allocations, frees and regions."""
    random = Random(seed)
    start = counter.figures()
    model = Model(start.level, start.serial)
    regions: list[tuple[object, ModelRegion]] = []
    for _ in range(3000):
        action = random.choices(["add", "remove", "open", "close", "sample"], [50, 45, 2, 2, 5])[0]
        if action == "add":
            address, size = random.choice(addresses[:300]), random.randrange(1, 5000)
            if address not in model.live:
                counter.add(address, size, is_new=True)
                model.add(address, size)
        elif action == "remove" and model.live:
            address = random.choice(list(model.live))
            counter.remove(address)
            model.remove(address)
        elif action == "open":
            mirrored = ModelRegion(model)
            model.regions.append(mirrored)
            regions.append((counter.open(), mirrored))
        elif regions:
            region, mirrored = random.choice(regions)
            levels = region.read(sample=action == "sample")
            assert (levels.level, levels.serial) == (model.level, model.serial)
            assert (levels.peak, levels.sample_peak) == (mirrored.peak, mirrored.sample_peak)
            groups = region.at_peak()
            assert sum(group.bytes for group in groups) == mirrored.peak
            new = sum(group.bytes for group in groups if not group.before_region)
            assert new == mirrored.new_at_peak
            found = counter.allocations_since(mirrored.serial)
            assert [(one.key, one.bytes, one.serial) for one in found] == model.since(
                mirrored.serial
            )
            mirrored.sample_peak = model.level if action == "sample" else mirrored.sample_peak
            if action == "close":
                region.close()
                regions.remove((region, mirrored))
                model.regions.remove(mirrored)
    for region, _ in regions:
        region.close()
