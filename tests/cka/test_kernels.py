"""Gram matrices: centring, chunks, layouts, half precision, distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cka_reference import linear

from cka import RBF, InputError, SettingError, cka_from_features, hsic
from cka.functional.kernels import (
    _columns_per_chunk,
    as_rows,
    linear_gram,
    resolve_kernel,
    squared_distances,
)
from pytest_cka_memory import MemoryProbe

pytestmark = pytest.mark.usefixtures("arithmetic")


def assert_same_up_to_centring(gram, expected, tolerance=1e-6):
    """Same after both are centred, which is all that CKA sees of them."""
    wide = gram.double()
    centred = wide - wide.mean(0) - wide.mean(1, keepdim=True) + wide.mean()
    assert (centred - expected).abs().max() < tolerance * expected.abs().max()


def assert_same_distances(rows):
    """Squared distances as float64 has them, the furthest to five digits and more."""
    distances = torch.cdist(rows.double(), rows.double()).square()
    assert (squared_distances(rows) - distances).abs().max() < 2e-6 * distances.max()


def wide(samples):
    """Features of 5 MB, around zero."""
    return torch.randn(samples, 5 * 2**18 // samples)


@pytest.mark.parametrize("around", [-1, 0, 1], ids=["one-less", "equal", "one-more"])
def test_chunks_add_up_to_the_whole_gram_matrix(around):
    """Columns on either side of a chunk's boundary are all counted once."""
    per_chunk = _columns_per_chunk(torch.zeros(16, 10**6), torch.float32)
    rows = torch.randn(16, 2 * per_chunk + around)
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_a_common_offset_costs_no_digit():
    """Features + 1000: the centred Gram matrix and the distances keep their six digits."""
    moved = torch.randn(32, 300) + 1000
    assert_same_up_to_centring(linear_gram(moved), linear(moved))
    assert_same_distances(moved)


def test_distances_keep_their_digits_however_wide_the_features():
    """They are differences of single entries, with nothing to average out."""
    assert_same_distances(wide(256) + 2.8)


@pytest.mark.parametrize("samples", [191, 192, 193, 512])
def test_large_matrices_are_computed_by_blocks(samples):
    """From two blocks of 96 samples on only one triangle is multiplied; the whole is there."""
    rows = torch.randn(samples, 40)
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


@pytest.mark.parametrize("samples", [16, 64, 256])
@pytest.mark.parametrize("offset", [0, 0.5, 1, 2, 4, 1000])
def test_wide_features_keep_their_digits_wherever_they_lie(samples, offset):
    """CKA is what float64 finds to 1e-6, at any offset."""
    rows = wide(samples) + offset
    others = rows + wide(samples)
    gram, other = linear_gram(rows), linear_gram(others)
    found = hsic(gram, other) / (hsic(gram, gram) * hsic(other, other)).sqrt()
    assert float(found) == pytest.approx(float(cka_from_features(rows, others)), abs=1e-6)


def test_an_offset_of_one_column_costs_no_digit():
    """Of 20,480 one is 10,000 for every sample."""
    rows = wide(64)
    rows[:, 1] += 10_000
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_very_wide_features_are_not_one_long_sum():
    """As many as a first layer puts out for an image of 224 x 224 pixels: seven digits stay."""
    rows = torch.randn(16, 800_000)
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=2e-7)


@pytest.mark.parametrize("strange", [float("nan"), 1e38], ids=["nan", "overflows"])
@pytest.mark.parametrize("sample", [0, 9], ids=["seen-first", "seen-later"])
def test_a_strange_number_shows_in_the_gram_matrix(strange, sample):
    """All that the sample is compared with is no number."""
    rows = wide(64)
    rows[sample] = strange
    assert not linear_gram(rows)[sample].isfinite().any()


@pytest.mark.parametrize("samples", [2, 3])
def test_wide_features_of_very_few_samples_have_a_gram_matrix(samples):
    """The biased estimator takes two."""
    rows = wide(samples)
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=2e-6)


def test_features_without_columns_give_zeros():
    """There is nothing to tell the samples apart."""
    assert torch.equal(linear_gram(torch.zeros(5, 0)), torch.zeros(5, 5))


