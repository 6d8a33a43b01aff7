"""Where torch's allocator cannot be counted, some figures are lower bounds, none is too high."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.storage_meter import StorageMeter

BATCH_BYTES = 4 * 1000 * 4


@pytest.fixture
def ledger() -> MemoryProbe:
    """A probe whose meter counts tensor storages."""
    return MemoryProbe(meter=StorageMeter())


def test_what_a_thread_keeps_is_found_at_the_end_of_the_region(ledger: MemoryProbe) -> None:
    """The operators of another thread are not seen, but what it keeps is found at the end."""
    with ThreadPoolExecutor(1) as pool:
        region = ledger.run(lambda: pool.submit(torch.zeros, 100).result())
    assert region.retained_bytes == 400


def test_what_a_thread_frees_is_not_in_the_peak(ledger: MemoryProbe) -> None:
    """What another thread allocates and frees may be missing in the peak, and never is too much."""
    with ledger.measure() as region:
        thread = threading.Thread(target=lambda: torch.zeros(100))
        thread.start()
        thread.join()
    assert region.peak_increase_bytes in (0, 400)
    assert region.retained_bytes == 0


def test_no_mode_is_left_in_any_thread(ledger: MemoryProbe) -> None:
    """Regions of two threads may overlap; afterwards no dispatch mode is left in either thread."""
    opened, over = threading.Event(), threading.Event()
    depths: list[int] = []

    def work() -> None:
        with ledger.measure("thread"):
            opened.set()
            assert over.wait(60)
        depths.append(torch._C._len_torch_dispatch_stack())

    with ledger.measure("main"):
        thread = threading.Thread(target=work)
        thread.start()
        assert opened.wait(60)
    depths.append(torch._C._len_torch_dispatch_stack())
    over.set()
    thread.join()
    assert depths == [0, 0]
    assert ledger.run(torch.zeros, 5).retained_bytes == 20


def loader() -> "DataLoader[tuple[torch.Tensor, ...]]":
    return DataLoader(TensorDataset(torch.ones(40, 1000)), batch_size=4, num_workers=2)


@pytest.mark.parametrize("used", [False, True])
def test_batches_of_workers_count_once_they_are_used(ledger: MemoryProbe, used: bool) -> None:
    """A batch that a worker has sent counts with the first operator that uses it."""
    kept, batch_bytes = [], BATCH_BYTES if used else 0
    with ledger.measure() as region:
        for (batch,) in region.batches(loader()):
            kept.append(batch)
            if used:
                batch.sum()
            del batch
    assert region.growth_bytes_per_batch == batch_bytes
    assert region.retained_bytes == len(kept) * batch_bytes


def test_a_batch_that_is_older_than_a_region_is_not_new_when_it_is_used(
    ledger: MemoryProbe,
) -> None:
    """A batch that came before an inner region is not new there, if that is the first to use it."""
    with ledger.measure():
        batches = list(loader())
        inner = ledger.run(lambda: [float(batch.sum()) for (batch,) in batches])
    assert (inner.retained_bytes, inner.net_bytes) == (0, 0)


@pytest.mark.parametrize("func", [lambda: None, lambda: torch.zeros(10).sum().item()])
def test_clean_code_is_not_accused(ledger: MemoryProbe, func: Callable[[], object]) -> None:
    """Code that keeps nothing retains nothing."""
    assert ledger.run(func).retained_bytes == 0
