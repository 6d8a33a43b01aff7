"""The comparisons that each rank runs, in a module that spawned processes can import."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cka_nets import batches_of, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cka import CKA, CKAResult, InputError, LayerError, SettingError, compare_many


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
        results = {**results_of_rank(rank, world, samples), **sharded_results(rank)}
        for name, result in results.items():
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


class Encoder(nn.Module):
    """Layers of tokens with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def token_batch(samples, tokens, seed, *, padding):
    """Return token ids and their mask; every second sample is half padding if asked for."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(samples, tokens, dtype=torch.long)
    mask[::2, tokens // 2 :] = 0 if padding else 1
    ids = torch.randint(0, 50, (samples, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def padded_batches(rank):
    """Return one rank's batches: padding in another one, a small one, and more on rank 0."""
    return [
        [
            token_batch(8, 6, 1, padding=True),
            token_batch(8, 9, 2, padding=False),
            token_batch(6, 9, 5, padding=False),
        ],
        [token_batch(2, 7, 3, padding=False), token_batch(8, 5, 4, padding=True)],
    ][rank]


def sharded_encoder():
    """Return an encoder whose layers fetch their weights from both ranks when they run."""
    mesh = init_device_mesh("cpu", (2,))
    model = Encoder()
    model.unused = nn.Identity()  # a layer that never runs
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_results(rank):
    """Return the results of a sharded model, and check errors that one rank has."""
    model = sharded_encoder()
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results["sharded"] = CKA(model).compare(iter(padded_batches(rank)), progress=False)
        counted = CKA(model, feed=lambda model, batch: model(*batch))  # the inputs show the samples
        pairs = [list(batch.values()) for batch in padded_batches(rank)]
        results["sharded-fed"] = counted.compare(iter(pairs), progress=False)
        with pytest.raises(InputError, match="rank 1 has no batch"):
            CKA(model).compare(iter(padded_batches(0) if rank == 0 else []), progress=False)
        batch = token_batch(8, 6, 1, padding=False)
        if rank == 1:
            batch["real"] = batch.pop("attention_mask")
        problem = "no entry 'real'" if rank == 0 else "rank 0 stopped with an error"
        masked = CKA(model, mask="real", feed=lambda model, batch: model(*batch.values()))
        with pytest.raises(InputError, match=problem):
            masked.compare(iter([batch]), progress=False)
        check_errors_in_a_pass(model, rank)
    return results


def check_errors_in_a_pass(model, rank):
    """Check that both ranks raise if only one has an error while or after the model runs."""
    unusable = token_batch(8, 6, 1, padding=True)
    if rank == 1:
        unusable["attention_mask"][3] = 0
    first = token_batch(8, 6, 2, padding=True)
    other = "rank 1 stopped with an error"
    for batches in ([unusable], [first, unusable]):
        with pytest.raises(InputError, match="only padding" if rank == 1 else other):
            CKA(model).compare(iter(batches), progress=False)
    plain = token_batch(8, 6, 1, padding=False)

    def kernel(features):
        if rank == 1:
            raise ValueError("a kernel of the user")
        return features @ features.T

    with pytest.raises(ValueError if rank == 1 else InputError, match="of the user|" + other):
        CKA(model, kernel=kernel).compare(iter([plain]), progress=False)
    layers = "layers.0" if rank == 0 else "unused"
    with pytest.raises(LayerError if rank == 1 else InputError, match="no selected layer|" + other):
        CKA(model, model1_layers=layers).compare(iter([plain]), progress=False)


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
