"""Largest errors against float64, and cases that other libraries compute incorrectly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cka_nets import Constant, batches_of, cifar_resnet18, mlp
from cka_reference import (
    cloned_outputs,
    gretton_hsic,
    linear,
    minibatch_cka,
    reference_matrix,
)
from torch import nn

from cka import CKA, RBF, CKAWarning, cka_from_features

pytestmark = pytest.mark.usefixtures("arithmetic")


@cache
def resnet18_in_float64(scale, offset):
    """Return labels and CKA; once for all arithmetics, which the reference does not use."""
    batches = batches_of(12, features=(3, 32, 32))
    outputs = cloned_outputs(cifar_resnet18(), batches, lambda tensor: tensor * scale + offset)
    return list(outputs), reference_matrix(outputs, list(outputs))


@pytest.mark.parametrize(
    ("scale", "offset"),
    [
        pytest.param(1, 0, id="raw-init"),
        pytest.param(1, 1000, id="plus-1000"),
        pytest.param(1e-3, 0, id="times-0.001"),
        pytest.param(1e3, 0, id="times-1000"),
    ],
)
def test_resnet18_is_within_a_millionth_of_float64(scale, offset):
    """For all layers of a random ResNet-18, every entry is within 1e-6 of that in float64."""
    model, batches = cifar_resnet18(), batches_of(12, features=(3, 32, 32))
    pick = lambda name, output: output * scale + offset  # noqa: E731
    result = CKA(model, pick=pick, device="cpu").compare(batches, progress=False)
    labels, expected = resnet18_in_float64(scale, offset)
    assert len(labels) == 75
    assert result.model1_layers == labels
    assert (result.matrix.double() - expected).abs().max() < 1e-6


@pytest.mark.slow
def test_large_images_are_within_a_millionth_of_float64():
    """With 802,816 features per image, CKA is within 1e-6; a single float32 sum was 3e-6 off."""
    first = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    then = [nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    last = [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*first, *then, *last).eval()
    batches = [torch.randn(16, 3, 224, 224)]
    result = CKA(model, device="cpu").compare(batches, progress=False)
    expected = reference_matrix(cloned_outputs(model, batches), result.model1_layers)
    assert (result.matrix.double() - expected).abs().max() < 1e-6


def test_float64_models_are_compared_in_float64():
    """Models in float64 are compared in float64, and the result is correct to 13 digits."""
    model, batches = mlp().double(), [one.double() for one in batches_of(16, 12)]
    result = CKA(model).compare(batches, progress=False)
    outputs = cloned_outputs(model, batches)
    expected = reference_matrix(outputs, result.model1_layers)
    assert result.matrix.dtype == torch.float64
    assert (result.matrix - expected).abs().max() < 1e-13


def test_layer_that_adds_an_offset_has_a_cka_of_one():
    """CKA(a, a + 100) = 1; two published libraries give 0.0 and 0.022."""

    class Offset(nn.Module):
        def forward(self, x):
            return x + 100

    model = nn.Sequential(nn.Linear(6, 4), Offset())
    result = CKA(model).compare(batches_of(16), progress=False)
    assert result.matrix[0, 1] == pytest.approx(1, abs=1e-5)
    assert result.matrix[0, 0] == 1


def test_negative_estimates_are_not_clamped():
    """CKA of independent layers has mean 0; with a clamp to [0, 1] it would be 0.04."""
    values = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, 10, 50, generator=generator)
        result = CKA(nn.Identity(), nn.Identity()).compare([noise[0]], [noise[1]], progress=False)
        values.append(result.matrix.item())
    assert min(values) < 0
    mean = sum(values) / len(values)
    assert abs(mean) < 4 * torch.tensor(values).std().item() / len(values) ** 0.5


@pytest.mark.parametrize("samples", [8, 11])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e4], ids=str)
def test_only_constant_layers_are_nan_with_a_warning(samples, value):
    """Only the row and column of the constant layer are NaN, for any value of its output."""
    with pytest.warns(CKAWarning, match="same for every sample: constant$") as warned:
        result = CKA(Constant(value)).compare(batches_of(samples), progress=False)
    assert len(warned) == 1
    assert result.matrix.isnan().tolist() == [[False, True], [True, True]]
    assert result.matrix[0, 0] == 1


def test_layers_with_nan_outputs_have_their_own_warning():
    """Layers with NaN outputs have their own warning, which does not call them constant."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Threshold(0.0, float("nan")))
    with pytest.warns(CKAWarning, match="output contains NaN or infinity: 1$"):
        result = CKA(model).compare(batches_of(8), progress=False)
    assert result.matrix[0, 0] == 1


