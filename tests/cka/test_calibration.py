"""The calibration of a comparison equals the permutation test of each pair in plain float64."""

from __future__ import annotations

import pytest
import torch
from cka_nets import Constant, batches_of, mlp
from cka_ranks import linear_network
from cka_reference import cloned_outputs, gretton_hsic, linear, song_hsic

from cka import CKA, RBF, CKAResult, CKAWarning, SettingError, compare_many


def reference(outputs1, outputs2, hsic, count, seed=0, gram=linear):
    """Return CKA (L1, L2) and its permuted values (N, L1, L2), one pair at a time."""
    generator = torch.Generator().manual_seed(seed)
    grams1, grams2 = (
        [[gram(batch) for batch in batches] for batches in outputs.values()]
        for outputs in (outputs1, outputs2)
    )
    orders = [
        [torch.randperm(len(gram), generator=generator) for _ in range(count)] for gram in grams1[0]
    ]
    values = torch.zeros(count + 1, len(grams1), len(grams2), dtype=torch.float64)
    for row, one in enumerate(grams1):
        for column, other in enumerate(grams2):
            own = sum(hsic(x, x) for x in one) * sum(hsic(y, y) for y in other)
            for number in range(count + 1):
                total = 0.0
                for x, y, order in zip(one, other, orders, strict=True):
                    at = order[number - 1]
                    total += hsic(x, y[at][:, at] if number else y)
                values[number, row, column] = total / own**0.5
    return values[0], values[1:]


def assert_calibrated(found, cka, permuted):
    """Compare every figure with its definition, in loops."""
    count = 1 + len(permuted)
    torch.testing.assert_close(found.mean, permuted.mean(0), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.spread, permuted.std(0), rtol=0, atol=1e-9)
    z = (cka - permuted.mean(0)) / permuted.std(0)
    torch.testing.assert_close(found.z, z, rtol=1e-9, atol=1e-9)
    every = torch.cat([cka[None], permuted])
    standard = (every - every.mean(0)) / every.std(0)
    for row in range(cka.shape[0]):
        for column in range(cka.shape[1]):
            value = cka[row, column] - 1e-9
            higher = sum(bool(one[row, column] >= value) for one in permuted)
            assert found.p[row, column] == pytest.approx((1 + higher) / count, abs=1e-9)
            value = standard[0, row, column] - 1e-9
            higher = sum(bool(one.max() >= value) for one in standard[1:])
            assert found.p_best[row, column] == pytest.approx((1 + higher) / count, abs=1e-9)


@pytest.mark.parametrize(("estimator", "hsic"), [("unbiased", song_hsic), ("biased", gretton_hsic)])
def test_calibration_of_two_models_is_the_permutation_test_in_float64(estimator, hsic):
    """Mean, spread, z, p and p_best of batches of two sizes are those of the definition."""
    models = mlp(0).double(), mlp(1).double()
    batches = [batch.double() for batch in batches_of(9, 7)]
    result = CKA(*models, device="cpu", estimator=estimator).compare(
        batches, progress=False, null=19
    )
    outputs = [cloned_outputs(model, batches) for model in models]
    assert_calibrated(result.calibration, *reference(*outputs, hsic, 19))


@pytest.mark.parametrize("estimator", ["unbiased", "exact"])
def test_calibration_of_a_self_comparison_is_symmetric(estimator):
    """In a self-comparison the later layer of each pair is permuted and the earlier one is not."""
    model, batches = mlp(0).double(), [batch.double() for batch in batches_of(12)]
    result = CKA(model, device="cpu", estimator=estimator).compare(batches, progress=False, null=9)
    outputs = cloned_outputs(model, batches)
    cka, permuted = reference(outputs, outputs, song_hsic, 9)
    upper = permuted.triu()
    assert_calibrated(result.calibration, cka, upper + upper.triu(1).mT)
    assert torch.equal(result.calibration.z, result.calibration.z.T)


def test_calibration_of_many_models_is_that_of_each_pair():
    """compare_many permutes like a CKA of the pair with a generator in the same state."""
    models, batches = {str(seed): mlp(seed) for seed in range(3)}, batches_of(10, 10)

    def settings():
        return {"progress": False, "null": 9, "generator": torch.Generator().manual_seed(5)}

    many = compare_many(models, batches, device="cpu", **settings())
    for (one, other), found in many.items():
        pair = CKA(models[one], models[other], device="cpu").compare(batches, **settings())
        assert torch.equal(found.calibration.z, pair.calibration.z)
        assert torch.equal(found.calibration.p_best, pair.calibration.p_best)


def outputs_in_parts(outputs, size):
    """Return the outputs with every batch split into parts of this size."""
    return {
        label: [part for batch in batches for part in batch.split(size)]
        for label, batches in outputs.items()
    }


def test_calibration_permutes_the_parts_of_a_batch():
    """With hsic_batch_size every part is permuted within itself."""
    models = mlp(0).double(), mlp(1).double()
    batches = [batch.double() for batch in batches_of(16, 8)]
    result = CKA(*models, device="cpu", hsic_batch_size=8).compare(batches, progress=False, null=9)
    outputs = [outputs_in_parts(cloned_outputs(model, batches), 8) for model in models]
    assert_calibrated(result.calibration, *reference(*outputs, song_hsic, 9))


