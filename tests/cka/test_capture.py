"""Rows: which outputs are measured, when, under what name, and which are left out."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from cka_nets import Aliases, Backwards, InPlace, Residual, batches_of, mlp
from cka_reference import cloned_outputs, minibatch_cka
from torch import Tensor, nn

from cka import CKA, CKAWarning, InputError, LayerError
from cka.capture.hooks import Capture
from cka.capture.outputs import Reader


def compared(model, batches, **settings):
    with CKA(model, **settings) as cka:
        return cka.compare(batches, progress=False)


def entry(result, row, column):
    return float(result.matrix[result.model1_layers.index(row), result.model2_layers.index(column)])


def test_an_activation_in_place_does_not_reach_the_layer_before():
    """In conv → bn → ReLU(inplace) every pair is that of outputs cloned when they were made."""
    model, batches = InPlace().eval(), batches_of(16, 16, features=(2, 8, 8))
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert entry(result, "bn", "relu") < 0.99
    for one in outputs:
        for other in outputs:
            assert entry(result, one, other) == pytest.approx(
                minibatch_cka(outputs[one], outputs[other]), abs=1e-6
            )


def test_every_call_of_a_module_is_a_row():
    """A module that runs twice gives relu and relu:1, each with its own values."""
    model, batches = Residual().eval(), batches_of(16, 16)
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert result.model1_layers == ["fc1", "relu", "fc2", "relu:1"]
    for one in outputs:
        assert entry(result, one, "relu:1") == pytest.approx(
            minibatch_cka(outputs[one], outputs["relu:1"]), abs=1e-6
        )


def test_rows_come_in_order_of_execution_with_the_right_names():
    """Modules registered backwards are named after what ran, not after where they were listed."""
    model, batches = Backwards().eval(), batches_of(16)
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert result.model1_layers == ["first", "middle", "last"]
    for one in outputs:
        assert entry(result, one, "first") == pytest.approx(
            minibatch_cka(outputs[one], outputs["first"]), abs=1e-6
        )


def taken_from(model, batch, names):
    """What one forward pass records of the named modules, with their features as measurements."""
    modules = dict(model.named_modules())
    capture = Capture({name: modules[name] for name in names}, Reader(), lambda x: x.clone())
    with torch.no_grad(), capture.recording(len(batch)):
        model(batch)
    return capture.take()


def test_outputs_handed_on_unchanged_are_measured_once():
    """Identity, blocks and Sequentials cost no second Gram matrix."""
    model = Aliases().eval()
    names = ["fc", "same", "block", "block.0", "block.0.0"]
    taken = taken_from(model, batches_of(8)[0], names)
    assert len(taken.values) == 2
    assert {call.name: position for call, position in taken.rows.items()} == {
        "fc": 0, "same": 0, "block.0.0": 1, "block.0": 1, "block": 1,
    }  # fmt: skip


def test_an_output_changed_in_place_is_measured_again():
    """The same tensor at another version is another output."""
    taken = taken_from(InPlace().eval(), batches_of(8, features=(2, 8, 8))[0], ["bn", "relu"])
    assert len(taken.values) == 2
    assert (taken.values[0] < 0).any()
    assert not (taken.values[1] < 0).any()


def test_nothing_but_measurements_is_kept():
    """Once taken, a capture holds no output and no measurement."""
    model = mlp().eval()
    capture = Capture({"0": model[0]}, Reader(), lambda features: features.sum())
    with torch.no_grad(), capture.recording(4):
        model(batches_of(4)[0])
    assert len(capture.take().values) == 1
    assert capture.take().values == []
    assert not model[0]._forward_hooks


class Idle(nn.Module):
    """Has a module it never calls."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.unused = nn.Linear(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.blocks[0](self.used(x))


def test_a_module_that_never_ran_is_left_out_and_named():
    """One warning names it; containers such as ModuleList are not worth one."""
    with pytest.warns(CKAWarning, match=r"never ran are left out: unused$") as warned:
        result = compared(Idle(), batches_of(8))
    assert len(warned) == 1
    assert result.model1_layers == ["used", "blocks.0"]


def test_unused_projection_inside_attention_is_named_too():
    """nn.MultiheadAttention uses out_proj's weights and never calls it."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.warns(CKAWarning, match=r"never ran are left out: self_attn\.out_proj"):
        result = compared(model, batches_of(8, features=(5, 8)))
    assert "self_attn" in result.model1_layers
    assert not result.matrix.isnan().any()


def test_only_idle_layers_leave_nothing_to_compare():
    """If none of the selected layers ran, the error says which were selected."""
    with pytest.raises(LayerError, match=r"none of the selected layers ran .*selected: unused"):
        compared(Idle(), batches_of(8), model1_layers="unused")


def test_columns_that_never_ran_leave_nothing_to_compare():
    """The rows have run; the error names the layers that are missing on the other side."""
    with pytest.raises(LayerError, match=r"no layer is left to compare; .*never ran.*: unused$"):
        compared(Idle(), batches_of(8), model2_layers="unused")


class Sometimes(nn.Module):
    """Runs one of its layers only in its first forward pass."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(6, 4)
        self.once = nn.Linear(4, 4)
        self.passes = 0

    def forward(self, x):
        x = self.always(x)
        self.passes += 1
        return self.once(x) if self.passes == 1 else x


