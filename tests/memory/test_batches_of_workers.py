"""Batches of worker processes count when the loader yields them; the ledger may be later."""

import gc
import time
import typing
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter, torch_private

BATCH_BYTES = 4 * 1000 * 4
DATA = TensorDataset(torch.ones(40, 1000))


@pytest.fixture(autouse=True, scope="module")
def _data(imports_excluded_from_search: None) -> None:
    global DATA
    DATA = TensorDataset(torch.ones(40, 1000))


def loader(workers: int) -> "DataLoader[tuple[torch.Tensor, ...]]":
    return DataLoader(DATA, batch_size=4, num_workers=workers)


@pytest.fixture
def native(native_meter: Meter) -> MemoryProbe:
    """A probe with the native meter: the ledger may count batches of workers late."""
    return MemoryProbe(meter=native_meter)


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batch_that_no_operator_touched_is_growth(native: MemoryProbe, workers: int) -> None:
    """A batch that is kept is growth from the first batch on, also if no operator touched it."""
    kept = []
    with native.measure() as region:
        for (batch,) in region.batches(loader(workers)):
            kept.append(batch)
            del batch
    levels = [sample.requested_bytes - region.start_bytes for sample in region.timeline]
    assert levels == [BATCH_BYTES * number for number in range(1, 11)]
    assert region.growth_bytes_per_batch == BATCH_BYTES
    assert region.retained_bytes == len(kept) * BATCH_BYTES


def test_batch_that_is_not_kept_is_no_growth(cpu: MemoryProbe) -> None:
    """A batch that is not kept is no growth, however many batches were received early."""
    with cpu.measure() as region:
        for (batch,) in region.batches(loader(2)):
            del batch
    assert region.growth_bytes_per_batch == 0
    assert region.retained_bytes == 0


def test_batch_that_became_old_before_it_was_yielded_counts(native: MemoryProbe) -> None:
    """A collection may make a batch old before it is yielded; it still counts."""
    kept = []
    with native.measure() as region:
        for (batch,) in region.batches(loader(2)):
            kept.append(batch)
            del batch
            gc.collect()
    assert region.growth_bytes_per_batch == BATCH_BYTES
    assert region.retained_bytes == len(kept) * BATCH_BYTES


class SlowFirstWorker(Dataset[torch.Tensor]):
    """Samples of which the first worker's first batch arrives after the second worker's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(0.3)
        return torch.ones(1000)


@pytest.fixture
def sharing_strategy() -> typing.Iterator[Callable[[str], None]]:
    """Set how workers share memory; put back what it was."""
    before = torch.multiprocessing.get_sharing_strategy()
    yield torch.multiprocessing.set_sharing_strategy
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_batch_that_waited_in_the_loader_and_was_freed_is_no_growth(
    cpu: MemoryProbe,
    sharing_strategy: Callable[[str], None],
    strategy: str,
    persistent: bool,
) -> None:
    """A batch that was freed is no growth, although torch 2.9 keeps its storage's Python object."""
    sharing_strategy(strategy)
    late = DataLoader(SlowFirstWorker(), batch_size=4, num_workers=2, persistent_workers=persistent)
    with cpu.measure() as region:
        for batch in region.batches(late):
            del batch
    assert [sample.requested_bytes - region.start_bytes for sample in region.timeline] == [0, 0]
    assert region.retained_bytes == 0


def test_loader_has_its_own_method_again_after_a_region(native: MemoryProbe) -> None:
    """After a region the loader has its own method again, which a region patches."""
    before = torch_private.LOADER_ITERATOR.__next__
    with native.measure():
        assert torch_private.LOADER_ITERATOR.__next__ is not before
    assert torch_private.LOADER_ITERATOR.__next__ is before


def test_batch_of_a_worker_is_made_in_the_line_of_the_loop(native: MemoryProbe) -> None:
    """A batch of a worker is made in the loop's line, not in the queue of Python's library."""
    kept = []
    with native.measure() as region:
        for (batch,) in loader(2):
            kept.append(batch)
            del batch
    frames = [frame for holding in region.retained for frame in holding.created_at]
    names = {frame.partition(" in ")[2] for frame in frames}
    assert names == {test_batch_of_a_worker_is_made_in_the_line_of_the_loop.__name__}
    assert len(kept) == 10