def test_of_shifted_features_one_chunk_is_there_at_a_time(arithmetic):
    """Beside it only their centre and the sums; of the compiled kernel's, some rows of each."""
    rows = wide(64) + 1000
    per_chunk = _columns_per_chunk(rows, rows.dtype)
    assert per_chunk < rows.shape[1] / 4
    probe = MemoryProbe("cpu")
    with probe.measure() as region:
        gram = linear_gram(rows)
    chunk, centre = rows[:, :per_chunk].numel() * rows.itemsize, rows[0].nbytes
    most = chunk + centre if arithmetic == "torch" else 2**20
    assert region.retained_bytes == gram.nbytes
    assert region.peak_increase_bytes <= most + 5 * gram.nbytes


def test_channels_last_images_are_not_copied():
    """The columns come in memory order, which is a view for either memory format."""
    image = torch.randn(4, 3, 5, 5)
    for layout in (torch.contiguous_format, torch.channels_last):
        laid_out = image.to(memory_format=layout)
        rows = as_rows(laid_out)
        assert rows.data_ptr() == laid_out.data_ptr()
        torch.testing.assert_close(linear_gram(rows), linear_gram(image.flatten(1)))


def test_complex_features_use_the_real_inner_product():
    """Re<x, y>, as the same numbers seen as pairs of reals."""
    features = torch.randn(5, 4, dtype=torch.complex64)
    pairs = torch.view_as_real(features).flatten(1)
    torch.testing.assert_close(linear_gram(as_rows(features)), linear_gram(pairs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    """Values whose squares exceed 65504 give a finite float32 Gram matrix."""
    rows = (torch.randn(8, 100) * 500).to(dtype)
    gram = linear_gram(rows)
    assert gram.dtype == torch.float32
    assert_same_up_to_centring(gram, linear(rows))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_masks_and_counts_are_features_too(dtype):
    """Outputs that are no floating-point numbers are compared as the numbers they are."""
    rows = torch.randint(0, 2, (8, 30)).to(dtype)
    assert_same_up_to_centring(linear_gram(as_rows(rows)), linear(rows))


def test_an_outlier_among_the_first_samples_does_no_harm():
    """The shift is taken from few samples; one 100 times as large as the rest costs no digit."""
    rows = torch.randn(64, 200)
    rows[0] *= 100
    assert_same_up_to_centring(linear_gram(rows), linear(rows))


def test_float64_stays():
    """A float64 model keeps its precision."""
    rows = torch.randn(8, 100, dtype=torch.float64)
    assert linear_gram(rows).dtype == torch.float64
    assert_same_up_to_centring(linear_gram(rows), linear(rows), tolerance=1e-13)


def test_the_median_distance_counts_the_diagonal():
    """The convention of Google's demo: 18.302 on its data, 18.387 without the diagonal."""
    state = np.random.RandomState(1337)
    rows = torch.from_numpy(state.randn(100, 10))
    distances = squared_distances(rows).numpy()
    assert round(float(np.median(distances)), 3) == 18.302
    expected = np.exp(-distances / (2 * 0.25 * np.median(distances)))
    np.testing.assert_allclose(RBF(0.5)(rows).numpy(), expected, rtol=1e-12)


def test_rbf_of_mostly_equal_samples_is_defined():
    """Where the median distance is 0, equal samples are alike and others are not."""
    rows = torch.tensor([[1.0], [1.0], [1.0], [1.0], [5.0]])
    gram = RBF()(rows)
    assert torch.equal(gram[:4, :4], torch.ones(4, 4))
    assert torch.equal(gram[4], torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan")])
def test_rbf_refuses_a_width_that_is_none(threshold):
    """Zero, negative and NaN widths are refused by name."""
    with pytest.raises(SettingError, match="threshold above 0, got"):
        RBF(threshold)


def test_a_kernel_of_ones_own_must_return_a_gram_matrix():
    """A function that returns something else is refused, with both shapes."""
    with pytest.raises(InputError, match=r"features \(6, 3\) to a Gram matrix \(6, 6\).*\(3, 3\)"):
        resolve_kernel(lambda rows: rows.T @ rows)(torch.zeros(6, 3))
    with pytest.raises(InputError, match="it gave float"):
        resolve_kernel(lambda rows: 1.0)(torch.zeros(6, 3))


def test_a_kernel_of_ones_own_gets_wide_features():
    """Half precision never reaches a user's function."""
    seen = []
    resolve_kernel(lambda rows: seen.append(rows.dtype) or rows @ rows.T)(torch.zeros(6, 3).half())
    assert seen == [torch.float32]
