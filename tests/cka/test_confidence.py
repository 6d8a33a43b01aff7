"""The bootstrap of a comparison equals that of its definition in plain float64."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from cka_nets import Constant, batches_of, mlp
from cka_ranks import linear_network
from cka_reference import cloned_outputs, gretton_hsic, linear, song_hsic

from cka import CKA, RBF, CKAResult, CKAWarning, SettingError, compare_many


def weighted_mean_over_sets(gram_x, gram_y, drawn):
    """Return the mean of Song et al. 2012, eq. 5, over sets of four samples, by their weights."""
    weights = torch.bincount(drawn, minlength=len(gram_x)).double().tolist()
    x, y = gram_x.tolist(), gram_y.tolist()
    total = of_weights = 0.0
    for i, j, q, r in permutations([at for at, weight in enumerate(weights) if weight], 4):
        weight = weights[i] * weights[j] * weights[q] * weights[r]
        total += weight * x[i][j] * (y[i][j] + y[q][r] - 2 * y[i][q])
        of_weights += weight
    return total / of_weights


def repeated(gram_x, gram_y, drawn):
    """Return the biased HSIC of matrices with repeated rows and columns."""
    return gretton_hsic(gram_x[drawn][:, drawn], gram_y[drawn][:, drawn])


def draw(size, count, generator, least):
    """Return N lists of samples with enough different ones; others are drawn again, in rounds."""
    found = [None] * count
    while None in found:
        missing = [at for at, one in enumerate(found) if one is None]
        drawn = torch.randint(size, (len(missing), size), generator=generator)
        for at, one in zip(missing, drawn, strict=True):
            if len(one.unique()) >= least:
                found[at] = one
    return found


RESAMPLED = {"unbiased": weighted_mean_over_sets, "biased": repeated}
AS_THEY_ARE = {"unbiased": song_hsic, "biased": gretton_hsic}


def reference(outputs1, outputs2, count, estimator="unbiased", seed=0, gram=linear):
    """Return CKA (L1, L2) and its values in N resamples (N, L1, L2), one pair at a time."""
    generator = torch.Generator().manual_seed(seed)
    grams1, grams2 = (
        [[gram(batch) for batch in batches] for batches in outputs.values()]
        for outputs in (outputs1, outputs2)
    )
    least = {"unbiased": 4, "biased": 2}[estimator]
    drawn = [draw(len(one), count, generator, least) for one in grams1[0]]

    def total(one, other, number):
        return sum(
            RESAMPLED[estimator](x, y, of_batch[number])
            if number >= 0
            else AS_THEY_ARE[estimator](x, y)
            for x, y, of_batch in zip(one, other, drawn, strict=True)
        )

    values = torch.zeros(count + 1, len(grams1), len(grams2), dtype=torch.float64)
    for number in range(-1, count):
        own1 = [total(one, one, number) for one in grams1]
        own2 = [total(other, other, number) for other in grams2]
        for row, one in enumerate(grams1):
            for column, other in enumerate(grams2):
                scale = (own1[row] * own2[column]) ** 0.5
                values[number + 1, row, column] = total(one, other, number) / scale
    return values[0], values[1:]


def quantile(values, share):
    """Return a quantile of a list of numbers, between the two nearest of which is interpolated."""
    position = share * (len(values) - 1)
    low = int(position)
    first, second = sorted(values)[low : low + 2]
    return first + (position - low) * (second - first)


def assert_confidence(found, cka, values):
    """Compare every figure with its definition, in loops."""
    assert found.resamples == len(values)
    torch.testing.assert_close(found.standard_error, values.std(0), rtol=0, atol=1e-9)
    for row in range(cka.shape[0]):
        for column in range(cka.shape[1]):
            value, some = float(cka[row, column]), values[:, row, column].tolist()
            low = min(1.0, 2 * value - quantile(some, 0.975))
            high = min(1.0, 2 * value - quantile(some, 0.025))
            assert float(found.low[row, column]) == pytest.approx(low, abs=1e-9)
            assert float(found.high[row, column]) == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_confidence_of_two_models_is_the_bootstrap_in_float64(estimator):
    """Errors and intervals of batches of two sizes are those of the definition."""
    models = mlp(0).double(), mlp(1).double()
    batches = [batch.double() for batch in batches_of(9, 6)]
    result = CKA(*models, "*", ["0", "2"], device="cpu", estimator=estimator).compare(
        batches, progress=False, bootstrap=7
    )
    outputs = [cloned_outputs(model, batches) for model in models]
    del outputs[1]["1"]
    assert_confidence(result.confidence, *reference(*outputs, 7, estimator))


@pytest.mark.parametrize("estimator", ["unbiased", "exact"])
def test_confidence_of_a_self_comparison_is_the_bootstrap_in_float64(estimator):
    """It is that of the definition, symmetric, and certain on the diagonal."""
    model, batches = mlp(0).double(), [batch.double() for batch in batches_of(8)]
    result = CKA(model, device="cpu", estimator=estimator).compare(
        batches, progress=False, bootstrap=7
    )
    outputs = cloned_outputs(model, batches)
    assert_confidence(result.confidence, *reference(outputs, outputs, 7))
    assert torch.equal(result.confidence.low, result.confidence.low.T)
    assert result.confidence.standard_error.diagonal().max() < 1e-12


def test_confidence_of_many_models_is_that_of_each_pair():
    """compare_many resamples like a CKA of the pair, with and without permutations."""
    models, batches = {str(seed): mlp(seed) for seed in range(3)}, batches_of(10, 10)

    def settings():
        return {"progress": False, "generator": torch.Generator().manual_seed(5)}

    many = compare_many(models, batches, device="cpu", bootstrap=9, null=9, **settings())
    for (one, other), found in many.items():
        pair = CKA(models[one], models[other], device="cpu")
        alone = pair.compare(batches, bootstrap=9, **settings()).confidence
        assert torch.equal(found.confidence.low, alone.low)
        assert torch.equal(found.confidence.standard_error, alone.standard_error)
        calibrated = pair.compare(batches, null=9, **settings()).calibration
        assert torch.equal(found.calibration.z, calibrated.z)


def test_bootstrap_draws_from_the_parts_of_a_batch():
    """With hsic_batch_size every part is resampled within itself."""
    models, (batch,) = (mlp(0).double(), mlp(1).double()), batches_of(14)
    result = CKA(*models, device="cpu", hsic_batch_size=7).compare(
        [batch.double()], progress=False, bootstrap=5
    )
    outputs = [
        {label: one.split(7) for label, (one,) in cloned_outputs(model, [batch.double()]).items()}
        for model in models
    ]
    assert_confidence(result.confidence, *reference(*outputs, 5))


@pytest.mark.parametrize("kernel", [RBF(0.5), lambda rows: (rows @ rows.T + 1) ** 2])
def test_bootstrap_keeps_the_matrix_of_any_kernel(kernel):
    """A kernel is applied to the samples as they are, and its matrix is resampled."""
    models, (batch,) = (mlp(0).double(), mlp(1).double()), batches_of(8)
    result = CKA(*models, device="cpu", kernel=kernel).compare(
        [batch.double()], progress=False, bootstrap=5
    )
    outputs = [cloned_outputs(model, [batch.double()]) for model in models]
    assert_confidence(result.confidence, *reference(*outputs, 5, gram=kernel))


def test_bootstrap_leaves_padding_out():
    """The resampled features are those of tokens without padding."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 4)).double() for _ in range(2)]
    mask = torch.ones(8, 5).tril(2)
    batch = {"input": torch.randn(8, 5, 6).double(), "attention_mask": mask}
    result = CKA(*models, device="cpu", pooling="mean", feed=lambda m, b: m(b["input"])).compare(
        [batch], progress=False, bootstrap=5
    )
    means = [
        {"0": [(model(batch["input"]).detach() * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]]}
        for model in models
    ]
    assert_confidence(result.confidence, *reference(*means, 5))


