"""Storages that are moved to shared memory, to send them to other processes, with either meter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytest_cka_memory import MemoryProbe

SIZE = 480


@pytest.fixture(params=["file_descriptor", "file_system"])
def header_bytes(request: pytest.FixtureRequest, is_native: bool) -> Iterator[int]:
    """Use a sharing strategy; return the bytes that it puts in front of a storage, if counted."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield 64 if is_native and request.param == "file_system" else 0
    torch.multiprocessing.set_sharing_strategy(before)


def tensor() -> torch.Tensor:
    return torch.ones(SIZE // 4)


def test_a_tensor_that_is_older_than_the_region_is_not_new(
    cpu: MemoryProbe, header_bytes: int
) -> None:
    """A tensor that is moved to shared memory is not new, in that region or the next one."""
    old = tensor()
    with cpu.measure() as region:
        old.share_memory_()
    assert (region.retained_bytes, region.net_bytes) == (0, header_bytes)
    with cpu.measure() as region:
        old.share_memory_()  # it is shared already
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    with cpu.measure() as region:
        del old
    assert (region.retained_bytes, region.net_bytes) == (0, -SIZE - header_bytes)


def test_a_tensor_of_the_region_stays_what_it_retains(cpu: MemoryProbe, header_bytes: int) -> None:
    """A tensor of the region that is moved stays retained, with the line that shares or made it."""
    with cpu.measure() as region:
        kept = tensor().share_memory_()
    assert region.retained_bytes == region.net_bytes == SIZE + header_bytes
    (holding,) = region.retained
    assert str(holding.held_by).startswith("kept")
    del kept


def test_a_tensor_belongs_to_the_region_that_allocated_it(
    cpu: MemoryProbe, header_bytes: int
) -> None:
    """A tensor belongs to the region that allocated it, not to an inner one that moves it."""
    with cpu.measure() as outer:
        kept = tensor()
        with cpu.measure() as inner:
            kept.share_memory_()
    assert inner.retained_bytes == 0
    assert outer.retained_bytes == SIZE + header_bytes


@pytest.mark.parametrize("is_lent_before", [True, False])
def test_memory_of_numpy_is_new_only_if_it_was_lent_in_the_region(
    cpu: MemoryProbe, header_bytes: int, is_lent_before: bool
) -> None:
    """NumPy's memory that is moved is new only if it was lent to torch in the region."""
    lent = torch.from_numpy(np.ones(SIZE // 4, np.float32)) if is_lent_before else None
    with cpu.measure() as region:
        if lent is None:
            lent = torch.from_numpy(np.ones(SIZE // 4, np.float32))
        lent.share_memory_()
    assert region.retained_bytes == (0 if is_lent_before else SIZE + header_bytes)


@pytest.mark.parametrize(
    ("both_meters", "start_method"),
    # For the native meter, workers are spawned in tests/native/test_loader_workers.py.
    [("native", "forkserver"), ("ledger", "forkserver")],
    indirect=["both_meters"],
)
def test_the_data_set_of_a_loader_is_not_new_when_workers_start(
    cpu: MemoryProbe, start_method: str
) -> None:
    """Workers that are not forked get the whole data set in shared memory; it is not new."""
    data = TensorDataset(torch.ones(40, 3))
    loader = DataLoader(data, batch_size=20, num_workers=1, multiprocessing_context=start_method)
    with cpu.measure() as region:
        total = sum(float(batch.sum()) for (batch,) in loader)
    assert total == 120
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
