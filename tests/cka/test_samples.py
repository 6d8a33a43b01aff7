"""What the samples of a batch are, and messages for batches that a model does not take."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import minibatch_cka
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cka import CKA, CKAError, CKAWarning, InputError, LayerError, SettingError, cka_from_features


def compared(model, batches, **settings):
    return CKA(model, device="cpu", **settings).compare(batches, progress=False)


class TwoTexts(nn.Module):
    """Two inputs of equal length, of which each has a branch of its own."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(20, 6)
        self.second = nn.Embedding(20, 6)
        self.together = together

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        first, second = self.first(one), self.second(other)
        return first + second if self.together else first.mean(1) + second.mean(1)


def two_texts() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (2, 8, 5), generator=generator)
    real = torch.arange(5) < torch.randint(1, 5, (8, 1), generator=generator)
    return {"one": ids[0], "other": ids[1]}, real


def test_mask_is_not_applied_to_another_input_of_equal_length():
    """A mapping says which input a mask belongs to; the layers of the other one are not masked."""
    batch, real = two_texts()
    model = TwoTexts()
    result = compared(model, [batch], pooling="mean", mask={"other": lambda _: real})
    with torch.no_grad():
        first, second = model.first(batch["one"]).double(), model.second(batch["other"]).double()
    masked = (second * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
    expected = minibatch_cka([first.mean(1)], [masked])
    assert result["first", "second"] == pytest.approx(expected, abs=1e-6)


def test_mask_that_may_belong_to_two_inputs_is_an_error():
    """If a mask has as many tokens as two inputs that do not depend on each other, it is unclear
    whose it is.
    """
    batch, real = two_texts()
    with pytest.raises(InputError, match=r"several inputs .*'one' and 'other'.*e.g. mask="):
        compared(TwoTexts(), [batch], pooling="mean", mask=lambda _: real)


def test_mask_of_inputs_that_are_added_belongs_to_both():
    """A model that adds two inputs cannot be run on fewer tokens of one, so both have the mask."""
    batch, real = two_texts()
    result = compared(TwoTexts(together=True), [batch], pooling="mean", mask=lambda _: real)
    assert result["first", "second"] != pytest.approx(
        compared(TwoTexts(together=True), [batch], pooling="mean", mask=None)["first", "second"]
    )


class TwoFixedTexts(TwoTexts):
    """Two inputs of five tokens only, each with a table of positions."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        positions = torch.ones(5, 6)
        return self.first(one) + positions + self.second(other)


def test_tokens_of_two_inputs_that_cannot_be_told_apart_are_an_error():
    """If no input can have fewer tokens, the error names both inputs and the reason."""
    batch, real = two_texts()
    masks = {"one": lambda _: real, "other": lambda _: real}
    message = (
        r"whether an axis of the output of 'first', of shape .*, holds the tokens of input 'one' "
        r"or 'other'\. To find out, .*this failed \(RuntimeError: .*Write mask=None, or pass the "
        r"mask of only"
    )
    with pytest.raises(InputError, match=message):
        compared(TwoFixedTexts(), [batch], pooling="mean", mask=masks)


class Fixed(nn.Module):
    """A text model for five tokens only, with a learned table of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 6)
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.mix = nn.Tanh()
        self.head = nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(input_ids) + self.positions))


def test_classes_of_modules_find_tokens_of_a_model_with_a_fixed_length():
    """A model that runs on five tokens only has them in the axis that its modules' classes have."""
    batch, real = two_texts()
    batch = {"input_ids": batch["one"], "attention_mask": real}
    model = Fixed()
    result = compared(model, [batch], pooling="mean")
    with torch.no_grad():
        mixed = torch.tanh(model.embedding(batch["input_ids"]) + model.positions).double()
        embedded = model.embedding(batch["input_ids"]).double()
    means = [
        (each * real[:, :, None]).sum(1) / real.sum(1, keepdim=True) for each in (embedded, mixed)
    ]
    assert result["embedding", "mix"] == pytest.approx(
        minibatch_cka([means[0]], [means[1]]), abs=1e-6
    )


