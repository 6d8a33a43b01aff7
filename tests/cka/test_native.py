"""The compiled kernel against float64, and where it leaves the work to torch."""

from __future__ import annotations

import threading
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from cka.functional import native
from cka.functional.kernels import linear_gram
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.skipif(
    native._vector_floats() == 0,
    reason="cka.functional._gram was not compiled, or not for this processor",
)


@pytest.fixture(params=[1, 2, 5], ids="threads-{}".format)
def threads(request):
    """Compute in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def shifted(rows, samples_for_centre=8):
    """The matrix in float64."""
    rows = rows.double()
    rows = rows - rows[:samples_for_centre].mean(0)
    return rows @ rows.T


def assert_right(gram, rows, tolerance=5e-7):
    """To a few units in the last place of float32, of the longest row's square."""
    error = (gram - shifted(rows)).abs().max()
    assert error <= tolerance * rows.double().square().sum(1).max()
    assert torch.equal(gram, gram.T)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("columns", [1, 7, 8, 16, 17, 255, 256, 257, 3000])
def test_no_row_or_column_is_left_out(samples, columns):
    """On either side of every width of vectors, tiles, panels and blocks."""
    rows = torch.randn(samples, columns) + 1
    assert_right(native.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_threads_share_the_columns(threads):
    """Any number of them, of which some may have nothing to do."""
    for columns in (100, 600, 5000):
        rows = torch.rand(40, columns)
        assert_right(native.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_rows_may_lie_apart():
    """Columns of a wider tensor, and every other sample of it."""
    whole = torch.randn(60, 3000)
    for rows in (whole[:, 100:2000], whole[::2, 1:]):
        assert_right(native.gram(rows, 8), rows)


@pytest.mark.usefixtures("vectors")
def test_equal_rows_have_equal_entries():
    """All the same to the bit, by which constant outputs are known."""
    gram = native.gram(torch.randn(1, 3000).expand(21, -1), 8)
    assert gram.max() == gram.min()


@pytest.mark.usefixtures("vectors")
def test_nothing_beside_the_result_is_written():
    """Neither the features, nor what lies around them."""
    whole = torch.randn(70, 2000)
    before = whole.clone()
    native.gram(whole[3:67, 5:1900], 8)
    assert torch.equal(whole, before)


def test_nothing_is_a_matrix_too():
    """No columns give zeros; no samples no entries."""
    assert torch.equal(native.gram(torch.empty(5, 0), 8), torch.zeros(5, 5))
    assert native.gram(torch.empty(0, 5), 8).shape == (0, 0)


@pytest.mark.parametrize(("samples", "columns"), [(64, 50_000), (64, 3000), (400, 1000)])
def test_many_threads_take_little_space(samples, columns):
    """A sixteenth of the features, or a megabyte and five Gram matrices."""
    rows = torch.randn(samples, columns)
    before = torch.get_num_threads()
    torch.set_num_threads(200)
    probe = MemoryProbe("cpu")
    try:
        with probe.measure() as region:
            gram = native.gram(rows, 8)
    finally:
        torch.set_num_threads(before)
    assert_right(gram, rows)
    most = max(rows.nbytes // 16, MB + 5 * gram.nbytes)
    assert region.peak_increase_bytes <= gram.nbytes + most


def test_python_threads_do_not_share_their_space():
    """Four at once, each its own features."""
    features = [torch.randn(48, 20_000) for _ in range(4)]
    found = {}

    def run(index):
        for _ in range(5):
            found[index] = native.gram(features[index], 8)

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
def test_what_does_not_lie_as_float32_is_left_to_torch(rows):
    """And is right all the same."""
    assert native.gram(rows, 8) is None
    gram = linear_gram(rows).detach()
    assert (gram.double() - shifted(rows.detach())).abs().max() < 0.05 * gram.abs().max()


def test_negated_rows_are_left_to_torch():
    """Numbers that are to be read with the other sign."""
    rows = torch._neg_view(torch.randn(8, 20))
    assert native.gram(rows, 8) is None
    assert_right(linear_gram(rows), rows, tolerance=5e-6)


def test_forward_derivatives_are_kept():
    """A tangent is nothing that the numbers in memory tell of."""
    rows, tangent = torch.randn(8, 20), torch.randn(8, 20)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, tangent)
        found = forward_ad.unpack_dual(linear_gram(dual)).tangent
    assert found is not None
    step = 1e-3
    ahead, behind = (shifted(rows.double() + sign * step * tangent) for sign in (1, -1))
    assert torch.allclose(found.double(), (ahead - behind) / (2 * step), atol=1e-3)


def test_what_torch_func_differentiates_is_left_to_torch():
    """Its tensors have no memory of their own."""
    rows = torch.randn(8, 20, dtype=torch.float64)
    expected = torch.func.grad(lambda x: linear_gram(x).square().sum())(rows)
    found = torch.func.grad(lambda x: linear_gram(x).square().sum())(rows.float())
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.max()))


def test_fake_tensors_are_left_to_torch():
    """In a mode where none has memory."""
    with FakeTensorMode():
        assert linear_gram(torch.randn(8, 20)).shape == (8, 8)


@pytest.mark.parametrize("lacking", ["file", "openmp"])
def test_without_the_library_torch_does_it_all(monkeypatch, tmp_path, lacking):
    """Where it was not compiled, or what it needs of torch is not there."""
    broken = tmp_path / "_gram.so"
    broken.write_bytes(b"no library")
    spec = (
        ModuleSpec("cka.functional._gram", None, origin=str(broken))
        if lacking == "openmp"
        else None
    )
    monkeypatch.setattr(native, "find_spec", lambda _: spec)
    for cached in (native._library, native._vector_floats):
        cached.cache_clear()
    try:
        rows = torch.randn(16, 300)
        assert native.gram(rows, 8) is None
        assert_right(linear_gram(rows), rows, tolerance=5e-6)
    finally:
        monkeypatch.undo()
        for cached in (native._library, native._vector_floats):
            cached.cache_clear()
    assert native.gram(rows, 8) is not None
