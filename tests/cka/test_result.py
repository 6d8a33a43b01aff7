"""The result as table, plot, file and text; and the calls of other CKA libraries."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from cka_nets import Constant, batches_of, mlp
from torch import nn

from cka import CKA, CKAResult, InputError, LayerError, MissingExtraError


@pytest.fixture
def result():
    """Return a result of two models and two batches."""
    with CKA(mlp(0), mlp(1), model1_name="ours", model2_name="theirs") as cka:
        return cka.compare(batches_of(16, 16), progress=False)


@pytest.fixture
def pyplot():
    """Draw without a display, and close all figures afterwards; skip without matplotlib."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def test_calls_of_other_cka_libraries_run_unchanged():
    """Calls of two other CKA libraries run unchanged, by position and by keyword."""
    model, loader, device = mlp(), batches_of(8, 8), torch.device("cpu")
    with CKA(model, model, device=device) as cka:
        first = cka.compare(loader, progress=False)
    cka = CKA(model, model, model1_name="ResNet18", model2_name="ResNet18", device=device)
    with torch.no_grad():
        second = cka.compare(loader, loader)
    assert torch.equal(first.matrix, second.matrix)
    assert second.model1_name == second.model2_name == "ResNet18"


def test_layers_can_be_given_by_position():
    """Arguments by position have the order of torch-cka: both models, then both lists of layers."""
    found = CKA(mlp(0), mlp(1), ["0"], ["1", "2"]).compare(batches_of(8), progress=False)
    assert (found.model1_layers, found.model2_layers) == (["0"], ["1", "2"])
    assert found.matrix.shape == (1, 2)


def test_two_models_of_one_class_get_numbered_names():
    """Two models of one class are named with numbers; a model compared with itself is not."""
    found = CKA(mlp(0), mlp(1)).compare(batches_of(8), progress=False)
    assert (found.model1_name, found.model2_name) == ("Sequential 1", "Sequential 2")
    same = CKA(mlp(0)).compare(batches_of(8), progress=False)
    assert (same.model1_name, same.model2_name) == ("Sequential", "Sequential")


def test_data_frame_has_the_names_of_layers_and_models(result):
    """In a data frame, rows are the layers of the first model, columns those of the second."""
    frame = result.to_dataframe()
    assert frame.index.name == "ours"
    assert frame.columns.name == "theirs"
    assert frame.loc["0", "2"] == result.matrix[0, 2].item()


def test_plot_has_the_names_of_models_and_layers(result, pyplot):
    """In a plot, the first model is vertical, from bottom to top; the second one is horizontal."""
    axes = result.plot()
    assert axes.get_ylabel() == "ours"
    assert axes.get_xlabel() == "theirs"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert axes.get_ylim()[0] < axes.get_ylim()[1]  # the first layer is at the bottom
    assert result.plot(ax=axes) is axes


@pytest.mark.parametrize(
    ("method", "package"), [("plot", "matplotlib.pyplot"), ("to_dataframe", "pandas")]
)
def test_error_for_a_missing_extra_gives_the_pip_command(result, monkeypatch, method, package):
    """If an optional package is missing, the error names it and the pip command."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pytest-cka-memory\[plot\]'"):
        getattr(result, method)()


@pytest.mark.slow
def test_importing_cka_does_not_import_optional_packages(run_python):
    """Importing cka imports no optional packages, nor the plugin, nor torch's compiler."""
    code = (
        "import sys, cka; "
        "print([m for m in ('matplotlib', 'pandas', 'pytest_cka_memory', 'torch._dynamo') "
        "if m in sys.modules])"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loaded_result_equals_the_saved_one(tmp_path, dtype):
    """A loaded result equals the saved one to the bit: names, counts and matrices with NaN."""
    model, batches = Constant().to(dtype), [one.to(dtype) for one in batches_of(8, 8)]
    with pytest.warns(UserWarning, match="same for every sample"):
        result = CKA(model).compare(batches, progress=False)
    path = tmp_path / "result.json"
    result.save(path)
    loaded = CKAResult.load(str(path))
    for name in ("matrix", "standard_error"):
        assert getattr(loaded, name).dtype == dtype
        assert torch.equal(getattr(loaded, name).nan_to_num(9), getattr(result, name).nan_to_num(9))
    assert loaded.model1_layers == result.model1_layers
    assert (loaded.samples, loaded.batches, loaded.kernel) == (16, 2, "linear")
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is not valid JSON


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": "cka-result/2"}', '{"schema": "cka-result/1", "dtype": "x"}'],
    ids=["empty", "list", "no-schema", "another-version", "unknown-dtype"],
)
def test_loading_a_file_that_is_not_a_saved_result_is_an_error(tmp_path, text):
    """The error for a file that is not a saved result has its path and the expected format."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.json is not a result in .*; pass a file"):
        CKAResult.load(path)


def test_failed_save_leaves_no_partial_file(result, tmp_path):
    """If the target of a save is a directory, it fails and leaves no temporary file."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        result.save(tmp_path / "taken")
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