class FixedBatch(nn.Module):
    """Runs on eight samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(8, 8, 8).transpose(0, 1))


def test_undecided_axis_is_an_error_that_axes_decides():
    """If a model runs on one number of samples only, equal sizes are an error; axes= decides."""
    batch = torch.randn(8, 64)
    with pytest.raises(
        InputError,
        match=r"more than one axis of length 8, the number of samples in the batch.*shape '\[8, 8, "
        r"8\]'",
    ):
        compared(FixedBatch(), [batch])
    result = compared(FixedBatch(), [batch], axes={"inner": "tnd"})
    own = compared(nn.Sequential(nn.Identity()), [batch])
    assert result.samples == 8
    assert result["inner", "inner"] == pytest.approx(float(own.matrix[0, 0]))


def test_stated_axes_are_used_without_another_run(count_passes):
    """If the axes of all layers are stated, the model runs on whole batches only."""
    model = mlp()
    passes = count_passes(model)
    compared(model, batches_of(8, 8), axes={"**": "n..."})
    assert passes == [8, 8]


@pytest.mark.parametrize("axes", [{"a": "td"}, {"a": "nn"}, {"a": "nx"}, {1: "n"}, "ntd", {"a": 3}])
def test_axes_that_cannot_be_read_are_an_error(axes):
    """Axes have one n and known letters."""
    with pytest.raises(SettingError, match=r"as (the )?axes.*write axes="):
        CKA(mlp(), axes=axes)


def test_axes_of_another_number_are_an_error():
    """Letters must be as many as the axes of the output."""
    with pytest.raises(
        InputError, match=r"'ntd' for the output of '0', but this output has 2 axes, \(8, 8\)"
    ):
        compared(mlp(), batches_of(8), axes={"0": "ntd"})


def test_module_that_takes_tokens_for_samples_is_an_error():
    """nn.LSTM takes (t, n, d); if it gets (n, t, d), the error says what to change."""
    model = nn.Sequential(nn.Identity(), nn.LSTM(6, 4))
    tokens = torch.randn(8, 8, 6)
    with pytest.raises(InputError, match=r"'1' has batch_first=False, .* pass samples=1 if"):
        compared(model, [tokens])
    first = compared(model, [tokens], samples=1)
    lstm = nn.LSTM(6, 4)
    lstm.load_state_dict(model[1].state_dict())
    alone = compared(nn.Sequential(nn.Identity(), nn.LSTM(6, 4)), [tokens], axes={"1": "ntd"})
    assert first.samples == alone.samples == 8


def test_samples_of_a_recurrent_model_are_in_its_second_axis():
    """A model that is an nn.LSTM itself has samples in axis 1 of its input, also if n = t."""
    torch.manual_seed(0)
    model, tokens = nn.LSTM(6, 4), torch.randn(8, 8, 6)
    result = compared(model, [tokens])
    again = CKA(model, nn.LSTM(6, 4, batch_first=True), device="cpu")
    again._models[1].module.load_state_dict(model.state_dict())
    both = again.compare([tokens], [tokens.transpose(0, 1)], progress=False)
    assert result.samples == 8
    assert float(both.matrix[0, 0]) == pytest.approx(1, abs=1e-6)


class Names(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, table: Tensor | None = None, scale: Tensor | None = None):
        out = self.fc(x)
        return out if table is None else out + table.mean()


def test_inputs_that_differ_in_their_samples_are_an_error_that_samples_decides():
    """A dict that begins with something else than samples is an error; samples= names the entry."""
    x = batches_of(8)[0]
    batch = {"table": torch.randn(12, 3), "x": x}
    with pytest.raises(InputError, match=r"inputs of shapes table \(12, 3\), x \(8, 6\), which"):
        compared(Names(), [batch])
    result = compared(Names(), [batch], samples="x")
    assert result.samples == 8
    assert compared(Names(), [{"scale": torch.ones(1), "x": x}]).samples == 8


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 8 + at % 3, 8, generator=generator) for at in range(8)]


class OnLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.pooled = nn.Identity()

    def forward(self, several: list[Tensor]) -> Tensor:
        maps = [self.conv(image[None]).mean((2, 3)) for image in several]
        return self.pooled(torch.cat(maps))


def test_list_of_images_is_an_error_that_samples_decides():
    """A list of images is no (inputs, labels): the error says to pass feed= and samples=."""
    with pytest.raises(InputError, match=r"a list of 8 tensors \(\[0\] \(3, 8, 8\).*samples=len"):
        compared(OnLists(), [images()])
    settings = {"feed": lambda model, batch: model(batch), "model1_layers": "pooled"}
    with pytest.raises(InputError, match="number of samples is not known"):
        compared(OnLists(), [images()], **settings)
    result = compared(OnLists(), [images()], samples=len, **settings)
    assert result.samples == 8
    assert result["pooled", "pooled"] == pytest.approx(1)


def test_lists_of_samples_are_not_joined():
    """A small list of samples is left out with a warning; it is not added to the one before."""
    settings = {"feed": lambda model, batch: model(batch), "model1_layers": "pooled"}
    with pytest.warns(
        CKAWarning,
        match="fewer than 4 samples are left out; their numbers of samples: 3",
    ):
        result = compared(OnLists(), [images(), images()[:3]], samples=len, **settings)
    assert (result.samples, result.batches) == (8, 1)


def test_graphs_have_as_many_samples_as_the_user_says():
    """Nodes are no samples: samples= gives the number of graphs, whose features are compared."""

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.node = nn.Linear(4, 5)
            self.graph = nn.Identity()

        def forward(self, x, edges, graph_of):
            x = self.node(x)
            sums = torch.zeros(int(graph_of.max()) + 1, 5).index_add(0, graph_of, x)
            return self.graph(sums)

    graph_of = torch.arange(8).repeat_interleave(3)
    batch = {"edges": torch.zeros(2, 40), "x": torch.randn(24, 4), "graph_of": graph_of}
    with pytest.raises(InputError, match="number of samples is not known"):
        compared(Graphs(), [batch])
    with pytest.warns(CKAWarning, match="no axis with one entry for each sample.*: node"):
        result = compared(Graphs(), [batch], samples=lambda batch: 8)
    assert result.model1_layers == ["graph"]
    assert result.samples == 8


def test_feed_that_calls_a_part_of_the_model_needs_samples():
    """If feed= does not call the model, the model's inputs are not seen."""
    model, x = mlp(), batches_of(8)[0]
    settings = {"feed": lambda model, batch: model[0](batch["x"].tensor), "model1_layers": "0"}

    class Holder:
        tensor = x

    with pytest.raises(InputError, match=r"ran the layer '0' \(output \(8, \d+\)\) without"):
        compared(model, [{"x": Holder()}], **settings)
    assert compared(model, [{"x": Holder()}], samples=lambda _: 8, **settings).samples == 8


