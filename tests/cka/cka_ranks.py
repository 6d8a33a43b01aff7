"""What one rank does; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cka_nets import batches_of, mlp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cka import CKA, CKAResult, InputError, SettingError


def dataset(samples):
    return TensorDataset(batches_of(samples)[0])


def sampled(samples, rank, world):
    data = dataset(samples)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3)
    return DataLoader(data, batch_size=8, sampler=sampler)


def work(rank, world, folder, samples):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        for name, result in compare(rank, world, samples).items():
            result.save(f"{folder}/{name}-{rank}.json")
    finally:
        dist.destroy_process_group()


def compare(rank, world, samples) -> dict[str, CKAResult]:
    model, other = DistributedDataParallel(mlp(0)), mlp(1)
    results = {
        "self": CKA(model).compare(sampled(samples, rank, world), progress=False),
        "pair": CKA(model, other).compare(sampled(samples, rank, world), progress=False),
    }
    alone = CKA(model, distributed=False)
    results["alone"] = alone.compare(sampled(samples, rank, world), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lopsided = batches_of(8, 8) if rank == 0 else batches_of(2)
        results["lopsided"] = CKA(model).compare(iter(lopsided), progress=False)
        with pytest.raises(InputError, match="no batch had at least 4 samples"):
            CKA(model).compare(iter(batches_of(2)), progress=False)
    with pytest.raises(InputError, match="the ranks saw different layers run"):
        CKA(model, model1_layers=str(rank)).compare(batches_of(8), progress=False)
    with pytest.raises(SettingError, match="run it on one rank with distributed=False"):
        CKA(model, estimator="exact").compare(batches_of(8), progress=False)
    return results