def test_text_of_a_result_has_a_line_for_each_best_match():
    """The text of a self-comparison matches no layer with itself."""
    matrix = torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 0.75], [0.25, 0.75, 1.0]])
    names = ["conv", "relu", "fc"]
    found = CKAResult(
        matrix, torch.full((3, 3), 0.01), names, names, "Net", "Net", 128, 2, "unbiased", "linear",
        True,
    )  # fmt: skip
    assert found.lines() == [
        "CKA of Net (3 layers) and Net (3 layers): 128 samples in 2 batches, unbiased, linear "
        "kernel",
        "  conv → relu: 0.5000 ± 0.0100",
        "  relu → fc: 0.7500 ± 0.0100",
        "  fc → relu: 0.7500 ± 0.0100",
    ]
    assert str(found) == "\n".join(found.lines())
    assert repr(found) == f"<CKAResult: {found.lines()[0]}>"


def test_layers_of_the_same_name_in_two_models_can_match(result):
    """A layer is excluded as its own match only in a self-comparison."""
    names = {match.layer: match for match in result.best_matches()}
    row = result.matrix[0]
    assert names["0"].match == result.model2_layers[int(row.argmax())]
    assert names["0"].value == row.max().item()


def test_constant_layer_has_no_best_match():
    """A layer whose row is all NaN has no best match and is left out."""
    with pytest.warns(UserWarning, match="same for every sample"):
        result = CKA(Constant()).compare(batches_of(8), progress=False)
    assert result.best_matches() == []


def test_progress_bar_shows_batches_samples_and_rate(capsys):
    """The progress bar is on standard error, and absent if progress=False."""
    CKA(mlp()).compare(batches_of(8, 8), progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "16 samples" in shown
    assert "samples/s" in shown
    CKA(mlp()).compare(batches_of(8, 8), progress=False)
    assert capsys.readouterr().err == ""


def test_two_labels_or_positions_give_the_cka_of_two_layers(result):
    """A result of two labels or positions is the CKA of the first's layer and the second's."""
    assert result["0", "2"] == float(result.matrix[0, 2])
    assert result[1, -1] == result["1", "2"]
    assert result["2", 0] != result["0", 2]


@pytest.mark.parametrize(
    ("key", "rows", "columns"),
    [
        pytest.param("1", [1], [0, 1, 2], id="label"),
        pytest.param(-1, [2], [0, 1, 2], id="position"),
        pytest.param(slice(1, None), [1, 2], [0, 1, 2], id="rows"),
        pytest.param((slice(None), slice(None, None, 2)), [0, 1, 2], [0, 2], id="columns"),
        pytest.param((slice("0", "1"), "2"), [0, 1], [2], id="last-label-included"),
        pytest.param((["2", 0], [1]), [2, 0], [1], id="lists"),
        pytest.param(slice(3, 9), [], [0, 1, 2], id="nothing"),
    ],
)
def test_index_with_a_slice_or_list_gives_a_part_of_the_result(result, key, rows, columns):
    """A slice or list as an index gives the matrix, standard errors and labels of its layers."""
    part = result[key]
    assert torch.equal(part.matrix, result.matrix[rows][:, columns])
    assert torch.equal(part.standard_error, result.standard_error[rows][:, columns])
    assert part.model1_layers == [str(row) for row in rows]
    assert part.model2_layers == [str(column) for column in columns]
    assert (part.model1_name, part.samples) == ("ours", 32)


def test_best_matches_of_a_part_are_among_its_columns(result):
    """A part of a result has every method of a result."""
    (match,) = result["0", ["1", "2"]].best_matches()
    assert (match.layer, match.match in {"1", "2"}) == ("0", True)
    assert match.value == max(result["0", "1"], result["0", "2"])


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        pytest.param("10", LayerError, "no row '10'; did you mean '1' or '0'", id="close"),
        pytest.param(("0", "fc"), LayerError, "no column 'fc'; it has 0, 1, 2", id="far-off"),
        pytest.param(3, LayerError, "row 3 is out of range .* 3 rows; write", id="after-the-end"),
        pytest.param(("0", -4), LayerError, "column -4 is out of range", id="before-the-start"),
        pytest.param((0, 1.5), InputError, "cannot select columns by 1.5; write", id="float"),
        pytest.param(("0", "1", "2"), InputError, "cannot select rows by", id="three"),
        pytest.param(True, InputError, "cannot select rows by True", id="bool"),
    ],
)
def test_index_of_a_layer_that_does_not_exist_is_an_error(result, key, error, message):
    """If an index names no layer of a result, the error suggests labels, or gives the range."""
    with pytest.raises(error, match=message):
        result[key]


