"""Batches that come from the worker processes of a data loader."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytest_cka_memory import MemoryProbe, Region

BATCH_BYTES = 4 * 3 * 4


def loader(start_method: str | None) -> "DataLoader[tuple[torch.Tensor, ...]]":
    """Return a loader on new data, with two workers, or one that has to import torch, or none."""
    data, workers = TensorDataset(torch.ones(40, 3)), {None: 0, "spawn": 1}.get(start_method, 2)
    return DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=start_method)


def keep_every_batch(
    probe: MemoryProbe, batches: "DataLoader[tuple[torch.Tensor, ...]]"
) -> tuple[Region, list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    with probe.measure() as region:
        for (batch,) in region.batches(batches):
            kept.append(batch)
            del batch
    return region, kept


@pytest.mark.slow
@pytest.mark.parametrize("start_method", [None, "fork", "forkserver", "spawn"])
def test_kept_batches_are_growth_from_the_first_one_on(
    probe: MemoryProbe, start_method: str | None
) -> None:
    """Batches that are kept are growth from the first one on, also if workers load them.

    Unless workers are forked, the data set is moved to shared memory when they start; it is old.
    """
    region, kept = keep_every_batch(probe, loader(start_method))
    assert region.growth_bytes_per_batch == BATCH_BYTES
    assert region.retained_bytes == region.net_bytes == len(kept) * BATCH_BYTES == 480
    levels = [sample.requested_bytes - region.start_bytes for sample in region.timeline]
    assert levels == [BATCH_BYTES * number for number in range(1, 11)]


@pytest.mark.slow
def test_prefetched_batches_are_never_growth(probe: MemoryProbe) -> None:
    """How many prefetched batches have arrived is chance; they never count, so loops are flat."""
    found = []
    for _ in range(20):
        total = 0.0
        with probe.measure() as region:
            for (batch,) in region.batches(loader("fork")):
                total += float(batch.sum())
                del batch
        assert total == 120.0
        found.append((region.growth_bytes_per_batch, region.retained_bytes))
    assert found == [(0.0, 0)] * 20
