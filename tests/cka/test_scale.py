"""CKA does not change if features are multiplied, over the whole range of their dtype."""

from __future__ import annotations

import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import minibatch_cka
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cka import CKA, CKAWarning, cka_from_features, null_distribution
from cka.functional.kernels import ZERO_EXPONENT, linear_gram, scaled_gram

EXPONENTS = {torch.float64: 1000, torch.float32: 110, torch.bfloat16: 110, torch.float16: 8}
"""Powers of two by which normally distributed features can be multiplied without rounding."""


def features(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return (12, width) features, none of which is near zero."""
    values = torch.randn(12, width, generator=torch.Generator().manual_seed(seed))
    return (values + values.sign() * 0.125).to(dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(EXPONENTS)),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.sampled_from(["linear", "rbf"]),
    st.sampled_from(["unbiased", "biased"]),
)
def test_powers_of_two_do_not_change_a_bit_of_cka(dtype, one, other, kernel, estimator):
    """A power of two, as a factor of either side, changes no bit of CKA in the dtype's range."""
    x, y = features(5, 0, dtype), features(7, 1, dtype)
    limit = EXPONENTS[dtype]
    scaled_x, scaled_y = x * 2.0 ** round(one * limit), y * 2.0 ** round(other * limit)
    chosen = {"kernel": kernel, "estimator": estimator}
    assert cka_from_features(scaled_x, scaled_y, **chosen) == cka_from_features(x, y, **chosen)


@settings(max_examples=30, deadline=None)
@given(st.floats(-300, 300), st.floats(-300, 300))
def test_other_factors_change_cka_by_rounding_only(one, other):
    """Other factors change CKA by rounding only, also 1e-45 and 1e50, which leave the range."""
    x, y = features(5, 0, torch.float64), features(7, 1, torch.float64)
    found = cka_from_features(x * 10.0**one, y * 10.0**other)
    assert float(found) == pytest.approx(float(cka_from_features(x, y)), abs=1e-13)


def test_smallest_and_largest_numbers_of_a_dtype_are_compared():
    """The smallest and largest numbers of a dtype are compared;
    subnormal ones have fewer digits.
    """
    x = features(5, 0, torch.float32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        largest = (x / x.abs().max()).to(dtype) * torch.finfo(dtype).max
        assert largest.abs().max() == torch.finfo(dtype).max
        found = cka_from_features(largest, x)
        assert float(found) == pytest.approx(float(cka_from_features(x, x)), abs=1e-4)
        whole = (x * 16).round()
        smallest = whole.to(dtype) * torch.finfo(dtype).smallest_normal
        assert float(cka_from_features(smallest, whole)) == pytest.approx(1, abs=1e-12)


def test_null_distribution_does_not_depend_on_the_scale():
    """Permuted values are of the same matrices, so they do not depend on the scale either."""
    x, y = features(5, 0, torch.float64), features(7, 1, torch.float64)
    plain, tiny = null_distribution(x, y, 9), null_distribution(x * 2.0**-500, y * 2.0**500, 9)
    assert torch.equal(tiny.values, plain.values)
    assert tiny.value == plain.value


def test_gradient_of_scaled_features_is_scaled():
    """The gradient of scaled features is scaled: the power of two
    is a constant of the derivative.
    """
    x, y = features(5, 0, torch.float64), features(7, 1, torch.float64)
    plain, tiny = x.clone().requires_grad_(), (x * 2.0**-400).requires_grad_()
    cka_from_features(plain, y).backward()
    cka_from_features(tiny, y).backward()
    torch.testing.assert_close(tiny.grad * 2.0**-400, plain.grad)


def test_matrix_of_a_user_kernel_may_be_of_any_scale():
    """The features of a user's kernel are not scaled, because a kernel need not be linear."""
    x, y = features(5, 0, torch.float64), features(7, 1, torch.float64)
    plain = cka_from_features(x, y, kernel=lambda rows: rows @ rows.T)
    for factor in (2.0**-700, 2.0**700):
        scaled = cka_from_features(x, y, kernel=lambda rows, f=factor: rows @ rows.T * f)
        assert scaled == plain


@pytest.mark.parametrize(
    ("rows", "exponent"),
    [
        pytest.param(torch.ones(4, 3), 0, id="in-range"),
        pytest.param(torch.ones(4, 3) * 1e10, 0, id="constant"),
        pytest.param(torch.eye(4) * 2.0**-39, 0, id="just-in-range"),
        pytest.param(torch.eye(4) * 2.0**-41, -82, id="just-below"),
        pytest.param(torch.eye(4) * 2.0**100, 200, id="large"),
        pytest.param(torch.eye(4) * 2.0**-149, -252, id="smallest"),
        pytest.param(torch.zeros(4, 3), ZERO_EXPONENT, id="zero"),
        pytest.param(torch.zeros(4, 0), ZERO_EXPONENT, id="empty"),
        pytest.param(torch.full((4, 3), torch.inf), 0, id="infinite"),
    ],
)
@pytest.mark.usefixtures("arithmetic")
def test_exponent_is_zero_unless_squares_leave_the_range(rows, exponent):
    """A Gram matrix whose squares leave the dtype's range is scaled by a power of two.

    Times 2**exponent it is the Gram matrix in float64; otherwise the exponent is 0.
    """
    gram, found = scaled_gram(linear_gram, rows)
    assert found == exponent
    if rows.isfinite().all() and exponent != ZERO_EXPONENT:
        wide = linear_gram(rows.double())
        torch.testing.assert_close(gram.double() * 2.0**exponent, wide, rtol=1e-6, atol=0)


def scaled(factor, **chosen):
    """Compare the layers of a network after multiplication of the middle one."""

    def pick(name, output):
        return output * factor if name == "1" else output

    return CKA(mlp(), pick=pick, **chosen).compare(batches_of(16, 12), progress=False)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("power", [-120, -70, 70, 110])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"kernel": "rbf"}, {"estimator": "exact"}, {"hsic_batch_size": 6}],
    ids=["linear", "rbf", "exact", "parts"],
)
def test_scale_of_a_layer_does_not_change_a_bit_of_a_comparison(power, chosen):
    """The scale of a layer changes no bit, also if its squares are 0 or infinite in float32."""
    plain, found = scaled(1.0, **chosen), scaled(2.0**power, **chosen)
    assert torch.equal(found.matrix, plain.matrix)
    torch.testing.assert_close(
        found.standard_error, plain.standard_error, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("powers", [(-100, 0), (0, -100), (100, 60), (-60, -62)], ids=str)
def test_batches_of_different_scale_are_summed_by_their_size(powers):
    """Batches of different scale are summed as in float64; one that is far smaller adds nothing."""
    batches = [batch * 2.0**power for batch, power in zip(batches_of(16, 12), powers, strict=True)]
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    result = CKA(model).compare(batches, progress=False)
    # ReLU and linear layers without a bias keep the scale, so the reference needs no tiny numbers.
    highest = max(powers)
    with torch.no_grad():
        inner = [model[0](batch * 2.0**-highest) for batch in batches]
        last = [model[2](torch.relu(one)) for one in inner]
    assert result["0", "2"] == pytest.approx(minibatch_cka(inner, last), abs=1e-6)


def test_layer_that_is_zero_in_one_batch_has_the_scale_of_the_others():
    """A layer that is zero in one batch has no scale in it, and has that of other batches."""
    batches = [torch.zeros(8, 6), *(batch * 2.0**-100 for batch in batches_of(12, 16))]
    layers = nn.Sequential(nn.Identity(), nn.Linear(6, 3, bias=False))
    result = CKA(layers).compare(batches, progress=False)
    alone = CKA(layers).compare(batches[1:], progress=False)
    assert torch.equal(result.matrix, alone.matrix)
    with pytest.warns(CKAWarning, match="same for every sample: 0, 1$"):
        CKA(layers).compare(batches[:1], progress=False)
