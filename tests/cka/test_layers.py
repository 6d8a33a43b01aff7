"""Selecting layers by name, index, glob, type and predicate."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from cka_nets import Residual, batches_of, mlp
from torch import nn

from cka import CKA, LayerError
from cka.capture.layers import Call, select


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.heads = nn.ModuleList([nn.Flatten()])


def names(layers):
    return list(select(Two(), layers).modules)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        pytest.param("conv1", ["conv1"], id="name"),
        pytest.param(["layer2", "conv1"], ["layer2", "conv1"], id="names"),
        pytest.param(0, ["conv1"], id="index"),
        pytest.param(-1, ["heads.0"], id="last-index"),
        pytest.param("layer?", ["layer1", "layer2"], id="glob"),
        pytest.param("layer?.0", ["layer1.0", "layer2.0"], id="glob-inside"),
        pytest.param(nn.ReLU, ["layer1.1", "layer2.1"], id="type"),
        pytest.param(lambda module: isinstance(module, nn.ReLU), ["layer1.1", "layer2.1"], id="p1"),
        pytest.param(lambda name, module: name.endswith("2"), ["layer2"], id="predicate-of-name"),
        pytest.param([nn.ReLU, "conv1", 0], ["layer1.1", "layer2.1", "conv1"], id="mixed"),
        pytest.param("", [""], id="the-model-itself"),
    ],
)
def test_a_selector_finds_its_layers(layers, expected):
    """Each kind of selector, alone and mixed."""
    assert names(layers) == expected


def test_a_predicate_that_tells_no_signature_is_given_the_module():
    """As those of ``operator`` do not, before Python 3.13."""
    model = Two().eval()
    model.layer2.train()
    found = select(model, attrgetter("training")).modules
    assert list(found) == ["layer2", "layer2.0", "layer2.1"]


def test_none_selects_every_layer_but_containers_and_the_model():
    """What is never called, and the model as a whole, are not rows by default."""
    assert names(None) == [
        "conv1", "layer1", "layer1.0", "layer1.1", "layer2", "layer2.0", "layer2.1", "heads.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        pytest.param("conv2", "no layer 'conv2'; did you mean 'conv1'", id="close-match"),
        pytest.param("attention", "no layer 'attention'; the model has e.g. 'conv1'", id="far-off"),
        pytest.param("block*", r"no layer 'block\*'", id="glob-of-nothing"),
        pytest.param(8, "index 8 is out of range; the model has 8 layers", id="one-past-the-end"),
        pytest.param(-9, "index -9 is out of range", id="one-before-the-start"),
        pytest.param(nn.LSTM, "no layer matches LSTM", id="type"),
        pytest.param(lambda module: False, "no layer matches <lambda>", id="predicate"),
        pytest.param([], "selection is empty", id="nothing"),
        pytest.param(True, "cannot select layers by True", id="bool"),
        pytest.param(1.5, "cannot select layers by 1.5", id="float"),
        pytest.param("conv1:x", "no layer 'conv1:x'", id="no-call-number"),
    ],
)
def test_a_selector_that_names_nothing_is_refused(layers, message):
    """Refused at once, before any data is touched, with what exists."""
    with pytest.raises(LayerError, match=message):
        CKA(Two(), model1_layers=layers)


def test_rows_follow_the_order_asked_for():
    """An explicit list is kept in its order; a glob follows execution."""
    model, batches = mlp(), batches_of(8)
    asked = CKA(model, model1_layers=["2", "0"]).compare(batches, progress=False)
    assert asked.model1_layers == asked.model2_layers == ["2", "0"]
    assert CKA(model, model1_layers="*").compare(batches, progress=False).model1_layers == [
        "0", "1", "2",
    ]  # fmt: skip


def test_one_call_can_be_selected_by_its_label():
    """What a result calls a later call selects just that; relu:0 is the first call alone."""
    batches = batches_of(8)
    both = CKA(Residual()).compare(batches, progress=False)
    one = CKA(Residual(), model1_layers="relu:1", model2_layers=["fc2", "relu:0"])
    one = one.compare(batches, progress=False)
    assert one.model1_layers == ["relu:1"]
    assert one.model2_layers == ["fc2", "relu"]
    row = both.model1_layers.index("relu:1")
    columns = [both.model2_layers.index(name) for name in one.model2_layers]
    torch.testing.assert_close(one.matrix[0], both.matrix[row, columns])


def test_different_layers_of_one_model_are_compared_in_one_pass():
    """A self-comparison with two selections runs the model once."""
    model = mlp()
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    result = CKA(model, model, "0", ["1", "2"]).compare(batches_of(8, 8), progress=False)
    assert result.matrix.shape == (1, 2)
    assert len(passes) == 2


def test_a_module_with_two_names_answers_to_both():
    """Shared modules are listed once, and found under either name."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model.add_module("again", model[0])
    assert list(select(model, None).modules) == ["0", "1"]
    assert list(select(model, "again").modules) == ["again"]


def test_labels_number_the_calls_from_the_second_on():
    """relu, relu:1, relu:2."""
    assert [Call("relu", number).label for number in range(3)] == ["relu", "relu:1", "relu:2"]
