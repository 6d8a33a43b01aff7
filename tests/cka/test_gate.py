"""The gate for converted models finds the first layer that differs."""

from __future__ import annotations

import copy

import pytest
import torch
from cka_nets import InPlace, batches_of, mlp
from torch import nn

from cka import LayerError, SettingError, same_representations


def deep(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


DATA = batches_of(64, 64)


def test_a_copy_agrees_in_every_layer():
    """A copy of a model has CKA 1 in every layer, and so has one in half precision, nearly."""
    model = deep()
    agreement = same_representations(copy.deepcopy(model), model, DATA)
    assert agreement
    assert agreement.first_difference is None
    assert min(agreement.values.values()) == pytest.approx(1)
    half = same_representations(copy.deepcopy(model).bfloat16(), model, DATA, cast_inputs=True)
    assert half, half
    assert str(half).startswith("13 layers have a CKA of at least 0.999 with the reference (lowest")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            lambda layer: layer.weight.data.copy_(layer.weight.mT.clone()), id="transposed"
        ),
        pytest.param(lambda layer: layer.weight.data[3:].zero_(), id="rows-dropped"),
        pytest.param(
            lambda layer: layer.weight.data.copy_(layer.weight.data.round()), id="rounded"
        ),
    ],
)
def test_first_damaged_layer_is_named(damage):
    """Of a wrong weight and all layers behind it, the message names the first."""
    model, converted = deep(), deep()
    damage(converted[2][0])
    agreement = same_representations(converted, model, DATA)
    assert not agreement
    assert agreement.first_difference == "2.0"
    assert "2.0 is the first of " in str(agreement)
    assert "1, the layer before, has 1.000000; look at what 2.0 computes" in str(agreement)
    with pytest.raises(AssertionError, match=r"Agreement: 2\.0 is the first"):
        assert agreement, repr(agreement)


def test_layers_of_other_names_are_compared_by_a_function():
    """A ported model has other names; without a function they have no layer in common."""
    model = deep()
    ported = nn.ModuleDict({f"block{at}": part for at, part in enumerate(copy.deepcopy(model))})
    ported.forward = lambda x: nn.Sequential(*ported.values())(x)
    with pytest.raises(LayerError, match=r"no layer name in common.*; pass rename="):
        same_representations(ported, model, DATA)
    agreement = same_representations(
        ported, model, DATA, rename=lambda name: name.removeprefix("block")
    )
    assert agreement
    assert len(agreement.values) == 13


def test_layers_of_one_model_only_and_constant_ones_are_named():
    """What is not judged is in the text."""
    model, converted = InPlace(), InPlace()
    del converted.bn
    converted.forward = lambda x: converted.relu(converted.conv(x))
    images = batches_of(16, features=(2, 8, 8))
    agreement = same_representations(converted, model, images, at_least=0.5)
    assert agreement.only_in_one == ["bn"]
    assert "only one model has bn" in str(agreement)
    dead, alive = mlp(), mlp()
    dead[2].weight.data.zero_()
    agreement = same_representations(dead, alive, DATA)
    assert (agreement.first_difference, agreement.values["2"]) == ("2", 0)
    agreement = same_representations(copy.deepcopy(dead), dead, DATA)
    assert agreement
    assert agreement.constant == ["2"]
    assert "not judged because their output is constant: 2" in str(agreement)


@pytest.mark.parametrize("at_least", [0, 1.5, -1])
def test_impossible_limit_is_an_error(at_least):
    """A limit is above 0 and at most 1."""
    with pytest.raises(SettingError, match="at_least must be above 0 and at most 1, got"):
        same_representations(mlp(), mlp(), DATA, at_least=at_least)
