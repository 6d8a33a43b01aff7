"""CKA of feature matrices: published values, formulas, invariances, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cka_reference import gretton_hsic, linear, minibatch_cka, song_hsic
from hypothesis import given, settings
from hypothesis import strategies as st

from cka import RBF, CKAWarning, InputError, SettingError, cka_from_features, hsic


@pytest.fixture
def google_demo():
    """Return the features of the notebook published with Kornblith et al. 2019."""
    state = np.random.RandomState(1337)
    x = state.randn(100, 10)
    y = state.randn(100, 10) + x
    return x, y


def features(seed: int, samples: int = 12, width: int = 5) -> torch.Tensor:
    return torch.randn(
        samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("kernel", "estimator", "published"),
    [
        pytest.param("linear", "biased", 0.55761, id="linear"),
        pytest.param(RBF(0.5), "biased", 0.65483, id="rbf-half"),
        pytest.param("linear", "unbiased", 0.51346, id="debiased"),
    ],
)
def test_google_demo_values_are_reproduced(google_demo, kernel, estimator, published):
    """CKA of the data in Google's demo has the five published digits."""
    found = cka_from_features(*google_demo, kernel=kernel, estimator=estimator)
    assert round(float(found), 5) == published


def test_pair_gives_a_float64_scalar_and_sequence_a_matrix():
    """CKA of two tensors is a 0-d tensor; with a sequence on either side it has shape (L1, L2)."""
    x, y, z = features(0), features(1, width=3), features(2, width=9)
    pair = cka_from_features(x, y)
    matrix = cka_from_features([x, y], [x, y, z])
    assert pair.shape == ()
    assert pair.dtype == torch.float64
    assert matrix.shape == (2, 3)
    assert matrix[0, 1] == pytest.approx(float(pair), abs=1e-14)
    assert cka_from_features(x, [y, z]).shape == (1, 2)


def test_float32_features_are_computed_in_float64():
    """CKA of float32 features equals that of the same values in float64."""
    x, y = features(0).float(), features(1).float()
    assert cka_from_features(x, y).item() == pytest.approx(minibatch_cka([x], [y]), abs=1e-13)


def test_features_of_images_are_flattened():
    """(n, c, h, w) features are used as (n, c h w)."""
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    y = features(1, samples=8)
    assert cka_from_features(x, y) == cka_from_features(x.flatten(1), y)


def test_hsic_matches_the_formulas_of_the_papers():
    """Unbiased HSIC is the three sums of Song et al., and biased HSIC tr(KHLH) of Gretton et al."""
    x, y = features(3), features(4)
    assert float(hsic(linear(x), linear(y))) == pytest.approx(
        song_hsic(linear(x), linear(y)), rel=1e-12
    )
    assert float(hsic(linear(x), linear(y), estimator="biased")) == pytest.approx(
        gretton_hsic(linear(x), linear(y)), rel=1e-12
    )


def test_hsic_is_the_same_for_centred_and_uncentred_gram_matrices():
    """HSIC is the same for centred Gram matrices, as the unbiased estimator centres them itself."""
    x, y = features(5), features(6)
    assert float(hsic(x @ x.T, y @ y.T)) == pytest.approx(float(hsic(linear(x), linear(y))))


def test_cka_of_independent_features_averages_to_zero_without_a_clamp():
    """Some unbiased estimates are negative; a clamp would raise the mean above 0."""
    values = torch.stack(
        [
            cka_from_features(features(2 * i, 10, 40), features(2 * i + 1, 10, 40))
            for i in range(200)
        ]
    )
    assert (values < 0).any()
    assert abs(float(values.mean())) < 4 * float(values.std()) / 200**0.5


