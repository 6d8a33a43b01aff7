"""Features on disk: models that do not fit together are compared one at a time."""

from __future__ import annotations

import pytest
import torch
from cka_nets import Aliases, batches_of, mlp
from cka_reference import minibatch_cka
from torch import nn

from cka import (
    CKA,
    CKNNA,
    CKAWarning,
    DoesNotFitError,
    InputError,
    MutualKNN,
    SettingError,
    StoredFeatures,
    cka_from_features,
    compare_features,
    compare_many,
    save_features,
)
from pytest_cka_memory import MemoryProbe


def saved(folder, model, batches, **settings):
    return save_features(model, batches, folder, progress=False, device="cpu", **settings)


def test_stored_features_give_the_result_of_a_comparison(tmp_path):
    """Matrix, errors, p-values and intervals are those of both models in one pass."""
    one, other, batches = mlp(0), Aliases(), batches_of(16, 16, 12)
    settings = {"null": 20, "bootstrap": 20}
    expected = CKA(one, other, device="cpu").compare(batches, progress=False, **settings)
    found = compare_features(
        saved(tmp_path / "one", one, batches), saved(tmp_path / "other", other, batches), **settings
    )
    assert found.model1_layers == expected.model1_layers
    assert found.model2_layers == expected.model2_layers
    assert (found.samples, found.batches) == (44, 3)
    torch.testing.assert_close(found.matrix, expected.matrix)
    torch.testing.assert_close(found.standard_error, expected.standard_error)
    torch.testing.assert_close(found.calibration.p_best, expected.calibration.p_best)
    torch.testing.assert_close(found.confidence.low, expected.confidence.low)


def test_result_of_folders_has_the_name_of_a_function_as_kernel(tmp_path):
    """It is that of the function, as in a comparison of the models, and not its address."""

    def outer_product(rows):
        return rows @ rows.T

    model, batches = mlp(), batches_of(16)
    saved(tmp_path, model, batches)
    found = compare_features(tmp_path, tmp_path, kernel=outer_product)
    expected = CKA(model, device="cpu", kernel=outer_product).compare(batches, progress=False)
    assert found.kernel == expected.kernel == "outer_product"


def test_half_of_the_space_costs_three_digits(tmp_path):
    """bfloat16 rounds features by up to 0.4 %, and CKA of these networks by less than 1e-3."""
    model, batches = mlp(), batches_of(64, 64)
    exact = CKA(model, device="cpu").compare(batches, progress=False).matrix
    folder = tmp_path / "half"
    saved(folder, model, batches, dtype="bfloat16")
    assert 0 < (compare_features(folder, folder).matrix - exact).abs().max() < 1e-3
    assert sum(file.stat().st_size for file in folder.glob("*.bin")) == 2 * 128 * (8 + 8 + 5)


def test_interrupted_run_goes_on_with_the_first_missing_batch(tmp_path, count_passes):
    """After Ctrl-C in the third batch, the next run stores that one and the rest."""
    model, batches = mlp(), batches_of(8, 8, 8, 8)
    passes = count_passes(model)

    def interrupted():
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, model, interrupted())
    assert passes == [2, 8, 8]
    with pytest.raises(InputError, match=r"no complete features .*; run save_features"):
        StoredFeatures.load(tmp_path)
    passes.clear()
    features = saved(tmp_path, model, batches)
    assert passes == [2, 8, 8]
    expected = CKA(model, device="cpu").compare(batches, progress=False)
    torch.testing.assert_close(compare_features(features, features).matrix, expected.matrix)
    assert saved(tmp_path, lambda: pytest.fail("loaded again"), batches).batch_sizes == [8] * 4


