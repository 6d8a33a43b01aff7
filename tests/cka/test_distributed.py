"""Two gloo ranks give the same result as one process with the same batches."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from cka_nets import batches_of, mlp
from cka_ranks import run_rank, sharded_loader

from cka import CKA, CKAResult

SAMPLES = 37  # odd, so the sampler gives one rank a sample of the other as padding


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of both ranks by name."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(2, str(folder), SAMPLES), nprocs=2)
    return {
        name: [CKAResult.load(folder / f"{name}-{rank}.json") for rank in range(2)]
        for name in ("self", "pair", "alone", "uneven")
    }


def batches_without_padding():
    """Return the batches of both ranks without the repeated sample."""
    both = [[batch for (batch,) in sharded_loader(SAMPLES, rank, 2)] for rank in range(2)]
    both[1][-1] = both[1][-1][:-1]
    return both


@pytest.mark.parametrize("name", ["self", "pair"])
def test_ranks_give_the_result_of_one_process_on_the_same_batches(results, name):
    """CKA is equal to 1e-6 on every rank, and so are standard errors and batch counts."""
    both = batches_without_padding()
    # The last batches have 3 and 2 samples and are concatenated with those before them.
    joined = [[*own[:-2], torch.cat(own[-2:])] for own in both]
    cka = CKA(mlp(0), mlp(1) if name == "pair" else None)
    expected = cka.compare(iter(joined[0] + joined[1]), progress=False)
    for found in results[name]:
        assert (found.matrix - expected.matrix).abs().max() < 1e-6
        torch.testing.assert_close(found.standard_error, expected.standard_error)
        assert found.batches == expected.batches


def test_padding_samples_are_not_counted(results):
    """Every sample of the data set is used once."""
    assert [one.samples for one in results["self"]] == [SAMPLES, SAMPLES]


def test_ranks_do_not_communicate_if_distributed_is_false(results):
    """Each rank has the result of its own samples."""
    assert [one.samples for one in results["alone"]] == [19, 18]


def test_rank_without_a_large_enough_batch_adds_nothing(results):
    """The result of both ranks is that of the other rank's batches."""
    expected = CKA(mlp(0)).compare(batches_of(8, 8), progress=False)
    for found in results["uneven"]:
        torch.testing.assert_close(found.matrix, expected.matrix)
        assert found.samples == 16
