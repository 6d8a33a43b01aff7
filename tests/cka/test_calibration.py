"""The calibration of a comparison equals the permutation test of each pair in plain float64."""

from __future__ import annotations

import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import cloned_outputs, gretton_hsic, linear, song_hsic

from cka import CKA, CKAResult, SettingError, compare_many


def reference(outputs1, outputs2, hsic, count, seed=0):
    """Return CKA (L1, L2) and its permuted values (N, L1, L2), one pair at a time."""
    generator = torch.Generator().manual_seed(seed)
    grams1, grams2 = (
        [[linear(batch) for batch in batches] for batches in outputs.values()]
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
def test_calibration_of_a_self_comparison_permutes_one_side(estimator):
    """In a self-comparison the columns are permuted and the rows are not."""
    model, batches = mlp(0).double(), [batch.double() for batch in batches_of(12)]
    result = CKA(model, device="cpu", estimator=estimator).compare(batches, progress=False, null=9)
    outputs = cloned_outputs(model, batches)
    assert_calibrated(result.calibration, *reference(outputs, outputs, song_hsic, 9))


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


def test_calibration_survives_a_file_and_a_selection(tmp_path):
    """A saved part of a result has the calibration of its pairs, and so has the table."""
    pytest.importorskip("pandas")
    result = CKA(mlp(0), device="cpu").compare(batches_of(12), progress=False, null=9)
    result["0", :].save(tmp_path / "part.json")
    part = CKAResult.load(tmp_path / "part.json")
    assert torch.equal(part.calibration.p_best, result.calibration.p_best[:1])
    table = part.to_dataframe(long=True)
    assert list(table.columns) == ["cka", "standard_error", "z", "p", "p_best"]
    assert table["p"].tolist() == part.calibration.p.flatten().tolist()


@pytest.mark.parametrize("null", [0, True, 1.5])
def test_number_of_permutations_must_be_positive(null):
    """An error says what to write."""
    with pytest.raises(SettingError, match=r"write e\.g\. 200"):
        CKA(mlp(0), device="cpu").compare(batches_of(8), progress=False, null=null)
