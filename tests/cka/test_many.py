"""compare_many: several models in one pass give the results of separate comparisons."""

from __future__ import annotations

import copy
from weakref import ref

import pytest
import torch
from cka_nets import Constant, InPlace, batches_of, mlp
from torch import nn

from cka import CKA, CKAResults, CKAWarning, InputError, LayerError, SettingError, compare_many


def three_models():
    """Return an MLP, and two others of it with other weights."""
    return {"epoch 1": mlp(0), "epoch 2": mlp(1), "epoch 3": mlp(2)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernel": "rbf", "estimator": "biased"},
        {"hsic_batch_size": 4, "layers": ["2", "0"]},
    ],
    ids=["default", "rbf-biased", "parts-and-layers"],
)
def test_results_equal_those_of_separate_comparisons(settings):
    """compare_many gives matrices and errors equal to those of separate comparisons, to the bit."""
    models, batches = three_models(), batches_of(8, 12, 3)
    results = compare_many(models, batches, progress=False, **settings)
    assert list(results) == [
        ("epoch 1", "epoch 2"), ("epoch 1", "epoch 3"), ("epoch 2", "epoch 3"),
    ]  # fmt: skip
    layers = settings.pop("layers", None)
    for (one, other), found in results.items():
        cka = CKA(
            models[one], models[other], layers, layers, model1_name=one, model2_name=other,
            **settings,
        )  # fmt: skip
        expected = cka.compare(batches, progress=False)
        assert torch.equal(found.matrix, expected.matrix)
        assert torch.equal(found.standard_error, expected.standard_error)
        assert found.lines() == expected.lines()
        assert not found.self_comparison


class Tokens(nn.Module):
    """Embeds tokens and adds the mean of those that are not padding."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(20, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, input_ids, attention_mask):
        return self.linear(self.embedding(input_ids)) * attention_mask[..., None]


@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_masks_and_scales_are_those_of_separate_comparisons(pooling):
    """Masks apply to every model; the features of one of them are too small for float32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (2, 8, 5), generator=generator)
    masks = torch.arange(5) < torch.randint(2, 6, (2, 8, 1), generator=generator)
    batches = [
        {"input_ids": one, "attention_mask": mask.long()}
        for one, mask in zip(ids, masks, strict=True)
    ]
    models = {name: Tokens(seed) for seed, name in enumerate("abc")}
    models["b"].linear.weight.data *= 1e-30
    models["b"].linear.bias.data *= 1e-30
    results = compare_many(models, batches, pooling=pooling, progress=False)
    for (one, other), found in results.items():
        cka = CKA(models[one], models[other], pooling=pooling)
        expected = cka.compare(batches, progress=False)
        assert torch.equal(found.matrix, expected.matrix)
        assert not found.matrix.isnan().any()


def test_every_model_runs_once_on_every_batch(count_passes):
    """Every model runs once on every batch, in however many pairs it is compared."""
    models = three_models()
    passes = [count_passes(model) for model in models.values()]
    compare_many(models, batches_of(8, 8), progress=False)
    first = compare_many(models, batches_of(8, 8), pairs="first", progress=False)
    assert passes == [[2, 8, 8, 2, 8, 8]] * 3  # two samples show the axes
    assert list(first) == [("epoch 1", "epoch 2"), ("epoch 1", "epoch 3")]


def test_models_with_different_layers_are_compared():
    """Models with different layers have their own rows, and their modes are restored."""
    images = batches_of(8, 8, features=(2, 6, 6))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(72, 4)).train()
    models = {"a": InPlace(), "b": flat, "c": copy.deepcopy(flat).eval()}
    results = compare_many(models, images, progress=False)
    assert results["a", "b"].matrix.shape == (3, 2)
    assert torch.equal(results["a", "b"].matrix, results["a", "c"].matrix)
    assert [model.training for model in models.values()] == [True, True, False]
    assert not any(module._forward_hooks for model in models.values() for module in model.modules())


def test_warnings_name_each_layer_once():
    """A constant layer in two pairs and a small batch in all pairs
    are named by one warning each.
    """
    models = {"a": Constant(), "b": mlp(0), "c": mlp(1)}
    with pytest.warns(CKAWarning) as caught:
        compare_many(models, iter(batches_of(2, 8)), progress=False)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2
    assert sum("same for every sample: constant" in text for text in texts) == 1
    assert sum("are left out; their numbers of samples: 2" in text for text in texts) == 1
    assert {one.filename for one in caught} == {__file__}


def test_features_of_earlier_models_are_not_kept():
    """While a later model runs, no output of an earlier one is alive."""
    models = {name: nn.Sequential(nn.Linear(6, 1000)) for name in "abc"}
    alive = []

    def note(module, args):
        alive.extend(one for one in outputs if one() is not None)

    outputs = []
    for model in models.values():
        model.register_forward_pre_hook(note)
        model.register_forward_hook(lambda module, args, output: outputs.append(ref(output)))
    compare_many(models, batches_of(8, 8), progress=False)
    assert len(outputs) == 3 * (1 + 2)
    assert alive == []


@pytest.mark.parametrize(
    ("models", "settings", "error", "message"),
    [
        pytest.param({"a": mlp()}, {}, InputError, r"at least two models, got 1; write", id="one"),
        pytest.param([mlp(), mlp()], {}, InputError, r"mapping .*, got list; write", id="list"),
        pytest.param(
            {"a": mlp(), "b": 3}, {}, InputError, r"models\['b'\] must be .* got int", id="type"
        ),
        pytest.param(
            three_models(), {"pairs": "last"}, SettingError, "cannot use 'last' as pairs; write",
            id="pairs",
        ),
        pytest.param(
            three_models(), {"estimator": "exact"}, SettingError, "only Gram matrices", id="exact"
        ),
        pytest.param(
            three_models(), {"mask": ("auto", None)}, SettingError, "one mask for all", id="masks"
        ),
        pytest.param(
            three_models(), {"layers": "conv"}, LayerError, "has no layer 'conv'", id="layers"
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors(models, settings, error, message):
    """The error for a wrong argument of compare_many says what to write."""
    with pytest.raises(error, match=message):
        compare_many(models, batches_of(8), progress=False, **settings)


def test_one_model_under_two_names_is_an_error():
    """One model under two names is an error, as if two checkpoints were loaded into one module."""
    model = mlp()
    with pytest.raises(
        InputError, match=r"'a' and 'c' are the same module.*; load each checkpoint"
    ):
        compare_many({"a": model, "b": mlp(1), "c": model}, batches_of(8), progress=False)


def test_model_that_changes_its_input_in_place_is_an_error():
    """A model that changes its input in place is an error: the next
    model would get another input.
    """
    models = {"a": mlp(), "b": nn.Sequential(nn.ReLU(inplace=True)), "c": mlp(1)}
    with pytest.raises(InputError, match="model2 changes its input in place, so model3"):
        compare_many(models, batches_of(8), device="cpu", progress=False)


def test_mapping_of_results_names_its_pairs():
    """A mapping of results has the compared pairs; the KeyError for another pair lists them."""
    results = compare_many(three_models(), batches_of(8), pairs="first", progress=False)
    assert isinstance(results, CKAResults)
    assert len(results) == 2
    assert ("epoch 2", "epoch 3") not in results
    with pytest.raises(KeyError, match=r"was not compared; write one of .*'epoch 1', 'epoch 2'"):
        results["epoch 2", "epoch 1"]
    assert repr(results) == "<CKAResults: epoch 1 and epoch 2, epoch 1 and epoch 3>"
    assert str(results).splitlines()[1].startswith("CKA of epoch 1 (3 layers) and epoch 3 (3 ")