def test_a_layer_missing_from_some_batches_is_left_out_and_named():
    """A sum over some batches only would be compared with sums over all."""
    with pytest.warns(CKAWarning, match=r"did not run in every batch are left out: once"):
        result = compared(Sometimes(), batches_of(8, 8, 8))
    assert result.model1_layers == ["always"]
    assert result.matrix.item() == pytest.approx(1)


class Windows(nn.Module):
    """Folds windows into the batch dimension, as Swin does, and passes on numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.windows = nn.Unflatten(1, (2, 2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(self.windows(self.fc(x)).flatten(0, 1)).reshape(len(x), -1)


def test_outputs_without_the_batch_in_front_are_left_out_and_named():
    """A first dimension that is not the batch is never taken for it."""
    with pytest.warns(CKAWarning, match=r"no tensor with the batch in its first.*: inner$"):
        result = compared(Windows(), batches_of(8))
    assert result.model1_layers == ["fc", "windows"]


class Outputs(nn.Module):
    """Returns whatever its function makes of x."""

    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.odd = Made(make)

    def forward(self, x):
        self.odd(self.fc(x))
        return x


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: (x * 2, x), id="tuple"),
        pytest.param(lambda x: [None, x * 2], id="list"),
        pytest.param(lambda x: {"hidden": x * 2}, id="dict"),
        pytest.param(lambda x: OrderedDict(loss=x.mean(), logits=x * 2), id="loss-first"),
        pytest.param(lambda x: ((x * 2,), x), id="nested"),
    ],
)
def test_the_first_tensor_of_an_output_stands_for_it(make):
    """Tuples, dicts and Hugging Face style outputs work; a scalar loss is passed over."""
    result = compared(Outputs(make), batches_of(12))
    assert entry(result, "odd", "fc") == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Tensor.to_sparse, id="sparse"),
        pytest.param(
            lambda x: torch.nested.as_nested_tensor(list(x)),
            id="nested-tensor",
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
    ],
)
def test_outputs_that_are_no_dense_tensor_are_left_out_and_named(make):
    """Their rows are no features."""
    with pytest.warns(CKAWarning, match=r"no tensor with the batch in its first.*: odd$"):
        result = compared(Outputs(make), batches_of(8))
    assert result.model1_layers == ["fc"]


def test_one_number_a_sample_is_one_feature():
    """A layer may drop the dimension of its features."""
    flat = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    result = compared(flat, batches_of(8))
    assert result.model1_layers == ["0", "1"]
    assert entry(result, "0", "1") == pytest.approx(1)


def test_a_function_of_ones_own_picks_the_tensor():
    """pick(name, output) chooses; None leaves the row out, by name."""
    model = Outputs(lambda x: (x, x.abs()))

    def pick(name, output):
        return {"fc": None, "odd": output[1]}[name]

    with pytest.warns(CKAWarning, match="no tensor with the batch.*: fc"):
        result = compared(model, batches_of(8), pick=pick)
    assert result.model1_layers == ["odd"]


def test_tokens_can_be_kept_averaged_or_reduced_to_the_first():
    """(n, t, d) outputs: flatten, mean and cls are CKA of those features."""
    tokens = batches_of(16, features=(3, 6))[0]
    model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Flatten(), nn.Linear(15, 4))).eval()
    with torch.no_grad():
        hidden, out = model[0](tokens), model(tokens)
    expected = {None: hidden, "flatten": hidden, "mean": hidden.mean(1), "cls": hidden[:, 0]}
    for pooling, features in expected.items():
        result = compared(model, [tokens], pooling=pooling)
        assert entry(result, "0", "1.1") == pytest.approx(
            minibatch_cka([features], [out]), abs=1e-6
        )


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5)

    def forward(self, x):
        return self.lstm(x.transpose(0, 1))[0]


def test_sequence_first_modules_are_turned_around():
    """batch_first=False, said by the module itself, even where tokens equal samples in number."""
    model = SequenceFirst().eval()
    for samples in (8, 4):
        batch = batches_of(samples, features=(4, 6))[0]
        with torch.no_grad():
            expected = model(batch).transpose(0, 1)
        taken = taken_from(model, batch, ["lstm"])
        torch.testing.assert_close(taken.values[0], expected)


def test_an_unknown_pooling_is_refused():
    """The error lists what exists."""
    with pytest.raises(ValueError, match="'max' as pooling; write 'flatten', 'mean' or 'cls'"):
        CKA(mlp(), pooling="max")


def test_a_model_with_no_layers_is_its_own_row():
    """A bare module is compared by its output."""
    result = compared(nn.Linear(6, 3), batches_of(8))
    assert result.model1_layers == ["(model)"]


def test_models_must_be_modules():
    """A function is refused by its position and type."""
    with pytest.raises(InputError, match=r"model2 must be a torch\.nn\.Module, got function"):
        CKA(mlp(), lambda x: x)