def test_batches_of_another_scale_are_resampled_by_their_size():
    """Batches whose Gram matrices have exponents add up to the definition, for both models."""
    first, second = batches_of(8, 7)
    batches = [first * 2.0**-90, second * 2.0**-88]
    models = linear_network(), linear_network()
    models[1].load_state_dict({name: -one for name, one in models[1].state_dict().items()})
    result = CKA(*models, device="cpu").compare(batches, progress=False, bootstrap=5)
    outputs = [
        cloned_outputs(model.double(), [batch.double() * 2.0**89 for batch in batches])
        for model in models
    ]
    values = reference(*outputs, 5)[1]
    torch.testing.assert_close(result.confidence.standard_error, values.std(0), rtol=0, atol=1e-6)


def test_constant_layer_has_no_interval():
    """A constant layer is NaN in every figure, and other layers are not."""
    (batch,) = batches_of(12)
    with pytest.warns(CKAWarning, match="NaN"):
        result = CKA(Constant(), mlp(0), device="cpu").compare([batch], progress=False, bootstrap=9)
    for name in ("standard_error", "low", "high"):
        found = getattr(result.confidence, name)
        assert found[result.model1_layers.index("constant")].isnan().all()
        assert not found[result.model1_layers.index("fc")].isnan().any()


def test_batches_of_four_samples_have_one_resample():
    """An unbiased HSIC needs four different samples, so a batch of four is drawn as it is."""
    result = CKA(mlp(0), mlp(1), device="cpu").compare(batches_of(4), progress=False, bootstrap=5)
    assert result.confidence.standard_error.max() < 1e-9
    torch.testing.assert_close(result.confidence.low.float(), result.matrix)