@pytest.mark.parametrize("kernel", [RBF(0.5), lambda rows: (rows @ rows.T + 1) ** 2])
def test_calibration_permutes_the_matrix_of_any_kernel(kernel):
    """Samples are permuted, so any kernel's matrix is permuted in rows and columns."""
    models, (batch,) = (mlp(0).double(), mlp(1).double()), batches_of(12)
    result = CKA(*models, device="cpu", kernel=kernel).compare(
        [batch.double()], progress=False, null=9
    )
    outputs = [cloned_outputs(model, [batch.double()]) for model in models]
    chance = reference(*outputs, song_hsic, 9, gram=kernel)
    assert_calibrated(result.calibration, *chance)


def test_calibration_leaves_padding_out():
    """The values by chance are those of tokens without padding."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 4)).double() for _ in range(2)]
    mask = torch.ones(10, 5).tril(2)
    batch = {"input": torch.randn(10, 5, 6).double(), "attention_mask": mask}
    result = CKA(*models, device="cpu", pooling="mean", feed=lambda m, b: m(b["input"])).compare(
        [batch], progress=False, null=9
    )
    means = [
        {"0": [(model(batch["input"]).detach() * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]]}
        for model in models
    ]
    assert_calibrated(result.calibration, *reference(*means, song_hsic, 9))


class Branches(torch.nn.Module):
    """Two layers that return one tensor, or, for batches of another size, two tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = torch.nn.Linear(6, 5), torch.nn.ReLU()

    def forward(self, x):
        x = self.one(x)
        self.other.__class__ = torch.nn.ReLU if len(x) == 8 else torch.nn.Identity
        return self.other(x)


@pytest.mark.parametrize("sizes", [(9, 9, 8), (8, 9)])
def test_layers_that_share_an_output_in_some_batches_only_are_calibrated_separately(sizes):
    """Sums that two layers shared in the first batches are correct if a later one differs."""
    model, batches = Branches().double(), [batch.double() for batch in batches_of(*sizes)]
    result = CKA(model, mlp(1).double(), device="cpu").compare(batches, progress=False, null=9)
    outputs = [cloned_outputs(one, batches) for one in (model, mlp(1).double())]
    assert_calibrated(result.calibration, *reference(*outputs, song_hsic, 9))


def test_batches_of_another_scale_are_calibrated_by_their_size():
    """Batches whose Gram matrices have exponents add up to the definition."""
    model = linear_network()
    first, second = batches_of(8, 9)
    batches = [first * 2.0**-90, second * 2.0**-88]
    result = CKA(model, device="cpu").compare(batches, progress=False, null=9)
    outputs = cloned_outputs(model.double(), [batch.double() * 2.0**89 for batch in batches])
    permuted = reference(outputs, outputs, song_hsic, 9)[1].triu()
    expected = (permuted + permuted.triu(1).mT).mean(0)
    torch.testing.assert_close(result.calibration.mean, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_layers_that_are_zero_in_one_batch_are_calibrated_by_the_other(zero):
    """A batch whose outputs are all zero adds nothing, whether it is the first or the last."""
    model, batches = linear_network().double(), [batch.double() for batch in batches_of(8, 9)]
    batches[zero].zero_()
    result = CKA(model, mlp(1).double(), device="cpu").compare(batches, progress=False, null=9)
    outputs = [cloned_outputs(one, batches) for one in (model, mlp(1).double())]
    assert_calibrated(result.calibration, *reference(*outputs, song_hsic, 9))


def test_constant_layer_has_no_p_value_and_does_not_change_those_of_others():
    """A constant layer is NaN in every figure, and is no candidate for the best pair."""
    (batch,) = batches_of(12)
    with pytest.warns(CKAWarning, match="NaN"):
        both = CKA(Constant(), mlp(0), device="cpu").compare([batch], progress=False, null=9)
    alone = CKA(Constant(), mlp(0), "fc", device="cpu").compare([batch], progress=False, null=9)
    for name in ("mean", "spread", "z", "p", "p_best"):
        found = getattr(both.calibration, name)
        assert found[both.model1_layers.index("constant")].isnan().all()
        torch.testing.assert_close(found[:1], getattr(alone.calibration, name), rtol=0, atol=1e-9)


def test_calibration_survives_a_file_and_a_selection(tmp_path):
    """A saved part of a result has the calibration of its pairs, and so has the table."""
    pytest.importorskip("pandas")
    result = CKA(mlp(0), device="cpu").compare(batches_of(12), progress=False, null=9)
    result["0", :].save(tmp_path / "part.json")
    part = CKAResult.load(tmp_path / "part.json")
    assert torch.equal(part.calibration.p_best, result.calibration.p_best[:1])
    table = part.to_dataframe()
    assert list(table.columns) == ["cka", "standard_error", "z", "p", "p_best"]
    assert table["p"].tolist() == part.calibration.p.flatten().tolist()
    assert list(part.to_dataframe(long=False).columns) == ["0", "1", "2"]


@pytest.mark.parametrize("null", [0, -1, True, 1.5])
def test_number_of_permutations_must_be_positive(null):
    """An error says what to write."""
    with pytest.raises(SettingError, match=r"write e\.g\. 200"):
        CKA(mlp(0), device="cpu").compare(batches_of(8), progress=False, null=null)
