"""The permutation distribution: the values themselves, p-values, and wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch

from cka import RBF, InputError, SettingError, cka_from_features, null_distribution


def pair(samples=24, width=5, seed=0):
    """Return independent features of the same samples."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, width, generator=generator, dtype=torch.float64)
    return x, y


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
@pytest.mark.parametrize("kernel", ["linear", RBF(0.5), lambda x: (x @ x.T + 1) ** 2])
def test_values_are_those_of_permuted_features(kernel, estimator):
    """Values by chance equal CKA that is computed again from permuted features."""
    x, y = pair()
    y = y + x
    found = null_distribution(x, y, n=6, kernel=kernel, estimator=estimator, seed=3)
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(len(y), generator=generator) for _ in range(6)]
    settings = {"kernel": kernel, "estimator": estimator}
    expected = torch.stack([cka_from_features(x, y[order], **settings) for order in orders])
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-12)
    assert found.value == pytest.approx(float(cka_from_features(x, y, **settings)), abs=1e-12)


def test_p_value_of_all_permutations_is_exact():
    """With four samples, the p-value is the share of the 24 permutations at least as similar."""
    x, y = pair(samples=4, width=2, seed=1)
    found = null_distribution(x, y, n=20_000)
    orders = torch.cartesian_prod(*[torch.arange(4)] * 4)
    orders = [order for order in orders if len(order.unique()) == 4]
    values = torch.stack([cka_from_features(x, y[order]) for order in orders])
    share = float((values >= found.value - 1e-9).double().mean())
    assert len(orders) == 24
    assert found.p_value == pytest.approx(share, abs=0.02)
    assert found.mean == pytest.approx(float(values.mean()), abs=0.02)


def test_independent_features_are_seldom_above_chance():
    """About 5 % of independent pairs are above chance at the level 0.05, by definition."""
    found = [null_distribution(*pair(seed=seed), n=99) for seed in range(100)]
    assert 0 <= sum(one.is_above_chance() for one in found) <= 12
    assert sum(one.p_value for one in found) / 100 == pytest.approx(0.5, abs=0.1)


def test_high_biased_value_may_be_chance_and_a_low_one_above_it():
    """Wide random features have a biased CKA above 0.9; the p-value is still right."""
    x, y = pair(samples=16, width=400)
    chance = null_distribution(x, y, n=99, estimator="biased")
    assert chance.value > 0.9
    assert not chance.is_above_chance()
    assert chance.mean == pytest.approx(chance.value, abs=0.02)
    x, y = pair(samples=200, width=10)
    similar = null_distribution(x, x + 2 * y, n=99)
    assert similar.value < 0.3
    assert similar.is_above_chance(0.01)
    assert similar.p_value == 0.01
    assert similar.mean == pytest.approx(0, abs=0.02)


def test_quantiles_and_text():
    """The text of a result has its value, the values by chance, and the p-value."""
    x, y = pair()
    found = null_distribution(x, x + y, n=99)
    below = (found.values < found.quantile(0.95)).double().mean()
    assert float(below) == pytest.approx(0.95, abs=0.01)
    assert str(found) == (
        f"CKA {found.value:.4f}, by chance {found.mean:.4f} (95 % below "
        f"{found.quantile(0.95):.4f}): p = {found.p_value:.4f}, 99 permutations"
    )
    assert repr(found) == f"<NullDistribution: {found}>"


def test_random_state_is_neither_used_nor_changed():
    """One seed gives the same values each time, and the process's random state stays unchanged."""
    x, y = pair()
    state = torch.random.get_rng_state()
    first = null_distribution(x.requires_grad_(), y, n=5)
    torch.manual_seed(1234)
    again = null_distribution(x, y, n=5)
    torch.random.set_rng_state(state)
    assert torch.equal(first.values, again.values)
    assert not first.values.requires_grad
    assert not torch.equal(null_distribution(x, y, n=5, seed=1).values, first.values)


def test_features_that_do_not_vary_have_no_p_value():
    """CKA of features that do not vary is 0 / 0, so there is no p-value for them."""
    x, _ = pair()
    found = null_distribution(x, torch.ones(24, 3), n=19)
    assert math.isnan(found.value)
    assert math.isnan(found.p_value)
    assert not found.is_above_chance()


def test_wrong_arguments_are_errors():
    """The error for a wrong argument says what to write."""
    x, y = pair()
    with pytest.raises(SettingError, match=r"at least 1, got 0; write e\.g\. 999"):
        null_distribution(x, y, n=0)
    with pytest.raises(InputError, match="one pair of features, got a list; pass two"):
        null_distribution([x], y)
    with pytest.raises(InputError, match="different sample counts"):
        null_distribution(x, y[:-1])
    with pytest.raises(SettingError, match="'exact' as an estimator; write"):
        null_distribution(x, y, estimator="exact")
    with pytest.raises(
        SettingError, match=r"9 permutations give a p-value of at least 0\.1, but got level=0\.05;"
    ):
        null_distribution(x, y, n=9).is_above_chance()
