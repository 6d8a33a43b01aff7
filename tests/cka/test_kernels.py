"""Gram matrices: shift, chunks, memory layouts, half precision, distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cka_reference import linear, song_hsic
from torch import nn

from cka import CKA, RBF, CKAWarning, InputError, SettingError, cka_from_features, hsic
from cka.functional.features import as_rows
from cka.functional.kernels import (
    _columns_per_chunk,
    linear_gram,
    resolve_kernel,
    squared_distances,
)
from pytest_cka_memory import MemoryProbe

pytestmark = pytest.mark.usefixtures("arithmetic")


def assert_same_up_to_centring(gram, expected, tolerance=1e-6):
    """Check that the centred Gram matrix is equal to ``expected``, which is centred."""
    gram = gram.double()
    centred = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    assert (centred - expected).abs().max() < tolerance * expected.abs().max()


def assert_same_distances(rows):
    """Check squared distances against float64, to 2e-6 of the largest."""
    distances = torch.cdist(rows.double(), rows.double()).square()
    assert (squared_distances(linear_gram(rows)) - distances).abs().max() < 2e-6 * distances.max()


def wide(samples):
    """Return 5 MB of features with mean 0."""
    return torch.randn(samples, 5 * 2**18 // samples)


@pytest.mark.parametrize("around", [-1, 0, 1], ids=["one-less", "equal", "one-more"])
def test_every_column_is_in_exactly_one_chunk(around):
    """Every column is in exactly one chunk, for widths just below, at and above two chunks."""
    per_chunk = _columns_per_chunk(torch.zeros(16, 10**6), torch.float32)
    rows = torch.randn(16, 2 * per_chunk + around)
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_common_offset_does_not_reduce_precision():
    """The centred Gram matrix and distances of features + 1000 keep six digits."""
    moved = torch.randn(32, 300) + 1000
    assert_same_up_to_centring(linear_gram(moved), linear(moved))
    assert_same_distances(moved)


def test_distances_of_wide_features_keep_their_digits():
    """Distances are differences of single entries, so errors do not average out."""
    assert_same_distances(wide(256) + 2.8)


@pytest.mark.parametrize("samples", [191, 192, 193, 512])
def test_gram_matrix_of_several_blocks_is_complete(samples):
    """From 192 samples on, the blocks above the diagonal are copied to those below it."""
    rows = torch.randn(samples, 40)
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


@pytest.mark.parametrize("samples", [16, 64, 256])
@pytest.mark.parametrize("offset", [0, 0.5, 1, 2, 4, 1000])
def test_wide_features_keep_their_digits_at_any_offset(samples, offset):
    """With features at any offset, CKA is equal to that in float64 to 1e-6."""
    rows = wide(samples) + offset
    others = rows + wide(samples)
    gram, other = linear_gram(rows), linear_gram(others)
    found = hsic(gram, other) / (hsic(gram, gram) * hsic(other, other)).sqrt()
    assert float(found) == pytest.approx(float(cka_from_features(rows, others)), abs=1e-6)


def test_offset_of_one_column_does_not_reduce_precision():
    """If one of 20,480 columns is near 10,000 for every sample, CKA keeps its digits."""
    rows = wide(64)
    rows[:, 1] += 10_000
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_very_wide_features_keep_seven_digits():
    """Features as wide as a ResNet's first layer for 224 x 224 pixels keep seven digits."""
    rows = torch.randn(16, 800_000)
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=2e-7)


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["nan", "overflows"])
@pytest.mark.parametrize("sample", [0, 9], ids=["in-the-centre", "after-the-centre"])
def test_nan_or_overflow_makes_the_entries_of_its_sample_not_finite(value, sample):
    """NaN or overflow in a sample makes its entries not finite, whichever sample it is."""
    rows = wide(64)
    rows[sample] = value
    assert not linear_gram(rows)[sample].isfinite().any()


@pytest.mark.parametrize("samples", [2, 3])
def test_gram_matrix_of_two_or_three_samples_is_correct(samples):
    """The biased estimator needs only two samples, so Gram matrices of two or three are right."""
    rows = wide(samples)
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=2e-6)


def test_gram_matrix_of_features_without_columns_is_zero():
    """A layer with empty outputs is constant, so its Gram matrix is zero."""
    assert torch.equal(linear_gram(torch.zeros(5, 0)), torch.zeros(5, 5))


