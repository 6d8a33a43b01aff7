"""Selecting layers by name, index, glob, type and predicate."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from cka_nets import Residual, batches_of, mlp
from torch import nn

from cka import CKA, LayerError
from cka.capture import Call, select


class TwoBlocks(nn.Module):
    """Two blocks of two layers each, and a container."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.heads = nn.ModuleList([nn.Flatten()])


def names(layers):
    return list(select(TwoBlocks(), layers).modules)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        pytest.param("conv1", ["conv1"], id="name"),
        pytest.param(["layer2", "conv1"], ["layer2", "conv1"], id="names"),
        pytest.param(0, ["conv1"], id="index"),
        pytest.param(-1, ["heads.0"], id="last-index"),
        pytest.param("layer?", ["layer1", "layer2"], id="glob"),
        pytest.param("layer?.0", ["layer1.0", "layer2.0"], id="glob-inside"),
        pytest.param("layer1.*", ["layer1.0", "layer1.1"], id="glob-of-children"),
        pytest.param("*", ["conv1", "layer1", "layer2"], id="glob-of-one-level"),
        pytest.param("*.1", ["layer1.1", "layer2.1"], id="one-level-above"),
        pytest.param("layer[12]", ["layer1", "layer2"], id="glob-of-characters"),
        pytest.param("layer2.**", ["layer2.0", "layer2.1"], id="any-level-inside"),
        pytest.param("**.0", ["layer1.0", "layer2.0", "heads.0"], id="any-level-above"),
        pytest.param("**.conv1", ["conv1"], id="no-level-above"),
        pytest.param("layer1.**.1", ["layer1.1"], id="no-level-between"),
        pytest.param(
            "**",
            [
                "conv1",
                "layer1",
                "layer1.0",
                "layer1.1",
                "layer2",
                "layer2.0",
                "layer2.1",
                "heads.0",
            ],
            id="every-layer",
        ),
        pytest.param(nn.ReLU, ["layer1.1", "layer2.1"], id="type"),
        pytest.param(lambda module: isinstance(module, nn.ReLU), ["layer1.1", "layer2.1"], id="p1"),
        pytest.param(lambda name, module: name.endswith("2"), ["layer2"], id="predicate-of-name"),
        pytest.param([nn.ReLU, "conv1", 0], ["layer1.1", "layer2.1", "conv1"], id="mixed"),
        pytest.param("", [""], id="the-model-itself"),
    ],
)
def test_selector_selects_its_layers(layers, expected):
    """Layers can be selected by selectors of every kind, alone and in a list."""
    assert names(layers) == expected


def test_predicate_without_a_signature_gets_the_module():
    """A predicate without a signature, as of ``operator`` before Python 3.13, gets the module."""
    model = TwoBlocks().eval()
    model.layer2.train()
    found = select(model, attrgetter("training")).modules
    assert list(found) == ["layer2", "layer2.0", "layer2.1"]


def test_predicate_that_takes_any_arguments_gets_the_module():
    """``(*args, **kwargs)`` names no second parameter; ``operator`` of Python 3.12 may have it."""
    got = []
    select(TwoBlocks(), lambda *args, **kwargs: got.append((args, kwargs)) or True)
    assert {(len(args), len(kwargs)) for args, kwargs in got} == {(1, 0)}


def test_none_selects_all_layers_except_containers_and_the_model():
    """By default all layers are selected except containers, which
    are never called, and the model.
    """
    assert names(None) == [
        "conv1", "layer1", "layer1.0", "layer1.1", "layer2", "layer2.0", "layer2.1", "heads.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        pytest.param("conv2", "no layer 'conv2'; did you mean 'conv1'", id="close-match"),
        pytest.param("attention", "no layer 'attention'; the model has e.g. 'conv1'", id="far-off"),
        pytest.param("block*", r"no layer 'block\*'.*any number of levels; the", id="nothing"),
        pytest.param("*.*.1", r"one level and .* levels: write '\*\*\.\*\*\.1'", id="too-deep"),
        pytest.param("0", r"no layer '0'", id="number-as-text"),
        pytest.param("?", r"any number of levels: write '\*\*\.\?'", id="not-at-the-top"),
        pytest.param(8, "index 8 is out of range for .* 8 layers; write", id="one-past-the-end"),
        pytest.param(-9, "index -9 is out of range", id="one-before-the-start"),
        pytest.param(nn.LSTM, "no layer matches LSTM", id="type"),
        pytest.param(lambda module: False, "no layer matches <lambda>", id="predicate"),
        pytest.param([], r"selection is empty, got \[\]; write None", id="nothing"),
        pytest.param(True, "cannot select layers by True", id="bool"),
        pytest.param(1.5, "cannot select layers by 1.5", id="float"),
        pytest.param("conv1:x", "no layer 'conv1:x'", id="no-call-number"),
    ],
)
def test_selector_that_matches_nothing_is_an_error(layers, message):
    """A selector without a match is an error when the CKA is created, and names some layers."""
    with pytest.raises(LayerError, match=message):
        CKA(TwoBlocks(), model1_layers=layers)


def test_star_selects_blocks_and_two_stars_also_what_is_inside_them():
    """``encoder.layers.*`` selects the blocks, and two stars also select what is inside them."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Module()
    model.encoder = nn.TransformerEncoder(layer, 2)
    assert list(select(model, "encoder.layers.*").modules) == [
        "encoder.layers.0", "encoder.layers.1",
    ]  # fmt: skip
    inside = list(select(model, "encoder.layers.**").modules)
    assert "encoder.layers.0" in inside
    assert "encoder.layers.1.self_attn.out_proj" in inside


def test_rows_have_the_order_of_the_selectors():
    """Rows have the order of the selectors, and those of one selector that of execution."""
    model, batches = mlp(), batches_of(8)
    listed = CKA(model, model1_layers=["2", "0"]).compare(batches, progress=False)
    assert listed.model1_layers == listed.model2_layers == ["2", "0"]
    assert CKA(model, model1_layers="*").compare(batches, progress=False).model1_layers == [
        "0", "1", "2",
    ]  # fmt: skip


def test_one_call_can_be_selected_by_its_label():
    """The label relu:1 of a result selects the second call only, and relu:0 the first."""
    batches = batches_of(8)
    both = CKA(Residual()).compare(batches, progress=False)
    one = CKA(Residual(), model1_layers="relu:1", model2_layers=["fc2", "relu:0"])
    one = one.compare(batches, progress=False)
    assert one.model1_layers == ["relu:1"]
    assert one.model2_layers == ["fc2", "relu"]
    row = both.model1_layers.index("relu:1")
    columns = [both.model2_layers.index(name) for name in one.model2_layers]
    torch.testing.assert_close(one.matrix[0], both.matrix[row, columns])


def test_different_layers_of_one_model_are_compared_in_one_pass(count_passes):
    """A self-comparison with two selections runs the model once per batch."""
    model = mlp()
    passes = count_passes(model)
    result = CKA(model, model, "0", ["1", "2"]).compare(batches_of(8, 8), progress=False)
    assert result.matrix.shape == (1, 2)
    assert passes == [2, 8, 8]


def test_module_with_two_names_can_be_selected_by_either():
    """A module with two names is listed once, and can be selected by either."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model.add_module("again", model[0])
    assert list(select(model, None).modules) == ["0", "1"]
    assert list(select(model, "again").modules) == ["again"]


def test_label_has_a_number_from_the_second_call_on():
    """From the second call of a module on, its label has a number: relu, relu:1, relu:2."""
    assert [Call("relu", number).label for number in range(3)] == ["relu", "relu:1", "relu:2"]
