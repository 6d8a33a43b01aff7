"""Two gloo processes give what one process gives for the same batches."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from cka_nets import batches_of, mlp
from cka_ranks import sampled, work

from cka import CKA, CKAResult

SAMPLES = 37  # odd, so that the sampler pads one rank with a sample of the other


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of both ranks by name."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(2, str(folder), SAMPLES), nprocs=2)
    return {
        name: [CKAResult.load(folder / f"{name}-{rank}.json") for rank in range(2)]
        for name in ("self", "pair", "alone", "lopsided")
    }


def batches_without_padding():
    """The batches of both ranks, less the sample that is there twice."""
    both = [[batch for (batch,) in sampled(SAMPLES, rank, 2)] for rank in range(2)]
    both[1][-1] = both[1][-1][:-1]
    return both


@pytest.mark.parametrize("name", ["self", "pair"])
def test_ranks_equal_a_single_process_on_the_same_batches(results, name):
    """To 1e-6, on every rank, standard errors included."""
    both = batches_without_padding()
    # The last batches hold 3 and 2 samples, and join those before them.
    joined = [[*own[:-2], torch.cat(own[-2:])] for own in both]
    cka = CKA(mlp(0), mlp(1) if name == "pair" else None)
    expected = cka.compare(iter(joined[0] + joined[1]), progress=False)
    for found in results[name]:
        assert (found.matrix - expected.matrix).abs().max() < 1e-6
        torch.testing.assert_close(found.standard_error, expected.standard_error)
        assert found.batches == expected.batches


def test_padding_is_not_counted(results):
    """Every sample of the data set is used exactly once."""
    assert [one.samples for one in results["self"]] == [SAMPLES, SAMPLES]


def test_a_rank_can_compare_alone(results):
    """distributed=False: no rank waits for another, and each has its own result."""
    assert [one.samples for one in results["alone"]] == [19, 18]


def test_a_rank_without_a_usable_batch_adds_nothing(results):
    """The other's sums are everyone's result."""
    expected = CKA(mlp(0)).compare(batches_of(8, 8), progress=False)
    for found in results["lopsided"]:
        torch.testing.assert_close(found.matrix, expected.matrix)
        assert found.samples == 16