def test_biased_cka_of_wide_random_features_tends_to_one():
    """The biased CKA of random features is about p / (p + n) (Murphy et al. 2024), the unbiased
    about 0.
    """
    x, y = features(0, 10, 990), features(1, 10, 990)
    assert float(cka_from_features(x, y, estimator="biased")) == pytest.approx(0.99, abs=0.01)
    assert abs(float(cka_from_features(x, y))) < 0.1


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, which every dtype represents exactly."""
    whole = torch.randint(0, 2, (8, 6), generator=torch.Generator().manual_seed(1))
    return whole.to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.bool, torch.uint8, torch.uint32, torch.int8, torch.int64),
    ],
    ids=str,
)
def test_features_and_gram_matrices_may_have_any_real_dtype(dtype):
    """Features and Gram matrices may have any real dtype; CKA is computed from them in float64."""
    x, y = of_dtype(dtype), features(1, 8)
    expected = float(cka_from_features(x.double(), y))
    assert float(cka_from_features(x, y)) == pytest.approx(expected, abs=1e-14)
    gram = (x.double() @ x.double().T).clamp(max=1).to(dtype)
    value = float(hsic(gram.double(), y @ y.T))
    assert float(hsic(gram, y @ y.T)) == pytest.approx(value, abs=1e-14)
    found = cka_from_features(x, x, kernel=lambda rows: gram)
    assert float(found) == pytest.approx(1, abs=1e-14)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_conjugated_and_quantised_features_are_read():
    """A lazily conjugated complex tensor counts as real and imaginary parts."""
    z, y = torch.randn(8, 3, dtype=torch.complex64), features(1, 8)
    parts = torch.cat([z.real, -z.imag], dim=1)
    assert z.conj().is_conj()
    assert float(cka_from_features(z.conj(), y)) == pytest.approx(
        float(cka_from_features(parts, y)), abs=1e-12
    )
    quantised = torch.quantize_per_tensor(parts, 0.1, 0, torch.qint8)
    assert cka_from_features(quantised, y) == cka_from_features(quantised.dequantize(), y)


def test_user_kernel_gets_real_and_imaginary_parts_of_complex_features():
    """A user's kernel gets both parts of complex features; float32 would drop the imaginary one."""
    seen = []
    z = torch.randn(8, 3, dtype=torch.complex64)
    cka_from_features(z, z, kernel=lambda rows: seen.append(rows.shape) or rows @ rows.T)
    assert seen == [(8, 6), (8, 6)]


@pytest.mark.parametrize(
    "make",
    [lambda x: x.to_sparse(), lambda x: x.to("meta")],
    ids=["sparse", "meta"],
)
def test_features_without_values_are_an_error(make):
    """The error for features without values says what the tensor is and how to convert it."""
    with pytest.raises(InputError, match=r"dense tensors with values, got .*; pass"):
        cka_from_features(make(features(0)), features(1))
    with pytest.raises(InputError, match=r"must be dense and real, got torch\.float64"):
        hsic(make(torch.eye(5, dtype=torch.float64)), torch.eye(5))


def test_complex_gram_matrix_is_an_error():
    """HSIC is defined for real similarities, so a complex Gram matrix is an error."""
    with pytest.raises(InputError, match=r"dense and real, got torch\.complex64.*\.real"):
        hsic(torch.eye(5, dtype=torch.complex64), torch.eye(5))


seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(4, 16)
widths = st.integers(1, 20)
kernels = st.sampled_from(["linear", "rbf"])


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, widths, kernels)
def test_cka_with_itself_is_one(seed, samples, width, kernel):
    """CKA(a, a) = 1."""
    x = features(seed, samples, width)
    assert float(cka_from_features(x, x, kernel=kernel)) == pytest.approx(1, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, widths, widths, kernels, st.sampled_from(["unbiased", "biased"]))
def test_cka_is_symmetric(seed, samples, width, other, kernel, estimator):
    """CKA(a, b) = CKA(b, a)."""
    x, y = features(seed, samples, width), features(seed + 1, samples, other)
    forth = cka_from_features(x, y, kernel=kernel, estimator=estimator)
    back = cka_from_features(y, x, kernel=kernel, estimator=estimator)
    assert float(forth) == pytest.approx(float(back), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.integers(2, 12), st.floats(1e-3, 1e3), st.floats(-1e3, 1e3), kernels)
def test_rotation_scale_and_offset_do_not_change_cka(seed, samples, width, scale, offset, kernel):
    """CKA is invariant to orthogonal maps, isotropic scaling and translation."""
    x, y = features(seed, samples, width), features(seed + 1, samples, 7)
    rotation = torch.linalg.qr(features(seed + 2, width, width)).Q
    moved = scale * x @ rotation + offset
    before = cka_from_features(x, y, kernel=kernel)
    after = cka_from_features(moved, y, kernel=kernel)
    assert float(after) == pytest.approx(float(before), abs=1e-7)


