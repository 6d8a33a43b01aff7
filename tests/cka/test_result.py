"""The result: tables, pictures, files, lines; and the seed's way of asking for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from cka_nets import Constant, batches_of, mlp

from cka import CKA, CKAResult, InputError, MissingExtraError


@pytest.fixture
def result():
    """Two models over two batches."""
    with CKA(mlp(0), mlp(1), model1_name="ours", model2_name="theirs") as cka:
        return cka.compare(batches_of(16, 16), progress=False)


def test_the_seeds_calls_run_unchanged():
    """Both libraries' ways of the seed notebook, position and keywords."""
    model, loader, device = mlp(), batches_of(8, 8), torch.device("cpu")
    with CKA(model, model, device=device) as cka:
        first = cka.compare(loader, progress=False)
    cka = CKA(model, model, model1_name="ResNet18", model2_name="ResNet18", device=device)
    with torch.no_grad():
        second = cka.compare(loader, loader)
    assert torch.equal(first.matrix, second.matrix)
    assert second.model1_name == second.model2_name == "ResNet18"


def test_layers_can_be_given_by_position():
    """torch-cka's order: both models, then both layer lists."""
    found = CKA(mlp(0), mlp(1), ["0"], ["1", "2"]).compare(batches_of(8), progress=False)
    assert (found.model1_layers, found.model2_layers) == (["0"], ["1", "2"])
    assert found.matrix.shape == (1, 2)


def test_models_of_one_class_are_told_apart():
    """Without names, the axes of a picture still differ."""
    found = CKA(mlp(0), mlp(1)).compare(batches_of(8), progress=False)
    assert (found.model1_name, found.model2_name) == ("Sequential 1", "Sequential 2")
    same = CKA(mlp(0)).compare(batches_of(8), progress=False)
    assert (same.model1_name, same.model2_name) == ("Sequential", "Sequential")


def test_the_frame_is_named_after_layers_and_models(result):
    """Rows are the first model's layers, columns the second's."""
    frame = result.to_dataframe()
    assert frame.index.name == "ours"
    assert frame.columns.name == "theirs"
    assert frame.loc["0", "2"] == result.matrix[0, 2].item()


def test_the_picture_names_models_and_layers(result):
    """First model upwards, second to the right, every layer on its tick."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = result.plot()
    assert axes.get_ylabel() == "ours"
    assert axes.get_xlabel() == "theirs"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert axes.images[0].origin == "lower"
    assert result.plot(ax=axes) is axes
    matplotlib.pyplot.close("all")


def test_a_picture_of_very_many_layers_names_some():
    """More than 80 names would not be readable."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    names = [f"layer{number}" for number in range(161)]
    big = CKAResult(
        torch.eye(161), torch.zeros(161, 161), names, names, "a", "b", 8, 2, "unbiased", "linear",
        False,
    )  # fmt: skip
    shown = [label.get_text() for label in big.plot().get_xticklabels()]
    assert shown == names[::3]
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize(
    ("method", "package"), [("plot", "matplotlib.pyplot"), ("to_dataframe", "pandas")]
)
def test_a_missing_extra_is_named_with_its_command(result, monkeypatch, method, package):
    """The error is what to type."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r'pip install "pytest-cka-memory\[plot\]"'):
        getattr(result, method)()


def test_importing_cka_imports_neither_matplotlib_nor_pandas():
    """Heavy, optional imports wait until they are needed; and the plugin is not ours to load."""
    code = (
        "import sys, cka; "
        "print([m for m in ('matplotlib', 'pandas', 'pytest_cka_memory', 'torch._dynamo') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_result_comes_back_bit_by_bit(tmp_path, dtype):
    """Names, counts and every digit, NaN included."""
    model, batches = Constant().to(dtype), [one.to(dtype) for one in batches_of(8, 8)]
    with pytest.warns(UserWarning, match="same for every sample"):
        result = CKA(model).compare(batches, progress=False)
    path = tmp_path / "result.json"
    result.save(path)
    back = CKAResult.load(str(path))
    for name in ("matrix", "standard_error"):
        assert getattr(back, name).dtype == dtype
        assert torch.equal(getattr(back, name).nan_to_num(9), getattr(result, name).nan_to_num(9))
    assert back.model1_layers == result.model1_layers
    assert (back.samples, back.batches, back.kernel) == (16, 2, "linear")
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN would not be JSON


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": "cka-result/2"}', '{"schema": "cka-result/1", "dtype": "x"}'],
    ids=["empty", "list", "nothing", "another-version", "odd-dtype"],
)
def test_what_is_no_saved_result_is_refused(tmp_path, text):
    """By its path."""
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"odd\.json is no result saved by CKAResult\.save"):
        CKAResult.load(path)


def test_a_result_that_cannot_be_written_leaves_nothing_behind(result, tmp_path):
    """The file is whole or not there."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        result.save(tmp_path / "taken")
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


def test_each_layer_has_a_line_with_its_best_match():
    """Golden lines, the layer itself and constant layers left out."""
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


def test_two_models_match_layers_of_the_same_name(result):
    """Only in a self-comparison is a layer kept from matching itself."""
    names = {match.layer: match for match in result.best_matches()}
    row = result.matrix[0]
    assert names["0"].match == result.model2_layers[int(row.argmax())]
    assert names["0"].value == row.max().item()


def test_a_constant_layer_matches_nothing():
    """A row of NaN has no best match."""
    with pytest.warns(UserWarning, match="same for every sample"):
        result = CKA(Constant()).compare(batches_of(8), progress=False)
    assert result.best_matches() == []


def test_the_bar_shows_batches_samples_and_rate(capsys):
    """On standard error, and not at all when not wanted."""
    CKA(mlp()).compare(batches_of(8, 8), progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "16 samples" in shown
    assert "samples/s" in shown
    CKA(mlp()).compare(batches_of(8, 8), progress=False)
    assert capsys.readouterr().err == ""
