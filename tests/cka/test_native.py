"""The compiled kernel against float64, and inputs for which torch is used instead."""

from __future__ import annotations

import threading
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from cka import functional
from cka.functional.kernels import linear_gram
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.skipif(
    functional._vector_floats() == 0,
    reason="cka.functional._gram: not compiled, or not supported by this processor",
)


@pytest.fixture(params=[1, 2, 5], ids="threads-{}".format)
def threads(request):
    """Compute with different numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def shifted_gram(rows, samples_for_centre=8):
    """Return the Gram matrix of the shifted rows in float64."""
    rows = rows.double()
    rows = rows - rows[:samples_for_centre].mean(0)
    return rows @ rows.T


def assert_right(gram, rows, tolerance=5e-7):
    """Check the error, relative to the largest squared row, and the symmetry."""
    error = (gram - shifted_gram(rows)).abs().max()
    assert error <= tolerance * rows.double().square().sum(1).max()
    assert torch.equal(gram, gram.T)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("columns", [1, 7, 8, 16, 17, 255, 256, 257, 3000])
def test_every_row_and_column_is_multiplied(samples, columns):
    """Every row and column is multiplied, for sizes around those of vectors, tiles and blocks."""
    rows = torch.randn(samples, columns) + 1
    assert_right(functional.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_result_is_correct_with_any_number_of_threads(threads):
    """The result is right with any number of threads, also if some of them have no work."""
    for columns in (100, 600, 5000):
        rows = torch.rand(40, columns)
        assert_right(functional.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_rows_of_a_larger_tensor_are_read_with_their_stride():
    """Rows that are columns of a wider tensor, or every other row, are read with their stride."""
    whole = torch.randn(60, 3000)
    for rows in (whole[:, 100:2000], whole[::2, 1:]):
        assert_right(functional.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_equal_rows_have_equal_entries():
    """Equal rows have entries equal to the bit, so that constant outputs can be recognised."""
    gram = functional.gram(torch.randn(1, 3000).expand(21, -1), 8)
    assert gram.max() == gram.min()


@pytest.mark.usefixtures("vectors")
def test_features_and_memory_around_them_are_not_changed():
    """The kernel changes neither the features nor the rest of the tensor that they are part of."""
    whole = torch.randn(70, 2000)
    before = whole.clone()
    functional.gram(whole[3:67, 5:1900], 8)
    assert torch.equal(whole, before)


def test_features_without_columns_or_samples_are_accepted():
    """Features without columns give zeros, and features without samples give no entries."""
    assert torch.equal(functional.gram(torch.empty(5, 0), 8), torch.zeros(5, 5))
    assert functional.gram(torch.empty(0, 5), 8).shape == (0, 0)


@pytest.mark.parametrize(("samples", "columns"), [(64, 50_000), (400, 1000), (9, 40)])
def test_neither_result_nor_working_space_depends_on_the_number_of_threads(samples, columns):
    """With any number of threads results are equal to the bit, and the space is bounded.

    It is at most 1 MB and five Gram matrices.
    """
    rows = torch.randn(samples, columns)
    before = torch.get_num_threads()
    probe = MemoryProbe("cpu")
    grams, peaks = [], set()
    try:
        for number in (1, 2, 8):
            torch.set_num_threads(number)
            with probe.measure() as region:
                grams.append(functional.gram(rows, 8))
            peaks.add(region.peak_increase_bytes)
    finally:
        torch.set_num_threads(before)
    assert_right(grams[0], rows)
    assert all(torch.equal(gram, grams[0]) for gram in grams)
    assert len(peaks) == 1
    assert peaks.pop() <= grams[0].nbytes + MB + 5 * grams[0].nbytes


def test_python_threads_can_use_the_kernel_at_the_same_time():
    """Four Python threads use the kernel at the same time, each with features of its own."""
    features = [torch.randn(48, 20_000) for _ in range(4)]
    found = {}

    def run(index):
        for _ in range(5):
            found[index] = functional.gram(features[index], 8)

    running = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for index, rows in enumerate(features):
        assert_right(found[index], rows)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.randn(8, 20, dtype=torch.float64), id="float64"),
        pytest.param(torch.randn(8, 20).bfloat16(), id="bfloat16"),
        pytest.param(torch.randn(20, 8).T, id="transposed"),
        pytest.param(torch.randn(8, 20, requires_grad=True), id="differentiated"),
        pytest.param(torch.nn.Parameter(torch.randn(8, 20), requires_grad=False), id="subclass"),
        pytest.param(torch.randn(8, 20, 2).select(-1, 0), id="every-other-column"),
    ],
)
def test_torch_is_used_if_rows_are_not_plain_float32_in_memory(rows):
    """If rows are not plain float32 in memory, torch multiplies them, correctly."""
    assert functional.gram(rows, 8) is None
    gram = linear_gram(rows).detach()
    assert (gram.double() - shifted_gram(rows.detach())).abs().max() < 0.05 * gram.abs().max()


def test_torch_is_used_for_rows_with_the_negative_bit():
    """Rows with the negative bit have the opposite sign in memory, so torch multiplies them."""
    rows = torch._neg_view(torch.randn(8, 20))
    assert functional.gram(rows, 8) is None
    assert_right(linear_gram(rows), rows, tolerance=5e-6)


def test_forward_mode_derivative_is_computed():
    """The kernel would ignore the tangent of a forward-mode derivative, so torch is used."""
    rows, tangent = torch.randn(8, 20), torch.randn(8, 20)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, tangent)
        found = forward_ad.unpack_dual(linear_gram(dual)).tangent
    assert found is not None
    step = 1e-3
    ahead, behind = (shifted_gram(rows.double() + sign * step * tangent) for sign in (1, -1))
    assert torch.allclose(found.double(), (ahead - behind) / (2 * step), atol=1e-3)


def test_torch_is_used_inside_torch_func_transforms():
    """Tensors inside a torch.func transform have no memory, so torch multiplies them."""
    rows = torch.randn(8, 20, dtype=torch.float64)
    expected = torch.func.grad(lambda x: linear_gram(x).square().sum())(rows)
    found = torch.func.grad(lambda x: linear_gram(x).square().sum())(rows.float())
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.max()))


def test_torch_is_used_for_fake_tensors():
    """Tensors that are created under FakeTensorMode have no memory, so torch multiplies them."""
    with FakeTensorMode():
        assert linear_gram(torch.randn(8, 20)).shape == (8, 8)


@pytest.mark.parametrize("missing", ["file", "openmp", "switched-off"])
def test_torch_is_used_if_the_library_cannot_be_loaded(monkeypatch, tmp_path, missing):
    """If the library is off, not compiled, or needs an OpenMP that torch has not, torch is used."""
    broken = tmp_path / "_gram.so"
    broken.write_bytes(b"not a library")
    spec = (
        ModuleSpec("cka.functional._gram", None, origin=str(broken))
        if missing == "openmp"
        else None
    )
    if missing == "switched-off":
        monkeypatch.setenv("CKA_NATIVE", "0")
    else:
        monkeypatch.setattr(functional, "find_spec", lambda _: spec)
    for cached in (functional._library, functional._vector_floats):
        cached.cache_clear()
    try:
        rows = torch.randn(16, 300)
        assert functional.gram(rows, 8) is None
        assert_right(linear_gram(rows), rows, tolerance=5e-6)
    finally:
        monkeypatch.undo()
        for cached in (functional._library, functional._vector_floats):
            cached.cache_clear()
    assert functional.gram(rows, 8) is not None
