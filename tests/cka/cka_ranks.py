"""The comparisons that each rank runs, in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cka_nets import batches_of, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cka import CKA, CKAResult, InputError, SettingError, compare_many


def dataset(samples):
    return TensorDataset(batches_of(samples)[0])


def sharded_loader(samples, rank, world):
    """Return one rank's loader over a shuffled, padded shard of the samples."""
    data = dataset(samples)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3)
    return DataLoader(data, batch_size=8, sampler=sampler)


def run_rank(rank, world, folder, samples):
    """Compare as one rank, and save the results by name and rank in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    refuse_pickle()
    try:
        for name, result in results_of_rank(rank, world, samples).items():
            result.save(f"{folder}/{name}-{rank}.json")
    finally:
        dist.destroy_process_group()


def refuse_pickle():
    """Replace the functions of torch.distributed that exchange objects, which they pickle."""

    def refuse(*args, **kwargs):
        raise AssertionError("an object was pickled for another rank")

    names = [name for name in dir(dist) if name.endswith(("_object", "_object_list"))]
    assert {"all_gather_object", "broadcast_object_list"} <= set(names)
    for name in names:
        setattr(dist, name, refuse)


def unequal_batches(rank):
    """Return one rank's batches: two of 8 and 12 samples, one of 16, or none."""
    return [batches_of(8, 12, seed=1), batches_of(16, seed=2), []][rank]


def linear_network():
    """Return layers without a bias, whose outputs have the scale of their inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False))


def scaled_batches(rank):
    """Return one rank's batches, with features whose squares are too small for float32."""
    return [batch * 2.0 ** (rank - 90) for batch in unequal_batches(rank)]


def results_of_rank(rank, world, samples) -> dict[str, CKAResult]:
    """Return the results of all comparisons, and check those that must fail on every rank."""
    model, other = DistributedDataParallel(mlp(0)), mlp(1)
    results = {
        "self": CKA(model).compare(sharded_loader(samples, rank, world), progress=False),
        "pair": CKA(model, other).compare(sharded_loader(samples, rank, world), progress=False),
    }
    alone = CKA(model, distributed=False)
    results["alone"] = alone.compare(sharded_loader(samples, rank, world), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        uneven = batches_of(8, 8) if rank == 0 else batches_of(2)
        results["uneven"] = CKA(model).compare(iter(uneven), progress=False)
        shard = [batch.double() for batch in unequal_batches(rank)]
        pair = CKA(mlp(0).double(), mlp(1).double())
        results["unequal"] = pair.compare(iter(shard), progress=False)
        shard = [batch.double() for batch in unequal_batches(rank)]
        results["calibrated"] = pair.compare(iter(shard), progress=False, null=9)
        shard = [batch.double() for batch in unequal_batches(rank)]
        results["bootstrapped"] = pair.compare(iter(shard), progress=False, bootstrap=5)
        shard = [batch.double() for batch in unequal_batches(2 * rank)]
        results["empty-bootstrapped"] = pair.compare(iter(shard), progress=False, bootstrap=5)
        shard = [batch.double() for batch in unequal_batches(2 * rank)]
        results["empty"] = CKA(mlp(0).double(), kernel="rbf").compare(iter(shard), progress=False)
        results["scaled"] = CKA(linear_network()).compare(
            iter(scaled_batches(rank)), progress=False
        )
        many = {"a": mlp(0), "b": mlp(1), "c": mlp(2)}
        found = compare_many(many, iter(unequal_batches(rank)), progress=False)
        results |= {f"many-{one}-{other}": result for (one, other), result in found.items()}
        with pytest.raises(InputError, match="no batch had at least 4 samples"):
            CKA(model).compare(iter(batches_of(2)), progress=False)
    with pytest.raises(InputError, match=r"ranks ran different layers.*\(0, 1\); compare"):
        CKA(model, model1_layers=str(rank)).compare(batches_of(8), progress=False)
    with pytest.raises(SettingError, match="run it on one rank with distributed=False"):
        CKA(model, estimator="exact").compare(batches_of(8), progress=False)
    return results