def test_no_input_is_changed():
    """Floating-point inputs keep their dtype, also keyword inputs such as timesteps."""
    seen = []

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, dtype=torch.bfloat16)

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            seen.append(timestep)
            return self.fc(sample)

    steps = torch.arange(480.0, 488.0)
    sample = batches_of(8)[0]
    compared(Timed(), [{"sample": sample.bfloat16(), "timestep": steps}])
    assert torch.equal(seen[-1], steps)
    compared(Timed(), [{"sample": sample, "timestep": steps}], cast_inputs="sample")
    assert torch.equal(seen[-1], steps)
    compared(Timed(), [{"sample": sample, "timestep": steps}], cast_inputs=True)
    assert seen[-1].dtype == torch.bfloat16
    with pytest.raises(SettingError, match="cannot use 3 as cast_inputs; write"):
        CKA(mlp(), cast_inputs=3)


def test_random_numbers_of_a_model_do_not_depend_on_the_run_for_axes():
    """The run on two samples restores the random state."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.noise(x + torch.randn(x.shape))

    found = []
    for axes in (None, {"noise": "nd"}):
        torch.manual_seed(0)
        found.append(CKA(Noisy(), nn.Identity(), axes=axes, device="cpu").compare(
            batches_of(8), progress=False).matrix)  # fmt: skip
    assert torch.equal(*found)


def test_input_that_a_model_changes_in_place_is_changed_once():
    """The run on two samples gets copies, so changes in place happen once."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.added = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.added(x.mul_(2).add_(1))

    def scaled(model, batch):
        batch["x"].mul_(3).add_(2)
        return model(batch["x"])

    data = batches_of(8)[0]
    batch = data.clone()
    compared(Adds(), [batch])
    torch.testing.assert_close(batch, 2 * data + 1)
    whole = {"x": data.clone()}
    compared(Adds(), [whole], feed=scaled)
    torch.testing.assert_close(whole["x"], 2 * (3 * data + 2) + 1)


def nan_model() -> nn.Module:
    model = mlp()
    model[0].weight.data[0, 0] = torch.nan
    return model


