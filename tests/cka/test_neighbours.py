"""Mutual k-nearest neighbours and CKNNA against loops in NumPy's float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import cloned_outputs
from torch import nn

from cka import (
    CKA,
    CKNNA,
    CKAResult,
    DoesNotFitError,
    InputError,
    MutualKNN,
    SettingError,
    cka_from_features,
    compare_many,
    measure_from_features,
)
from pytest_cka_memory import MemoryProbe


def unit_products(features) -> np.ndarray:
    """Return inner products (n, n) of samples of length 1."""
    rows = features.detach().double().flatten(1).numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows @ rows.T


def neighbours(products: np.ndarray, k: int) -> np.ndarray:
    """Return whether j is one of the k nearest neighbours of i, (n, n)."""
    near = np.zeros(products.shape, bool)
    for i in range(len(products)):
        order = [j for j in np.argsort(-products[i]) if j != i]
        near[i, order[:k]] = True
    return near


def mutual_knn(x, y, k: int) -> float:
    near_x, near_y = (neighbours(unit_products(each), k) for each in (x, y))
    return float(np.mean([np.sum(near_x[i] & near_y[i]) / k for i in range(len(near_x))]))


def song(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741  # the paper's letters
    """Return the unbiased HSIC of Song et al. 2012, eq. 5, of matrices that are not symmetric."""
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    one = np.ones(n)
    total = np.trace(k @ l)
    total += (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    total -= 2 / (n - 2) * (one @ k @ l @ one)
    return float(total / (n * (n - 3)))


def cknna(x, y, k: int) -> float:
    products = [unit_products(each) for each in (x, y)]
    near = [neighbours(each, k) for each in products]

    def aligned(a: int, b: int) -> float:
        both = near[a] & near[b]
        return song(both * products[a], both * products[b])

    return aligned(0, 1) / (aligned(0, 0) * aligned(1, 1)) ** 0.5


REFERENCES = {"mutual_knn": (MutualKNN, mutual_knn), "cknna": (CKNNA, cknna)}


def related(n: int, seed: int = 0, offset: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator)
    y = torch.tanh(x @ torch.randn(12, 9, generator=generator)) + torch.randn(
        n, 9, generator=generator
    )
    return x + offset, y + offset


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("n", "k"), [(12, 2), (40, 5), (120, 10)])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_measures_are_those_of_the_loops(name, n, k, offset):
    """Features in float32 give the value of loops in float64."""
    kind, reference = REFERENCES[name]
    x, y = related(n, offset=offset)
    found = measure_from_features(x, y, measure=kind(k))
    assert float(found) == pytest.approx(reference(x, y, k), abs=1e-9)


@pytest.mark.parametrize("name", REFERENCES)
def test_measure_of_layers_is_that_of_their_features(name):
    """In a comparison, each pair of layers has the value of the loops over all samples."""
    kind, reference = REFERENCES[name]
    model, batches = mlp().eval(), batches_of(16, 16, 10)
    outputs = cloned_outputs(model, batches)
    result = CKA(model, measure=kind(5), device="cpu").compare(batches, progress=False)
    features = {label: torch.cat(parts) for label, parts in outputs.items()}
    assert (result.measure, result.estimator, result.samples) == (name, "exact", 42)
    for one in outputs:
        for other in outputs:
            expected = reference(features[one], features[other], 5)
            assert result[one, other] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("two", [False, True], ids=["self", "two-models"])
def test_permutations_are_those_of_the_samples(two):
    """The mean of many permutations is the value by chance, k / (n - 1), and p-values tell apart
    related layers.
    """
    models = (mlp(0), mlp(1) if two else None)
    result = CKA(*models, measure=MutualKNN(4), device="cpu").compare(
        batches_of(24, 16), progress=False, null=300
    )
    chance = 4 / 39
    assert torch.allclose(
        result.calibration.mean, torch.full_like(result.calibration.mean, chance), atol=0.01
    )
    assert result.calibration.p_best[0, 1] < 0.01


def test_permuted_values_are_those_of_features_in_another_order():
    """A permuted value is that of features whose samples have the other order."""
    from cka.functional.neighbours import neighbourhood

    x, y = related(30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    for measure in (MutualKNN(4), CKNNA(4)):
        hoods = [neighbourhood(each, measure) for each in (x, y, y[order])]
        assert float(measure.of_pair(hoods[0], hoods[1], order)) == pytest.approx(
            float(measure.of_pair(hoods[0], hoods[2])), abs=1e-12
        )


def test_interval_of_mutual_neighbours_contains_the_value():
    """A bootstrap gives an error and an interval; CKNNA has none and says so."""
    batches = batches_of(32, 32)
    result = CKA(mlp(0), mlp(1), measure="mutual_knn", device="cpu").compare(
        batches, progress=False, bootstrap=200
    )
    low, high = result.confidence.low, result.confidence.high
    assert ((low <= result.matrix) & (result.matrix <= high)).all()
    assert (result.confidence.standard_error > 0).all()
    with pytest.raises(SettingError, match="measure='cknna' does not support a bootstrap, got b"):
        CKA(mlp(), measure="cknna").compare(batches, progress=False, bootstrap=200)


@pytest.mark.parametrize("estimator", ["unbiased", "biased", "sampled_neurons"])
@pytest.mark.parametrize("name", REFERENCES)
def test_estimates_from_minibatches_are_refused_by_name(name, estimator):
    """Neighbours in a batch are others than among all samples, so a mean over batches is biased."""
    message = (
        f"measure='{name}' does not support estimator='{estimator}', because .* use estimator='ex"
    )
    with pytest.raises(SettingError, match=message):
        CKA(mlp(), measure=name, estimator=estimator)


def test_values_of_batches_are_biased():
    """What is refused would be wrong: neighbours in batches of 16 are shared far more often."""
    x, y = related(160)
    whole = mutual_knn(x, y, 5)
    parts = zip(x.split(16), y.split(16), strict=True)
    assert np.mean([mutual_knn(*pair, 5) for pair in parts]) > whole + 0.1


def test_all_neighbours_give_cka_of_features_of_length_one():
    """With k = n - 1, CKNNA is unbiased linear CKA of samples of length 1."""
    x, y = related(20)
    unit = [each.double() / each.double().norm(dim=1, keepdim=True) for each in (x, y)]
    found = measure_from_features(x, y, measure=CKNNA(19))
    assert float(found) == pytest.approx(float(cka_from_features(*unit)), abs=1e-9)


def test_masks_reach_the_measure():
    """Pooled tokens leave padding out; with pooling='flatten' padding is an error."""
    real = torch.arange(5) < torch.randint(
        1, 6, (40, 1), generator=torch.Generator().manual_seed(0)
    )
    tokens = torch.randn(40, 5, 6)
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 4))
    settings = {"measure": MutualKNN(5), "mask": lambda _: real, "device": "cpu"}
    result = CKA(model, pooling="mean", **settings).compare([tokens], progress=False)

    def mean(each):
        return (each * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)

    expected = mutual_knn(mean(tokens), mean(model(tokens)), 5)
    assert result["0", "1"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match="padding cannot be left out with pooling='flatten'; use"):
        CKA(model, **settings).compare([tokens], progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"measure": "svcca"}, "cannot use 'svcca' as a measure; write 'cka', 'mutual_knn'"),
        ({"measure": "cknna", "kernel": "rbf"}, "'cknna' does not use a kernel, got kernel='rbf'"),
        ({"measure": "mutual_knn", "hsic_batch_size": 8}, "does not split batches"),
    ],
)
def test_settings_without_a_meaning_are_errors(settings, message):
    """Settings that have no meaning for a measure are refused."""
    with pytest.raises(SettingError, match=message):
        CKA(mlp(), **settings)


def test_numbers_of_neighbours_are_checked():
    """K is at least 1 or 2, and below the number of samples."""
    with pytest.raises(SettingError, match=r"MutualKNN needs .* at least 1, got 0; write"):
        MutualKNN(0)
    with pytest.raises(SettingError, match=r"CKNNA needs .* at least 2, got 1; write"):
        CKNNA(1)
    with pytest.raises(InputError, match=r"10 nearest neighbours need more than 10 samples, got 8"):
        CKA(mlp(), measure="mutual_knn").compare(batches_of(8), progress=False)
    with pytest.raises(
        SettingError, match=r"compare_many keeps only Gram matrices .* measure='cknna'"
    ):
        compare_many({"a": mlp(0), "b": mlp(1)}, batches_of(8), measure="cknna")


def test_result_names_its_measure(tmp_path):
    """The measure is in the text, the table and the file; files without one are of CKA."""
    result = CKA(mlp(), measure="mutual_knn").compare(batches_of(32), progress=False)
    assert str(result).startswith("mutual kNN of Sequential")
    result.save(tmp_path / "result.json")
    assert CKAResult.load(tmp_path / "result.json").measure == "mutual_knn"
    pytest.importorskip("pandas")
    assert list(result.to_dataframe(long=True)) == ["mutual_knn", "standard_error"]


@pytest.mark.native
@pytest.mark.parametrize("measure", [MutualKNN(10), CKNNA(10)])
@pytest.mark.parametrize(("samples", "width"), [(600, 64), (200, 8000)])
def test_bytes_given_in_the_error_are_enough(measure, samples, width):
    """The bytes that an error asks for suffice, for many samples and for wide features."""
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh())
    batches = batches_of(samples, features=(8,))
    settings = {"measure": measure, "device": "cpu"}
    with pytest.raises(DoesNotFitError) as error:
        CKA(model, memory_limit_bytes=1, **settings).compare(batches, progress=False)
    needed = int(re.search(r"needs .* MB \((\d+) bytes\) for", str(error.value)).group(1))
    with MemoryProbe("cpu").measure() as region:
        CKA(model, memory_limit_bytes=needed, **settings).compare(batches, progress=False)
    assert needed / 4 < region.peak_increase_bytes <= needed
