"""Which outputs are measured, when, under which label, and which are left out."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from cka_nets import Aliases, Backwards, InPlace, Residual, batches_of, mlp
from cka_reference import cloned_outputs, minibatch_cka
from torch import Tensor, nn

from cka import CKA, CKAWarning, InputError, LayerError
from cka.capture.axes import AxesOfLayers
from cka.capture.hooks import Capture
from cka.capture.outputs import OutputReader


def compared(model, batches, **settings):
    with CKA(model, **settings) as cka:
        return cka.compare(batches, progress=False)


def entry(result, row, column):
    return float(result.matrix[result.model1_layers.index(row), result.model2_layers.index(column)])


def test_in_place_activation_does_not_change_the_layer_before_it():
    """In conv → bn → ReLU(inplace), CKA of every pair equals that of outputs cloned in hooks."""
    model, batches = InPlace().eval(), batches_of(16, 16, features=(2, 8, 8))
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert entry(result, "bn", "relu") < 0.99
    for one in outputs:
        for other in outputs:
            assert entry(result, one, other) == pytest.approx(
                minibatch_cka(outputs[one], outputs[other]), abs=1e-6
            )


def test_each_call_of_a_module_is_a_row():
    """A module that runs twice gives the rows relu and relu:1 with their own values."""
    model, batches = Residual().eval(), batches_of(16, 16)
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert result.model1_layers == ["fc1", "relu", "fc2", "relu:1"]
    for one in outputs:
        assert entry(result, one, "relu:1") == pytest.approx(
            minibatch_cka(outputs[one], outputs["relu:1"]), abs=1e-6
        )


def test_rows_are_in_order_of_execution_with_their_own_labels():
    """Labels and values belong together if modules run in another order than registered."""
    model, batches = Backwards().eval(), batches_of(16)
    outputs = cloned_outputs(model, batches)
    result = compared(model, batches)
    assert result.model1_layers == ["first", "middle", "last"]
    for one in outputs:
        assert entry(result, one, "first") == pytest.approx(
            minibatch_cka(outputs[one], outputs["first"]), abs=1e-6
        )


def record_of(model, batch, names):
    """Return the record of one forward pass, with the named modules' features as measurements."""
    modules = dict(model.named_modules())
    axes = AxesOfLayers(model)
    measured = {name: modules[name] for name in names}
    capture = Capture(measured, OutputReader(), lambda x: x.clone(), axes)
    with torch.no_grad(), capture.recording(len(batch)):
        model(batch)
    return capture.take()


def test_output_returned_unchanged_by_several_modules_is_measured_once():
    """An output that Identity, a block and a Sequential return unchanged needs one Gram matrix."""
    model = Aliases().eval()
    names = ["fc", "same", "block", "block.0", "block.0.0"]
    record = record_of(model, batches_of(8)[0], names)
    assert len(record.values) == 2
    assert {call.name: position for call, position in record.rows.items()} == {
        "fc": 0, "same": 0, "block.0.0": 1, "block.0": 1, "block": 1,
    }  # fmt: skip


def test_output_changed_in_place_is_measured_again():
    """A tensor whose version has changed is another output."""
    record = record_of(InPlace().eval(), batches_of(6, features=(2, 8, 8))[0], ["bn", "relu"])
    assert len(record.values) == 2
    assert (record.values[0] < 0).any()
    assert not (record.values[1] < 0).any()


def test_capture_is_empty_after_take():
    """After take() a capture holds no measurement, and the model has no hook."""
    model = mlp().eval()
    capture = Capture(
        {"0": model[0]}, OutputReader(), lambda features: features.sum(), AxesOfLayers(model)
    )
    with torch.no_grad(), capture.recording(4):
        model(batches_of(4)[0])
    assert len(capture.take().values) == 1
    assert capture.take().values == []
    assert not model[0]._forward_hooks


class Idle(nn.Module):
    """Has a module that it never calls."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.unused = nn.Linear(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.blocks[0](self.used(x))


def test_module_that_never_ran_is_left_out_with_a_warning():
    """One warning names the modules that never ran, without containers such as ModuleList."""
    with pytest.warns(CKAWarning, match=r"left out because they never ran: unused$") as warned:
        result = compared(Idle(), batches_of(8))
    assert len(warned) == 1
    assert result.model1_layers == ["used", "blocks.0"]


def test_unused_projection_of_attention_is_named_in_the_warning():
    """A warning names out_proj, whose weights nn.MultiheadAttention uses without calling it."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.warns(CKAWarning, match=r"left out because they never ran: self_attn\.out_proj"):
        result = compared(model, batches_of(8, features=(5, 8)))
    assert "self_attn" in result.model1_layers
    assert not result.matrix.isnan().any()


def test_error_names_the_selected_layers_if_none_ran():
    """A selection of layers that never ran is a LayerError."""
    with pytest.raises(
        LayerError,
        match=r"no selected layer ran .*selected: unused\); select other layers",
    ):
        compared(Idle(), batches_of(8), model1_layers="unused")