def test_only_one_chunk_of_shifted_features_is_live_at_a_time(arithmetic):
    """Besides one chunk of features, only centre and sums need
    memory; the compiled kernel, 1 MB.
    """
    rows = wide(64) + 1000
    per_chunk = _columns_per_chunk(rows, rows.dtype)
    assert per_chunk < rows.shape[1] / 4
    probe = MemoryProbe("cpu")
    with probe.measure() as region:
        gram = linear_gram(rows)
    chunk, centre = rows[:, :per_chunk].numel() * rows.itemsize, rows[0].nbytes
    allowed = chunk + centre if arithmetic == "torch" else 2**20
    assert region.retained_bytes == gram.nbytes
    assert region.peak_increase_bytes <= allowed + 5 * gram.nbytes


def test_channels_last_images_are_not_copied():
    """Images in either memory format are not copied: columns in memory order are a view."""
    image = torch.randn(4, 3, 5, 5)
    for layout in (torch.contiguous_format, torch.channels_last):
        laid_out = image.to(memory_format=layout)
        rows = as_rows(laid_out)
        assert rows.data_ptr() == laid_out.data_ptr()
        torch.testing.assert_close(linear_gram(rows), linear_gram(image.flatten(1)))


def test_complex_features_use_the_real_inner_product():
    """Complex features use Re<x, y>, the inner product of the same numbers as pairs of reals."""
    features = torch.randn(5, 4, dtype=torch.complex64)
    pairs = torch.view_as_real(features).flatten(1)
    torch.testing.assert_close(linear_gram(as_rows(features)), linear_gram(pairs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gram_matrix_of_half_precision_is_float32(dtype):
    """The Gram matrix of half precision is float32, and finite for squares that exceed 65504."""
    rows = (torch.randn(8, 100) * 500).to(dtype)
    gram = linear_gram(rows)
    assert gram.dtype == torch.float32
    assert_same_up_to_centring(gram, linear(rows))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_booleans_and_integers_are_features(dtype):
    """Booleans and integers are compared as features by their numerical values."""
    rows = torch.randint(0, 2, (8, 30)).to(dtype)
    assert_same_up_to_centring(linear_gram(as_rows(rows)), linear(rows))


def test_outlier_among_the_first_samples_does_not_reduce_precision():
    """An outlier among the first samples, whose mean is the shift, does not reduce precision."""
    rows = torch.randn(64, 200)
    rows[0] *= 100
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_gram_matrix_of_float64_is_float64():
    """The Gram matrix of float64 features is float64 and correct to 13 digits."""
    rows = torch.randn(8, 100, dtype=torch.float64)
    assert linear_gram(rows).dtype == torch.float64
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=1e-13)


def test_median_distance_includes_the_diagonal():
    """The median distance includes the diagonal as in Google's demo: 18.302, and 18.387 without."""
    state = np.random.RandomState(1337)
    rows = torch.from_numpy(state.randn(100, 10))
    distances = squared_distances(linear_gram(rows)).numpy()
    assert round(float(np.median(distances)), 3) == 18.302
    expected = np.exp(-distances / (2 * 0.25 * np.median(distances)))
    np.testing.assert_allclose(RBF(0.5)(rows).numpy(), expected, rtol=1e-12)


def test_rbf_is_defined_if_the_median_distance_is_zero():
    """If the median distance is zero, RBF gives equal samples similarity 1, and others 0."""
    rows = torch.tensor([[1.0], [1.0], [1.0], [1.0], [5.0]])
    gram = RBF()(rows)
    assert torch.equal(gram[:4, :4], torch.ones(4, 4))
    assert torch.equal(gram[4], torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan")])
def test_rbf_threshold_that_is_not_positive_is_an_error(threshold):
    """An RBF threshold of zero, a negative number or NaN is an error."""
    with pytest.raises(SettingError, match="threshold above 0, got"):
        RBF(threshold)


def test_user_kernel_that_does_not_return_a_gram_matrix_is_an_error():
    """If a user's kernel returns no Gram matrix, the error has the shapes given, expected and
    returned.
    """
    with pytest.raises(InputError, match=r"features \(6, 3\) to a Gram matrix \(6, 6\).*\(3, 3\)"):
        resolve_kernel(lambda rows: rows.T @ rows)(torch.zeros(6, 3))
    with pytest.raises(InputError, match="it returned float; write"):
        resolve_kernel(lambda rows: 1.0)(torch.zeros(6, 3))


def test_user_kernel_gets_float32_for_half_precision_features():
    """A user's kernel gets float32, because products of half-precision features could overflow."""
    seen = []
    resolve_kernel(lambda rows: seen.append(rows.dtype) or rows @ rows.T)(torch.zeros(6, 3).half())
    assert seen == [torch.float32]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 1, 1.5, 30, 200, 1000, 1e6, 1e20])
