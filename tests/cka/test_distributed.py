"""Two gloo ranks give the same result as one process with the same batches."""

from __future__ import annotations

import forked_processes
import pytest
import torch
import torch.multiprocessing as mp
from cka_nets import batches_of, mlp
from cka_ranks import (
    Encoder,
    linear_network,
    padded_batches,
    run_rank,
    scaled_batches,
    sharded_loader,
    unequal_batches,
)
from cka_reference import cloned_outputs, linear, song_hsic

from cka import CKA, CKAResult
from cka.functional.resampling import draw_weights, weighted_products

SAMPLES = 37  # odd, so the sampler gives one rank a sample of the other as padding


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of both ranks by name."""
    folder = tmp_path_factory.mktemp("ranks")
    # Starts the server of forks with torch imported, if no other test has.
    forked_processes.run(["python", "-c", ""])
    arguments = (2, str(folder), SAMPLES)
    mp.start_processes(run_rank, args=arguments, nprocs=2, start_method="forkserver")
    return {
        name: [CKAResult.load(folder / f"{name}-{rank}.json") for rank in range(2)]
        for name in {path.name.rsplit("-", 1)[0] for path in folder.glob("*.json")}
    }


def batches_without_padding():
    """Return the batches of both ranks without the repeated sample."""
    both = [[batch for (batch,) in sharded_loader(SAMPLES, rank, 2)] for rank in range(2)]
    both[1][-1] = both[1][-1][:-1]
    return both


@pytest.mark.parametrize("name", ["self", "pair"])
def test_ranks_give_the_result_of_one_process_on_the_same_batches(results, name):
    """Every rank has the CKA of one process, to 1e-6, with its errors and batch counts."""
    both = batches_without_padding()
    # The last batches have 3 and 2 samples and are concatenated with those before them.
    joined = [[*own[:-2], torch.cat(own[-2:])] for own in both]
    cka = CKA(mlp(0), mlp(1) if name == "pair" else None)
    expected = cka.compare(iter(joined[0] + joined[1]), progress=False)
    for found in results[name]:
        assert (found.matrix - expected.matrix).abs().max() < 1e-6
        torch.testing.assert_close(found.standard_error, expected.standard_error)
        assert found.batches == expected.batches


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("unequal", (0, 1)), ("many-a-b", (0, 1)), ("many-a-c", (0, 2)), ("many-b-c", (1, 2))],
)
def test_ranks_with_different_numbers_of_batches_give_the_result_of_one_process(
    results, name, seeds
):
    """Ranks with two batches and one, of another size, give the result of one process."""
    dtype = torch.float64 if name == "unequal" else torch.float32
    batches = [batch.to(dtype) for rank in range(2) for batch in unequal_batches(rank)]
    models = [mlp(seed).to(dtype) for seed in seeds]
    expected = CKA(*models).compare(batches, progress=False)
    for found in results[name]:
        torch.testing.assert_close(found.matrix, expected.matrix, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.standard_error, expected.standard_error)
        assert (found.samples, found.batches) == (36, 3)


def test_rank_without_any_batch_has_the_result_of_the_others(results):
    """A rank whose model never ran has the result of the other ranks, in their dtype."""
    batches = [batch.double() for batch in unequal_batches(0)]
    expected = CKA(mlp(0).double(), kernel="rbf").compare(batches, progress=False)
    for found in results["empty"]:
        torch.testing.assert_close(found.matrix, expected.matrix, rtol=0, atol=1e-6)
        assert found.model1_layers == expected.model1_layers
        assert (found.samples, found.batches) == (20, 2)


def test_ranks_with_features_of_another_scale_give_the_result_of_one_process(results):
    """Ranks whose features differ in scale, and sums in exponents,
    give the result of one process.
    """
    batches = [batch * 2.0**89 for rank in range(2) for batch in scaled_batches(rank)]
    expected = CKA(linear_network()).compare(batches, progress=False)
    for found in results["scaled"]:
        torch.testing.assert_close(found.matrix, expected.matrix, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.standard_error, expected.standard_error)


def test_ranks_permute_independently_and_add_up_to_the_definition(results):
    """The mean by chance over two ranks is that of float64 loops over all their batches."""
    models = [mlp(seed).double() for seed in (0, 1)]
    own, cross, permuted = [0.0, 0.0], 0.0, torch.zeros(9, dtype=torch.float64)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        for batch in unequal_batches(rank):
            x, y = (linear(model[0](batch.double()).detach()) for model in models)
            own = [own[0] + song_hsic(x, x), own[1] + song_hsic(y, y)]
            cross += song_hsic(x, y)
            for number in range(9):
                at = torch.randperm(len(x), generator=generator)
                permuted[number] += song_hsic(x, y[at][:, at])
    permuted /= (own[0] * own[1]) ** 0.5
    for found in results["calibrated"]:
        assert found.calibration.mean[0, 0] == pytest.approx(float(permuted.mean()), abs=1e-9)
        assert found.calibration.spread[0, 0] == pytest.approx(float(permuted.std()), abs=1e-9)


@pytest.mark.parametrize(("name", "ranks"), [("bootstrapped", [0, 1]), ("empty-bootstrapped", [0])])
def test_bootstrap_of_ranks_adds_up_the_resamples_of_all(results, name, ranks):
    """Each rank draws with a seed of its own, and HSIC of all batches is added before the ratio."""
    sums = None
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank)
        for batch in unequal_batches(rank):
            grams = [
                [
                    linear(one)
                    for (one,) in cloned_outputs(mlp(seed).double(), [batch.double()]).values()
                ]
                for seed in (0, 1)
            ]
            weights = draw_weights(5, len(batch), "unbiased", generator)
            parts = weighted_products(*grams, "unbiased", weights)
            sums = torch.zeros(5, 15, dtype=torch.float64) if sums is None else sums
            for numbers, part in parts:
                sums[numbers] += part
    values = sums[:, :9].view(5, 3, 3) / (sums[:, 9:12, None] * sums[:, None, 12:]).sqrt()
    for found in results[name]:
        torch.testing.assert_close(
            found.confidence.standard_error, values.std(0), rtol=0, atol=1e-9
        )


def test_padding_samples_are_not_counted(results):
    """On several ranks every sample of the data set is used once; padding samples do not count."""
    assert [one.samples for one in results["self"]] == [SAMPLES, SAMPLES]


def test_ranks_do_not_communicate_if_distributed_is_false(results):
    """With distributed=False each rank has the result of its own samples."""
    assert [one.samples for one in results["alone"]] == [19, 18]


def test_rank_without_a_large_enough_batch_adds_nothing(results):
    """If one rank has no large enough batch, both have the result of the other's batches."""
    expected = CKA(mlp(0)).compare(batches_of(8, 8), progress=False)
    for found in results["uneven"]:
        torch.testing.assert_close(found.matrix, expected.matrix)
        assert found.samples == 16


@pytest.mark.parametrize("name", ["sharded", "sharded-fed"])
def test_ranks_of_a_sharded_model_run_it_equally_often(results, name):
    """Ranks with padding in other batches, a batch that is too small, and one batch fewer do not
    wait for each other forever, and have the result of one process.
    """
    batches = [batch for rank in range(2) for batch in padded_batches(rank)]
    batches = [batch for batch in batches if len(batch["input_ids"]) >= 4]
    cka = CKA(Encoder(), mask="auto" if name == "sharded" else None)
    expected = cka.compare(iter(batches), progress=False)
    for found in results[name]:
        assert (found.samples, found.batches) == (30, 4)
        assert found.model1_layers == expected.model1_layers
        torch.testing.assert_close(found.matrix, expected.matrix, rtol=0, atol=1e-6)