def test_error_names_the_columns_that_never_ran():
    """If only the rows ran, the error names the columns, which a comparison needs too."""
    with pytest.raises(LayerError, match=r"no layer is left to compare; .*never ran.*: unused$"):
        compared(Idle(), batches_of(8), model2_layers="unused")


class Sometimes(nn.Module):
    """Runs one of its layers only if the first number of its input is not zero."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(6, 4)
        self.once = nn.Linear(4, 4)

    def forward(self, x):
        return self.once(self.always(x)) if x[0, 0] != 0 else self.always(x)


def test_layer_that_did_not_run_in_every_batch_is_left_out_with_a_warning():
    """A layer's sum over some batches cannot be compared with sums over all batches."""
    batches = batches_of(8, 8, 8)
    batches[1][0, 0] = batches[2][0, 0] = 0
    with pytest.warns(CKAWarning, match=r"did not run in every batch: once"):
        result = compared(Sometimes(), batches)
    assert result.model1_layers == ["always"]
    assert result.matrix.item() == pytest.approx(1)


class Windows(nn.Module):
    """Moves windows into the batch dimension, as Swin does."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.windows = nn.Unflatten(1, (2, 2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(self.windows(self.fc(x)).flatten(0, 1)).reshape(len(x), -1)


def test_output_without_the_batch_in_front_is_left_out_with_a_warning():
    """An output whose first dimension is not the batch's is left
    out, as its rows are no samples.
    """
    with pytest.warns(CKAWarning, match=r"no axis with one entry for each sample.*: inner$"):
        result = compared(Windows(), batches_of(8))
    assert result.model1_layers == ["fc", "windows"]


class CustomOutput(nn.Module):
    """A layer, and a layer whose output a function computes from it."""

    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.odd = Function(make)

    def forward(self, x):
        self.odd(self.fc(x))
        return x


class Function(nn.Module):
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
def test_first_tensor_of_an_output_is_compared(make):
    """Outputs that are tuples, lists or dicts are searched; a scalar loss in front is ignored."""
    result = compared(CustomOutput(make), batches_of(12))
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
        pytest.param(lambda x: x.to("meta"), id="meta"),
        pytest.param(lambda x: torch.empty(x.shape, dtype=torch.bits8), id="no-arithmetic"),
    ],
)
def test_outputs_without_values_are_left_out_with_a_warning(make):
    """Sparse, nested and meta tensors have no features, nor have dtypes without arithmetic."""
    with pytest.warns(CKAWarning, match=r"no values to compare \(it is sparse, nested.*: odd$"):
        result = compared(CustomOutput(make), batches_of(8))
    assert result.model1_layers == ["fc"]


def test_output_with_one_number_per_sample_is_one_feature():
    """An output of shape (n,) is compared as (n, 1)."""
    flat = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    result = compared(flat, batches_of(8))
    assert result.model1_layers == ["0", "1"]
    assert entry(result, "0", "1") == pytest.approx(1)


def test_pick_chooses_the_tensor_or_leaves_the_layer_out():
    """If pick(name, output) returns None, a warning names the layer."""
    model = CustomOutput(lambda x: (x, x.abs()))

    def pick(name, output):
        return {"fc": None, "odd": output[1]}[name]

    with pytest.warns(CKAWarning, match="no axis with one entry for each sample.*: fc"):
        result = compared(model, batches_of(8), pick=pick)
    assert result.model1_layers == ["odd"]


def test_pooling_keeps_or_averages_tokens_or_takes_the_first():
    """The poolings flatten, mean and cls give CKA of all, averaged or first tokens of (n, t, d)."""
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


def test_sequence_first_outputs_are_transposed():
    """A module's batch_first=False decides, even if there are as many tokens as samples."""
    model = SequenceFirst().eval()
    for samples in (8, 4):
        batch = batches_of(samples, features=(4, 6))[0]
        with torch.no_grad():
            expected = model(batch).transpose(0, 1)
        record = record_of(model, batch, ["lstm"])
        torch.testing.assert_close(record.values[0], expected)


def test_unknown_pooling_is_an_error():
    """The error for an unknown pooling lists the known names."""
    with pytest.raises(
        ValueError, match="'max' as pooling; write 'flatten', 'mean', 'cls', 'last' or 'tokens'"
    ):
        CKA(mlp(), pooling="max")


def test_model_without_submodules_is_one_row():
    """A model without submodules is compared by its own output, with the label (model)."""
    result = compared(nn.Linear(6, 3), batches_of(8))
    assert result.model1_layers == ["(model)"]


def test_model_that_is_not_a_module_is_an_error():
    """The error for a model that is not a module names the argument and its type."""
    with pytest.raises(
        InputError, match=r"model2 must be a torch\.nn\.Module, got function; write a Module"
    ):
        CKA(mlp(), lambda x: x)