def test_rbf_of_any_width_keeps_its_digits(threshold):
    """A wide kernel has similarities near 1, and a narrow one near 0; float32 keeps both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(20, 30), nn.Tanh())).eval()
    batches = [torch.randn(64, 20), torch.randn(48, 20)]
    kernel = RBF(threshold)
    result = CKA(model, model1_layers=["0", "1"], kernel=kernel, device="cpu").compare(
        batches, progress=False
    )

    def gram(rows):
        """Return the kernel in float64 by its formula, minus 1 if it is wide."""
        rows = rows.detach().double()
        squares = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        ordered = squares.flatten().sort().values
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        exponent = -squares / median / (2 * threshold**2)
        if threshold <= 1:
            return torch.exp(exponent)
        # A constant factor, the same for all batches, keeps the products in range.
        return torch.expm1(exponent) * 2 * threshold**2

    sums = [0.0, 0.0, 0.0]
    for batch in batches:
        grams = [gram(batch), gram(model(batch))]
        for at, (one, other) in enumerate(((0, 1), (0, 0), (1, 1))):
            sums[at] += song_hsic(grams[one], grams[other])
    assert result["0", "1"] == pytest.approx(sums[0] / (sums[1] * sums[2]) ** 0.5, abs=2e-6)


def test_public_kernel_has_ones_on_its_diagonal():
    """RBF()(rows) is the kernel itself, whatever a comparison computes from it."""
    gram = RBF(1000)(torch.randn(8, 3))
    assert torch.equal(gram.diagonal(), torch.ones(8))
    assert (gram > 0.999).all()


@pytest.mark.parametrize(
    "settings", [{}, {"null": 9}, {"estimator": "exact"}, {"parts": 16}], ids=str
)
@pytest.mark.parametrize("threshold", [0.19, 0.1, 0.03, 0.003])
def test_narrow_rbf_does_not_underflow(threshold, settings):
    """A narrow kernel, whose similarities are 0 in float32 and even float64, has the CKA of its
    formula: only the nearest samples count, and their similarities' ratios.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(20, 30), nn.Tanh())).eval()
    batches = [torch.randn(64, 20), torch.randn(48, 20)]
    chosen = {"estimator": settings.get("estimator"), "hsic_batch_size": settings.get("parts")}
    cka = CKA(model, model1_layers=["0", "1"], kernel=RBF(threshold), device="cpu", **chosen)
    result = cka.compare(batches, progress=False, null=settings.get("null"))
    parts = {"parts": [p for batch in batches for p in batch.split(16)]}.get(
        next(iter(settings), ""), batches
    )
    parts = [torch.cat(batches)] if "estimator" in settings else parts

    def exponents(rows):
        """Return the kernel's exponents in float64; the diagonal does not count."""
        rows = rows.detach().double()
        squares = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        return (squares / np.median(squares.numpy()) / (2 * threshold**2)).fill_diagonal_(torch.inf)

    found = [[exponents(part) for part in parts], [exponents(model(part)) for part in parts]]
    # A factor, the same for all batches of a layer, keeps the largest similarity at 1.
    least = [min(float(each.min()) for each in layer) for layer in found]
    sums = [0.0, 0.0, 0.0]
    for of_part in zip(*found, strict=True):
        grams = [torch.exp(low - each) for low, each in zip(least, of_part, strict=True)]
        for at, (one, other) in enumerate(((0, 1), (0, 0), (1, 1))):
            sums[at] += song_hsic(grams[one], grams[other])
    assert result["0", "1"] == pytest.approx(sums[0] / (sums[1] * sums[2]) ** 0.5, abs=1e-6)
    if result.calibration is not None:
        assert result.calibration.mean.isfinite().all()


def test_narrow_rbf_of_constant_features_is_nan():
    """Equal samples stay constant, and samples of which two are equal have a value."""
    with pytest.warns(CKAWarning, match="do not vary"):
        assert cka_from_features(torch.ones(8, 2), torch.randn(8, 2), kernel=RBF(0.01)).isnan()
    rows = torch.randn(8, 2)
    rows[1] = rows[0]
    assert float(cka_from_features(rows, rows, kernel=RBF(0.01))) == pytest.approx(1)
    one, other = torch.arange(8.0)[:, None], torch.arange(8.0).square()[:, None]
    biased = cka_from_features(one, other, kernel=RBF(0.01), estimator="biased")
    assert float(biased) == pytest.approx(1)  # the identity on both sides