X = torch.randn(8, 6)
MISTAKES = {
    "dataset": (lambda: TensorDataset(X), {}, r"is a TensorDataset, .*DataLoader\(dataset"),
    "tensor": (lambda: torch.randn(64, 6), {}, r"one tensor \(64, 6\), .*write \[tensor\]"),
    "dict": (lambda: {"x": X}, {}, r"is a dict, which yields no batches; .*\[batch\]"),
    "number": (lambda: 3, {}, "is a int, which yields no batches"),
    "exhausted": (lambda: iter(()), {}, "loader yielded no batch. A generator can be used only"),
    "empty": (list, {}, "the loader yielded no batch"),
    "small": (lambda: [X[:3]], {}, r"1 smaller ones were skipped, the first of shapes \(3, 6\)"),
    "numpy": (
        lambda: [np.zeros((8, 6), "f")],
        {},
        r"numpy.ndarray, not a tensor; yield torch.from",
    ),
    "numpy-in-dict": (lambda: [{"input": np.zeros((8, 6))}], {}, "input input is a numpy.ndarray"),
    "extra-keys": (lambda: [{"input": X, "labels": X}], {}, "unexpected keyword argument 'labels'"),
    "float64": (
        lambda: [X.double()],
        {},
        r"torch.float32, but .*its input: torch.float64\); pass cast",
    ),
    "strings": (lambda: [["a", "b"]], {}, "number of samples is not known|cannot run"),
    "list-of-samples": (lambda: [list(X)], {}, "number of samples is not known|no axis|cannot"),
    "no-layer": (lambda: [X], {"model1_layers": "layer9"}, "no layer 'layer9'"),
    "pooling": (lambda: [X], {"pooling": "max"}, "write 'flatten'"),
    "kernel": (lambda: [X], {"kernel": "poly"}, "write 'linear'"),
    "estimator": (lambda: [X], {"estimator": "debiased"}, "write 'unbiased'"),
    "mask": (lambda: [{"input": X}], {"mask": "attention"}, "no entry 'attention'"),
    "samples": (lambda: [X], {"samples": 1.5}, "cannot use 1.5 as samples; write"),
    "samples-text": (lambda: [X], {"samples": lambda batch: "8"}, "samples= returned '8'"),
    "part": (lambda: [X], {"hsic_batch_size": 2}, "at least 4, got 2; write"),
    "wrong-width": (lambda: [torch.randn(8, 7)], {}, "mat1 and mat2 shapes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_is_wrong(mistake):
    """A mistake gets a message that names it."""
    make, settings, message = MISTAKES[mistake]
    with pytest.raises((CKAError, RuntimeError), match=message):
        compared(mlp(), make(), **settings)


def test_model_with_two_inputs_says_to_pass_feed():
    """A model that needs two inputs gets the first of a tuple only, and the error says so."""
    model = nn.Bilinear(6, 6, 4)
    with pytest.raises(InputError, match=r"one Tensor \(8, 6\), but missing a required .*feed="):
        compared(model, [(X, X)])
    assert compared(model, [(X, X)], feed=lambda model, batch: model(*batch)).samples == 8


def test_two_loaders_that_shuffle_get_a_warning():
    """Two loaders that shuffle give the models different samples."""
    loaders = [DataLoader(TensorDataset(torch.randn(32, 6)), 8, shuffle=True) for _ in range(2)]
    with pytest.warns(CKAWarning, match="both data loaders shuffle, each in its own order"):
        CKA(mlp(0), mlp(1), device="cpu").compare(*loaders, progress=False)
    plain = DataLoader(TensorDataset(torch.randn(32, 6)), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CKA(mlp(0), mlp(1), device="cpu").compare(plain, plain, progress=False)


def test_layers_of_the_first_model_select_those_of_the_second():
    """model1_layers alone selects in both models; a warning says if it selects nothing in one."""
    both = CKA(mlp(0), mlp(1), ["0", "2"], device="cpu").compare([X], progress=False)
    assert both.model2_layers == ["0", "2"]
    other = nn.Sequential()
    other.add_module("head", nn.Linear(6, 4))
    with pytest.warns(CKAWarning, match="matches no layer of model2, so all layers of model2"):
        result = CKA(mlp(0), other, ["0", "2"], device="cpu").compare([X], progress=False)
    assert result.model2_layers == ["head"]


def test_nan_features_are_named():
    """NaN in features and in outputs is named as NaN, not as a lack of variation."""
    features = torch.randn(8, 6)
    features[0, 0] = torch.nan
    with pytest.warns(CKAWarning, match="contain NaN or infinity"):
        cka_from_features(features, X)
    with pytest.warns(CKAWarning, match="contains NaN or infinity"):
        compared(nan_model(), [X])


def test_layers_without_the_samples_show_why():
    """If no layer has the samples, the error gives their number and what the model raised."""
    with pytest.raises(
        LayerError, match=r"length 8, the number of samples .*pass samples=, axes= or pick="
    ):
        compared(nn.Sequential(nn.Linear(6, 4)), [X], pick=lambda name, out: out[:3])