def test_result_is_not_iterable(result):
    """A result is not iterable; iteration would yield results of one row until an error."""
    with pytest.raises(TypeError, match="not iterable"):
        list(result)


def test_added_results_are_those_of_all_batches(tmp_path):
    """A saved result and that of further batches give the result of all batches."""
    batches = batches_of(16, 16, 12, 20)
    cka = CKA(mlp(0), mlp(1), device="cpu")
    cka.compare(batches[:2], progress=False).save(tmp_path / "first.json")
    rest = cka.compare(batches[2:], progress=False, null=9)
    both = CKAResult.load(tmp_path / "first.json") + rest
    whole = cka.compare(batches, progress=False)
    torch.testing.assert_close(both.matrix, whole.matrix)
    torch.testing.assert_close(both.standard_error, whole.standard_error)
    assert (both.samples, both.batches, both.calibration) == (64, 4, None)
    parts = whole["0"] + whole["0"]
    torch.testing.assert_close(parts.matrix, whole.matrix[:1])
    with pytest.raises(InputError, match="that differ in model2_layers cannot be added"):
        whole[:, :2] + whole
    exact = CKA(mlp(), estimator="exact", device="cpu").compare(batches, progress=False)
    with pytest.raises(
        InputError,
        match="contain their sums over batches, because of estimator='exact' or an incomplete",
    ):
        exact + exact


def test_added_results_of_tiny_features_keep_their_exponents(tmp_path):
    """Sums of features of 1e-30 are saved with their exponents."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))
    batches = [batch * 1e-30 for batch in batches_of(16, 16, 16)]
    cka = CKA(model, device="cpu")
    cka.compare(batches[:1], progress=False).save(tmp_path / "first.json")
    both = CKAResult.load(tmp_path / "first.json") + cka.compare(batches[1:], progress=False)
    torch.testing.assert_close(both.matrix, cka.compare(batches, progress=False).matrix)


def test_result_is_an_array_and_a_dataset():
    """NumPy gets the matrix, and xarray all matrices with the layers as coordinates."""
    numpy = pytest.importorskip("numpy")
    result = CKA(mlp(), device="cpu").compare(batches_of(16, 16), progress=False, null=9)
    assert (numpy.asarray(result) == result.matrix.numpy()).all()
    assert numpy.asarray(result, dtype="float64").dtype == numpy.float64
    pytest.importorskip("xarray")
    dataset = result.to_xarray()
    assert float(dataset.cka.sel(model1_layer="0", model2_layer="2")) == result["0", "2"]
    assert set(dataset) == {"cka", "standard_error", "z", "p", "p_best"}
    assert dataset.attrs["samples"] == 32