class OfEachDataSet(torch.nn.Module):
    """Runs one network on several data sets side by side: each of its rows is one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.then = mlp(0)[0], torch.nn.ReLU()

    def forward(self, x):
        for data_set in x.split(6, 1):
            self.then(self.first(data_set))


@pytest.mark.slow
def test_interval_has_the_share_of_true_values_that_it_states():
    """In 100 data sets, about 95 intervals have the CKA of a very large one."""
    model = OfEachDataSet()
    generator = torch.Generator().manual_seed(1)
    large = [torch.randn(500, 6, generator=generator) for _ in range(40)]
    cka = CKA(model, model, "first*", "then*", device="cpu", hsic_batch_size=50)
    true = cka.compare(large, progress=False)["first", "then"]
    # One comparison of all data sets: a pair of rows of different ones is not looked at.
    batches = [torch.randn(24, 600, generator=generator) for _ in range(2)]
    cka = CKA(model, model, "first*", "then*", device="cpu")
    found = cka.compare(batches, progress=False, bootstrap=200)
    assert (len(found.model1_layers), len(found.model2_layers)) == (100, 100)
    low, high = found.confidence.low.diagonal(), found.confidence.high.diagonal()
    assert 88 <= int(((low <= true) & (true <= high)).sum()) <= 100


def test_confidence_survives_a_file_and_a_selection(tmp_path):
    """A saved part of a result has the intervals of its pairs, and so has the table."""
    pytest.importorskip("pandas")
    result = CKA(mlp(0), device="cpu").compare(batches_of(12), progress=False, bootstrap=9)
    assert "95% intervals by 9 resamples" in str(result)
    result["0", :].save(tmp_path / "part.json")
    part = CKAResult.load(tmp_path / "part.json")
    assert torch.equal(part.confidence.low, result.confidence.low[:1])
    table = part.to_dataframe()
    assert list(table.columns) == ["cka", "standard_error", "low", "high", "bootstrap_error"]
    assert table["high"].tolist() == part.confidence.high.flatten().tolist()


@pytest.mark.parametrize("bootstrap", [1, 0, -1, True, 1.5])
def test_number_of_resamples_must_be_at_least_two(bootstrap):
    """An error says what to write."""
    with pytest.raises(SettingError, match=r"at least 2.*write e\.g\. 200"):
        CKA(mlp(0), device="cpu").compare(batches_of(8), progress=False, bootstrap=bootstrap)


def test_sampled_neurons_have_no_bootstrap():
    """Its correction needs the features of each resample, and the error says what to do."""
    with pytest.raises(SettingError, match="use estimator='unbiased'"):
        CKA(mlp(0), device="cpu", estimator="sampled_neurons").compare(
            batches_of(8), progress=False, bootstrap=9
        )