def test_gradients_match_finite_differences():
    """Gradients match finite differences with either kernel, so that CKA can be used as a loss."""
    x, y = features(0, 6, 3).requires_grad_(), features(1, 6, 2).requires_grad_()
    assert torch.autograd.gradcheck(cka_from_features, (x, y))
    assert torch.autograd.gradcheck(lambda a, b: cka_from_features(a, b, kernel="rbf"), (x, y))


def test_constant_features_give_nan_and_a_warning():
    """Features that are all 0.1, which is not exact in binary, still count as constant."""
    with pytest.warns(CKAWarning, match="NaN because the features of one side do not vary"):
        found = cka_from_features(torch.full((7, 3), 0.1), features(0, 7))
    assert found.isnan()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        pytest.param(
            torch.zeros(5, 2),
            torch.zeros(6, 2),
            "different sample counts: 5 and 6; compute",
            id="counts",
        ),
        pytest.param(torch.zeros(3, 2), torch.zeros(3, 2), "at least 4 samples, got 3", id="few"),
        pytest.param(torch.zeros(5), torch.zeros(5), r"got shape \(5,\); pass", id="one-dimension"),
        pytest.param([], torch.zeros(5, 2), "empty sequence of features; pass", id="nothing"),
        pytest.param(
            {"fc": torch.zeros(5, 2)},
            torch.zeros(5, 2),
            r"got dict; of a dict write list\(",
            id="dict",
        ),
        pytest.param("fc", torch.zeros(5, 2), "array .* or a list of them, got str", id="text"),
        pytest.param([None], torch.zeros(5, 2), "or a list of them, got NoneType", id="none"),
    ],
)
def test_features_that_cannot_be_compared_are_an_error(x, y, message):
    """The error for features that cannot be compared gives their shape or the sample counts."""
    with pytest.raises(InputError, match=message):
        cka_from_features(x, y)


def test_biased_estimator_needs_two_samples():
    """The biased estimator needs two samples, so one sample is an error."""
    x = torch.tensor([[0.0], [1.0]])
    assert cka_from_features(x, x, estimator="biased") == 1
    with pytest.raises(InputError, match="at least 2 samples, got 1"):
        cka_from_features(x[:1], x[:1], estimator="biased")


def test_error_for_an_unknown_setting_lists_the_known_ones():
    """The error for an unknown kernel or estimator lists the known ones."""
    x = features(0)
    with pytest.raises(SettingError, match=r"'cosine'.*write 'linear', 'rbf'"):
        cka_from_features(x, x, kernel="cosine")
    with pytest.raises(SettingError, match=r"'exact'.*write 'unbiased' or 'biased'"):
        cka_from_features(x, x, estimator="exact")
    with pytest.raises(SettingError, match=r"'debiased'.*write 'unbiased' or 'biased'"):
        hsic(x @ x.T, x @ x.T, estimator="debiased")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        pytest.param((4, 5), (4, 5), r"must be square, got shape \(4, 5\); pass", id="not-square"),
        pytest.param((4, 4), (5, 5), "4 and 5 samples; compute both", id="sizes"),
        pytest.param((3, 3), (3, 3), "at least 4 samples, got 3", id="few"),
    ],
)
def test_hsic_of_matrices_with_invalid_shapes_is_an_error(one, other, message):
    """HSIC is refused unless both Gram matrices are square, of one size, and of enough samples."""
    with pytest.raises(InputError, match=message):
        hsic(torch.zeros(one), torch.zeros(other))


def test_sides_with_different_numbers_of_features_and_many_samples():
    """Gram matrices that are multiplied in several slabs may differ in number on both sides."""
    torch.manual_seed(0)
    x = [torch.randn(200, 3) for _ in range(40)]
    y = [torch.randn(200, 3) for _ in range(3)]
    matrix = cka_from_features(x, y)
    expected = cka_from_features(x[-1], y[-1])
    torch.testing.assert_close(matrix[-1, -1], expected, rtol=0, atol=1e-12)