def test_standardised_features_are_those_of_all_samples(tmp_path):
    """With zscore=True each feature has standard deviation 1 over all samples, constants are 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 5))
    scale = torch.tensor([1000.0, 1, 1, 1e-3, 1, 0])
    batches = [batch * scale + 5 for batch in batches_of(16, 20)]
    folder = saved(tmp_path, model, batches)
    whole = [torch.cat([m(b).detach() for b in batches]).double() for m in (model[0], model)]
    std = [each.std(0, correction=0) for each in whole]
    std[0][5] = torch.inf
    parts = [(each / by).split([16, 20]) for each, by in zip(whole, std, strict=True)]
    found = compare_features(folder, folder, zscore=True)
    assert found["0", "1"] == pytest.approx(minibatch_cka(*map(list, parts)), abs=1e-5)
    assert found["0", "1"] != pytest.approx(compare_features(folder, folder)["0", "1"], abs=1e-2)


def test_features_of_a_layer_are_read_as_a_tensor(tmp_path):
    """The features of one layer can be given to other libraries."""
    model, batches = mlp(), batches_of(8, 8)
    features = saved(tmp_path, model, batches)
    with torch.no_grad():
        torch.testing.assert_close(features["2"], model(torch.cat(batches)))
    assert len(features) == 16
    assert float(cka_from_features(features["0"], features["2"])) > 0
    with pytest.raises(InputError, match="has no layer '9'; its first layers are"):
        features["9"]


def test_features_of_other_batches_are_an_error(tmp_path):
    """Folders from other batches cannot be compared."""
    one = saved(tmp_path / "one", mlp(), batches_of(8, 8))
    other = saved(tmp_path / "other", mlp(), batches_of(16))
    with pytest.raises(InputError, match=r"have different sizes: \[8, 8\] and \[16\] samples"):
        compare_features(one, other)
    with pytest.raises(SettingError, match="'sampled_neurons' for stored features"):
        compare_features(one, one, estimator="sampled_neurons")
    with pytest.raises(SettingError, match="does not support estimator='unbiased'"):
        compare_features(one, one, measure="mutual_knn", estimator="unbiased")
    with pytest.raises(SettingError, match="cannot use 'float16' as dtype; write 'float32'"):
        saved(tmp_path / "half", mlp(), [], dtype="float16")


def test_left_out_layers_are_named(tmp_path):
    """A layer without samples is named by a warning, as in a comparison."""
    with pytest.warns(CKAWarning, match="no axis with one entry for each sample.*: 0"):
        features = save_features(
            mlp(), batches_of(8), tmp_path, progress=False, device="cpu",
            pick=lambda name, output: None if name == "0" else output,
        )  # fmt: skip
    assert features.layers == ["1", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [{"estimator": "exact"}, {"measure": "mutual_knn"}, {"measure": CKNNA(k=5)}],
    ids=["exact", "mutual_knn", "cknna"],
)
def test_estimates_over_all_samples_are_those_of_a_comparison(tmp_path, settings, dtype):
    """The exact estimate and measures by neighbours of stored features are those of the models."""
    one, other, batches = mlp(0), mlp(1), batches_of(16, 16, 3)
    cka = CKA(one, other, device="cpu", **settings)
    expected = cka.compare(batches, progress=False, null=9)
    folders = [
        saved(tmp_path / "one", one, batches, dtype=dtype),
        saved(tmp_path / "other", other, batches, dtype=dtype),
    ]
    found = compare_features(*folders, **settings, null=9)
    assert (found.samples, found.measure, found.estimator) == (35, expected.measure, "exact")
    digits = {"rtol": 0, "atol": 1e-6 if dtype == "float32" else 2e-2}
    torch.testing.assert_close(found.matrix, expected.matrix, **digits)
    torch.testing.assert_close(found.calibration.mean, expected.calibration.mean, **digits)
    with pytest.raises(DoesNotFitError, match="exact estimator needs"):
        compare_features(*folders, **settings, memory_limit_bytes=1000)


@pytest.mark.parametrize("pairs", ["all", "first"])
def test_several_stored_models_are_compared_in_one_pass(tmp_path, pairs):
    """compare_many of folders gives the results of compare_many of the models."""
    models, batches = {name: mlp(at) for at, name in enumerate("abc")}, batches_of(16, 12, 2)
    expected = compare_many(models, batches[:2], pairs=pairs, progress=False, device="cpu", null=9)
    stored = {name: saved(tmp_path / name, model, batches) for name, model in models.items()}
    stored["b"] = stored["b"].folder
    with pytest.warns(
        CKAWarning,
        match="fewer than 4 samples are left out; their numbers of samples: 2",
    ):
        found = compare_many(stored, pairs=pairs, null=9)
    assert list(found) == list(expected)
    for key, result in found.items():
        torch.testing.assert_close(result.matrix, expected[key].matrix)
        torch.testing.assert_close(result.calibration.p, expected[key].calibration.p)
        assert (result.model1_name, result.model2_name) == key


def test_wrong_arguments_for_several_stored_models_are_errors(tmp_path):
    """Models and folders cannot be mixed, and folders have their own batches."""
    stored = saved(tmp_path, mlp(), batches_of(8))
    with pytest.raises(InputError, match="'b' is not stored; save its features with save_features"):
        compare_many({"a": stored, "b": mlp()})
    with pytest.raises(InputError, match="have their own batches and layers; omit"):
        compare_many({"a": stored, "b": stored}, batches_of(8))
    with pytest.raises(SettingError, match=r"'pooling'; use only the settings of compare_features"):
        compare_many({"a": stored, "b": stored}, pooling="mean")
    with pytest.raises(InputError, match="needs a data loader"):
        compare_many({"a": mlp(0), "b": mlp(1)})


def test_stored_padding_has_no_exact_estimate(tmp_path):
    """Padding has the mean of its batch, which is not that of all samples."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    mask = torch.ones(8, 5, dtype=torch.long)
    mask[0, 3:] = 0
    batch = {"ids": torch.randint(0, 9, (8, 5)), "attention_mask": mask}
    run = {"feed": lambda model, batch: model(batch["ids"])}
    folder = saved(tmp_path / "flat", model, [batch], **run)
    expected = CKA(model, device="cpu", **run).compare([batch], progress=False)
    torch.testing.assert_close(compare_features(folder, folder).matrix, expected.matrix)
    with pytest.raises(InputError, match=r"include padding tokens \(0, 1\).*pooling='mean'"):
        compare_features(folder, folder, estimator="exact")
    pooled = saved(tmp_path / "mean", model, [batch], pooling="mean", **run)
    assert compare_features(pooled, pooled, measure=MutualKNN(2))["0", "0"] == 1


@pytest.mark.native
def test_memory_is_that_of_one_model_and_of_gram_matrices(tmp_path):
    """Saving takes the memory of a forward pass; comparing takes a batch's Gram matrices and the
    features of a layer. Neither has two models.
    """
    width, n = 512, 64
    models = [nn.Sequential(*(nn.Linear(width, width) for _ in range(8))) for _ in range(2)]
    weights = 8 * width * width * 4
    batches = batches_of(n, n, features=(width,))
    probe = MemoryProbe("cpu")
    for number, model in enumerate(models):
        with probe.measure() as region:
            saved(tmp_path / str(number), model, batches)
        assert region.peak_increase_bytes < weights / 8
    with probe.measure() as region:
        compare_features(tmp_path / "0", tmp_path / "1")
    grams = 16 * n * n * 4
    assert region.peak_increase_bytes < 2 * grams + 8 * 2**20
