"""The estimator that corrects for a finite number of features as well as of samples."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import cloned_outputs, linear, song_hsic

from cka import CKA, CKAWarning, SettingError, cka_from_features, hsic


def corrected_hsic(features):
    """Return the mean of HSIC over all pairs of different features, times p², in loops."""
    columns = [linear(column[:, None]) for column in features.flatten(1).T]
    count = len(columns)
    total = sum(
        song_hsic(columns[i], columns[j]) for i in range(count) for j in range(count) if i != j
    )
    return total * count / (count - 1)


def reference(x_batches, y_batches):
    """Return CKA as a ratio of sums over batches."""
    cross = sum(song_hsic(linear(x), linear(y)) for x, y in zip(x_batches, y_batches, strict=True))
    own = sum(map(corrected_hsic, x_batches)) * sum(map(corrected_hsic, y_batches))
    return cross / own**0.5


def test_value_is_that_of_the_definition_in_float64():
    """The sum over features in closed form equals a loop over all pairs of features."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(30, 2, generator=generator).double()
    x = common @ torch.randn(2, 7, generator=generator).double() + 5
    y = x @ torch.randn(7, 5, generator=generator).double()
    found = cka_from_features(x, y, estimator="sampled_neurons")
    assert float(found) == pytest.approx(reference([x], [y]), abs=1e-9)


def test_corrected_hsic_is_unbiased_over_all_draws_of_features():
    """The mean over all draws of three from four neurons is HSIC of the whole population.

    Both are relative to HSIC with one fixed matrix, because CKA is a ratio.
    """
    generator = torch.Generator().manual_seed(0)
    population = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    kernel = linear(population) / 4
    truth = song_hsic(kernel, kernel)
    corrected, plain = [], []
    for drawn in product(range(4), repeat=3):  # independent draws, as the estimator assumes
        features = population[:, drawn]
        corrected.append(corrected_hsic(features) / 9)
        gram = linear(features) / 3
        plain.append(song_hsic(gram, gram))
    assert sum(corrected) / len(corrected) == pytest.approx(truth, abs=1e-12)
    assert sum(plain) / len(plain) > 1.2 * truth


def test_few_neurons_estimate_the_cka_of_the_population():
    """The mean over 100 draws of 30 neurons is CKA of the population; without the correction it is
    far below.
    """
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    x, y = (
        (common + torch.randn(60, 5, generator=generator).double() / 2)
        @ torch.randn(5, 500, generator=generator).double()
        for _ in range(2)
    )
    truth = float(cka_from_features(x, y))
    means = {}
    for estimator in ("sampled_neurons", "unbiased"):
        values = []
        for _ in range(100):
            at, other = torch.randint(500, (2, 30), generator=generator)
            values.append(float(cka_from_features(x[:, at], y[:, other], estimator=estimator)))
        means[estimator] = sum(values) / len(values)
    assert means["sampled_neurons"] == pytest.approx(truth, abs=0.02)
    assert means["unbiased"] < truth - 0.08


def test_comparison_of_models_is_that_of_the_definition():
    """Batches of two sizes, split or not, and every pair of layers of two models."""
    models = mlp(0).double(), mlp(1).double()
    batches = [batch.double() for batch in batches_of(16, 8)]
    outputs = [cloned_outputs(model, batches) for model in models]
    for part in (None, 8):
        cka = CKA(*models, device="cpu", estimator="sampled_neurons", hsic_batch_size=part)
        result = cka.compare(batches, progress=False)
        for row in result.model1_layers:
            for column in result.model2_layers:
                x, y = (
                    [half for batch in of_model[label] for half in batch.split(part or 16)]
                    for of_model, label in zip(outputs, (row, column), strict=True)
                )
                assert result[row, column] == pytest.approx(reference(x, y), abs=1e-9)
        assert result.estimator == "sampled_neurons"


def test_scale_and_offset_of_features_do_not_matter():
    """Features whose squares overflow in float32, and with a common offset, have the same value."""
    x, y = (batch @ torch.ones(6, 6).triu() for batch in batches_of(20, 20))
    expected = cka_from_features(x, y, estimator="sampled_neurons")
    for scale in (2.0**-80, 2.0**80):
        model = torch.nn.Sequential(torch.nn.Identity())
        found = CKA(model, model, "0", device="cpu", estimator="sampled_neurons").compare(
            [x * scale], [y], progress=False
        )
        assert found.matrix[0, 0] == pytest.approx(float(expected), abs=1e-6)
    shifted = cka_from_features(x.double() + 100, y, estimator="sampled_neurons")
    assert float(shifted) == pytest.approx(float(expected), abs=1e-6)


def test_layer_compared_with_itself_is_one():
    """In a self-comparison, and of one tensor on both sides, features are the same draw."""
    result = CKA(mlp(0), device="cpu", estimator="sampled_neurons").compare(
        batches_of(16, 16), progress=False
    )
    torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3))
    (x,) = batches_of(16)
    assert float(cka_from_features(x, x, estimator="sampled_neurons")) == pytest.approx(1)


def test_one_feature_has_no_value():
    """A side with one feature has no pair of features, so CKA is NaN and a warning says why."""
    x, y = batches_of(16, 16)
    with pytest.warns(CKAWarning, match="too few features for estimator='sampled_neurons'"):
        assert cka_from_features(x[:, :1], y, estimator="sampled_neurons").isnan()
    model = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Linear(1, 3))
    with pytest.warns(CKAWarning, match=r"too few features .*: 0$"):
        result = CKA(model, device="cpu", estimator="sampled_neurons").compare([x], progress=False)
    assert result.matrix.isnan().tolist() == [[True, True], [True, False]]


def test_negative_corrected_hsic_has_no_value():
    """Two features without a common direction have a negative estimate, and CKA is NaN."""
    x = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1], [0, 0]])
    assert corrected_hsic(x) < 0
    with pytest.warns(CKAWarning, match="too few"):
        assert cka_from_features(x, x * 2, estimator="sampled_neurons").isnan()


def test_permutations_calibrate_the_corrected_value():
    """The values by chance are divided by the corrected terms too."""
    models = mlp(0).double(), mlp(1).double()
    batches = [batch.double() for batch in batches_of(20)]
    plain, corrected = (
        CKA(*models, device="cpu", estimator=estimator).compare(batches, progress=False, null=9)
        for estimator in ("unbiased", "sampled_neurons")
    )
    ratio = corrected.matrix / plain.matrix
    torch.testing.assert_close(
        corrected.calibration.spread, plain.calibration.spread * ratio, rtol=1e-6, atol=0
    )


def test_other_kernels_and_gram_matrices_are_refused():
    """Only the linear kernel is a sum over features, and a Gram matrix does not show them."""
    x, y = batches_of(16, 16)
    with pytest.raises(SettingError, match="requires kernel='linear'"):
        cka_from_features(x, y, kernel="rbf", estimator="sampled_neurons")
    with pytest.raises(SettingError, match="requires kernel='linear'"):
        CKA(mlp(), kernel="rbf", estimator="sampled_neurons")
    with pytest.raises(SettingError, match="use cka_from_features"):
        hsic(x @ x.T, y @ y.T, estimator="sampled_neurons")