def test_two_models_match_the_formula():
    """For two models every entry is that of cloned outputs, over batches of different size."""
    first, second, batches = mlp(0).eval(), mlp(1).eval(), batches_of(16, 12, 8)
    result = CKA(first, second).compare(batches, progress=False)
    one, two = cloned_outputs(first, batches), cloned_outputs(second, batches)
    for row, name in enumerate(result.model1_layers):
        for column, other in enumerate(result.model2_layers):
            expected = minibatch_cka(one[name], two[other])
            assert float(result.matrix[row, column]) == pytest.approx(expected, abs=1e-6)


def test_self_comparison_is_symmetric_with_ones_on_the_diagonal():
    """A self-comparison is symmetric, and its diagonal is exactly 1 in float32."""
    result = CKA(mlp()).compare(batches_of(16, 16), progress=False)
    torch.testing.assert_close(result.matrix, result.matrix.T)
    assert torch.equal(result.matrix.diagonal(), torch.ones(3))
    assert result.standard_error.diagonal().max() < 1e-6
    assert result.standard_error[0, 2] > 0


def test_two_equal_models_give_the_result_of_a_self_comparison():
    """A copy of the model as the second one gives the result of a self-comparison."""
    batches = batches_of(16, 16)
    once = CKA(mlp(0)).compare(batches, progress=False)
    twice = CKA(mlp(0), mlp(0)).compare(batches, progress=False)
    torch.testing.assert_close(once.matrix, twice.matrix)
    torch.testing.assert_close(once.standard_error, twice.standard_error)


def test_self_comparison_runs_the_model_once_per_batch(count_passes):
    """A self-comparison runs the model once per batch, with model2=None or the same object."""
    for second in (False, True):
        model = mlp()
        passes = count_passes(model)
        CKA(model, model if second else None).compare(batches_of(8, 8), progress=False)
        assert passes == [2, 8, 8]


@pytest.mark.parametrize(
    "sizes",
    [(64,), (70,), (66,), (10,)],
    ids=["even", "remainder", "small-remainder", "less-than-a-part"],
)
def test_hsic_batch_size_gives_the_result_of_smaller_batches(sizes):
    """With hsic_batch_size, a remainder of fewer than 4 samples is added to the last part."""
    data = batches_of(*sizes)[0]
    parts = list(data.split(16))
    if len(parts[-1]) < 4:
        parts[-2:] = [torch.cat(parts[-2:])]
    split = CKA(mlp(), hsic_batch_size=16).compare([data], progress=False)
    plain = CKA(mlp()).compare(parts, progress=False)
    torch.testing.assert_close(split.matrix, plain.matrix)
    torch.testing.assert_close(split.standard_error, plain.standard_error, equal_nan=True)
    assert (split.samples, split.batches) == (sizes[0], 1)


@pytest.mark.parametrize("kernel", ["rbf", RBF(0.5), lambda rows: (rows @ rows.T).pow(2)])
def test_other_kernels_give_the_result_of_cka_from_features(kernel):
    """An RBF and a polynomial kernel give the same result in a model as from its features."""
    model, batches = mlp().eval(), batches_of(16)
    outputs = cloned_outputs(model, batches)
    result = CKA(model, kernel=kernel).compare(batches, progress=False)
    expected = cka_from_features(outputs["0"][0], outputs["2"][0], kernel=kernel)
    assert float(result.matrix[0, 2]) == pytest.approx(float(expected), abs=1e-5)


def test_biased_estimator_matches_its_formula():
    """The biased estimator is HSIC of Gretton et al. 2005, summed over minibatches."""
    model, batches = mlp().eval(), batches_of(16, 12)
    outputs = cloned_outputs(model, batches)
    result = CKA(model, estimator="biased").compare(batches, progress=False)
    expected = minibatch_cka(outputs["0"], outputs["2"], hsic=gretton_hsic)
    assert float(result.matrix[0, 2]) == pytest.approx(expected, abs=1e-6)


def test_reference_gram_matrix_matches_its_definition():
    """The tests' slow reference for Gram matrices agrees with numbers computed by hand."""
    rows = torch.tensor([[1.0], [2.0], [6.0]])
    assert linear(rows).tolist() == [[4.0, 2.0, -6.0], [2.0, 1.0, -3.0], [-6.0, -3.0, 9.0]]
