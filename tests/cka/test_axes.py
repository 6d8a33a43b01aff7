"""No axis is guessed: 40 types of modules, with as many samples as tokens, channels or pixels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from cka_reference import minibatch_cka
from torch import Tensor, nn

from cka import CKA, CKAWarning

# Samples, tokens, features (or channels), height and width of an image.
SIZES = {
    "all-differ": (10, 7, 12, 8, 6),
    "samples-are-tokens": (8, 8, 12, 6, 10),
    "samples-are-channels": (8, 6, 8, 10, 12),
    "tokens-are-channels": (10, 8, 8, 6, 12),
    "samples-are-height": (8, 6, 12, 8, 10),
    "all-equal": (8, 8, 8, 8, 8),
}


class TokensFirst(nn.Module):
    """Gives a module (t, n, d), and returns (n, t, d)."""

    def __init__(self, inner: nn.Module, *, twice: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        out = self.inner(x, x) if self.twice else self.inner(x)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class Attention(nn.Module):
    """Self-attention; the module has the output first and the weights second."""

    def __init__(self, d: int, *, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(d, 2, batch_first=batch_first)
        self.batch_first_inside = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first_inside else x.transpose(0, 1)
        return self.inner(x, x, x)[0]


class Between(nn.Module):
    """Moves the features of (n, t, d) to the middle, as for a convolution over tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2))


class Table(nn.Module):
    """Returns a table (t, d) of positions beside tokens: no axis of it has the samples."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, d)
        self.inner = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.table(torch.arange(x.shape[1])))


class Weights(nn.Module):
    """Computes attention weights (n, t, t) in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ x.mT) @ x


def layer(d: int, *, batch_first: bool, decoder: bool = False) -> nn.Module:
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    return kind(d, 2, 16, batch_first=batch_first)


# Function of the sizes (t, d), the layer to read, and the axes of its output: samples, positions.
TOKENS = {
    "linear": (lambda t, d: nn.Linear(d, 5), "", "ntd"),
    "layer-norm": (lambda t, d: nn.LayerNorm(d), "", "ntd"),
    "rms-norm": (lambda t, d: nn.RMSNorm(d), "", "ntd"),
    "gelu": (lambda t, d: nn.GELU(), "", "ntd"),
    "identity": (lambda t, d: nn.Identity(), "", "ntd"),
    "dropout": (lambda t, d: nn.Dropout(), "", "ntd"),
    "glu": (lambda t, d: nn.Sequential(nn.Linear(d, 2 * d), nn.GLU()), "1", "ntd"),
    "softmax": (lambda t, d: nn.Softmax(-1), "", "ntd"),
    "sequential": (lambda t, d: nn.Sequential(nn.Linear(d, d), nn.Tanh()), "1", "ntd"),
    "attention": (lambda t, d: Attention(d, batch_first=True), "inner", "ntd"),
    "attention-tokens-first": (lambda t, d: Attention(d, batch_first=False), "inner", "tnd"),
    "encoder": (lambda t, d: layer(d, batch_first=True), "norm1", "ntd"),
    "encoder-tokens-first": (
        lambda t, d: TokensFirst(layer(d, batch_first=False)), "inner.linear1", "tnd",
    ),
    "encoder-output-tokens-first": (
        lambda t, d: TokensFirst(layer(d, batch_first=False)), "inner", "tnd",
    ),
    "decoder-tokens-first": (
        lambda t, d: TokensFirst(layer(d, batch_first=False, decoder=True), twice=True),
        "inner.norm3", "tnd",
    ),
    "lstm": (lambda t, d: nn.LSTM(d, 5, batch_first=True), "", "ntd"),
    "lstm-tokens-first": (lambda t, d: TokensFirst(nn.LSTM(d, 5)), "inner", "tnd"),
    "gru-tokens-first": (lambda t, d: TokensFirst(nn.GRU(d, 5)), "inner", "tnd"),
    "rnn": (lambda t, d: nn.RNN(d, 5, batch_first=True), "", "ntd"),
    "conv1d": (lambda t, d: Between(nn.Conv1d(d, d, 3, padding=1)), "inner", "ndt"),
    "conv1d-other-channels": (lambda t, d: Between(nn.Conv1d(d, t, 1)), "inner", "ndt"),
    "batch-norm-1d": (lambda t, d: Between(nn.BatchNorm1d(d)), "inner", "ndt"),
    "instance-norm-1d": (  # with an activation, because the mean of its own output is 0
        lambda t, d: Between(nn.Sequential(nn.InstanceNorm1d(d), nn.ReLU())), "inner.1", "ndt",
    ),
    "group-norm": (lambda t, d: Between(nn.GroupNorm(2, d)), "inner", "ndt"),
    "relu-of-conv1d": (
        lambda t, d: Between(nn.Sequential(nn.Conv1d(d, d, 1), nn.ReLU())), "inner.1", "ndt",
    ),
    "positions": (lambda t, d: Table(d), "inner", "ntd"),
}  # fmt: skip
IMAGES = {
    "conv2d": (lambda c: nn.Conv2d(c, c, 3, padding=1), "", "nchw"),
    "conv2d-stride": (lambda c: nn.Conv2d(c, 8, 3, stride=2, padding=1), "", "nchw"),
    "depthwise": (lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c), "", "nchw"),
    "conv-transpose": (lambda c: nn.ConvTranspose2d(c, 4, 2, stride=2), "", "nchw"),
    "batch-norm": (lambda c: nn.BatchNorm2d(c), "", "nchw"),
    "instance-norm": (lambda c: nn.Sequential(nn.InstanceNorm2d(c), nn.ReLU()), "1", "nchw"),
    "group-norm-of-images": (lambda c: nn.GroupNorm(2, c), "", "nchw"),
    "max-pool": (lambda c: nn.MaxPool2d(2), "", "nchw"),
    "average-pool": (lambda c: nn.AvgPool2d(2), "", "nchw"),
    "adaptive-pool": (lambda c: nn.AdaptiveAvgPool2d(4), "", "nchw"),
    "upsample": (lambda c: nn.Upsample(scale_factor=2), "", "nchw"),
    "relu-of-images": (lambda c: nn.ReLU(), "", "nchw"),
    "dropout-of-images": (lambda c: nn.Dropout2d(), "", "nchw"),
    "pixel-shuffle": (
        lambda c: nn.Sequential(nn.Conv2d(c, 16, 1), nn.PixelShuffle(2)), "1", "nchw",
    ),
}  # fmt: skip


def in_order(tensor: Tensor, axes: str) -> Tensor:
    """Return an output as (n, positions, features)."""
    positions = [at for at, letter in enumerate(axes) if letter in "thw"]
    features = [at for at, letter in enumerate(axes) if letter in "dc"]
    ordered = tensor.permute(axes.index("n"), *positions, *features)
    return ordered.flatten(1, len(positions))


def output_of(model: nn.Module, name: str, batch: Tensor, axes: str) -> Tensor:
    """Return float64 features (n, positions, features) of a layer, taken by hand."""
    found = []
    module = model.get_submodule(name) if name else model
    handle = module.register_forward_hook(lambda module, args, out: found.append(out))
    with torch.no_grad():
        model.eval()(batch)
    handle.remove()
    out = found[0][0] if isinstance(found[0], tuple) else found[0]
    return in_order(out.double(), axes)


def assert_right(model, name, batch, axes, whole, pooling):
    """Compare a layer with the input itself, which is known to be (n, ...)."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Identity(), model)
    inner = f"1.{name}" if name else "1"
    features = output_of(model, name, batch, axes)
    if pooling == "mean":
        features, whole = features.mean(1), whole.double().mean(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CKAWarning)
        result = CKA(network, model1_layers=["0", inner], pooling=pooling, device="cpu").compare(
            [batch], progress=False
        )
    expected = minibatch_cka([whole], [features])
    assert result["0", inner] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("pooling", ["flatten", "mean"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", TOKENS)
def test_layers_of_tokens_have_the_features_taken_by_hand(kind, sizes, pooling):
    """CKA is that of float64 features by hand, whatever sizes coincide."""
    torch.manual_seed(0)
    n, t, d, _, _ = SIZES[sizes]
    make, name, axes = TOKENS[kind]
    batch = torch.randn(n, t, d)
    assert_right(make(t, d), name, batch, axes, batch, pooling)


@pytest.mark.parametrize("pooling", ["flatten", "mean"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", IMAGES)
def test_layers_of_images_have_the_features_taken_by_hand(kind, sizes, pooling):
    """CKA is that of float64 features by hand; a mean is one over the pixels."""
    torch.manual_seed(0)
    n, _, c, h, w = SIZES[sizes]
    make, name, axes = IMAGES[kind]
    batch = torch.randn(n, c, h, w)
    assert_right(make(c), name, batch, axes, in_order(batch, "nchw"), pooling)


MASKED = {
    name: TOKENS[name]
    for name in ("linear", "layer-norm", "gelu", "conv1d", "batch-norm-1d", "relu-of-conv1d",
                 "conv1d-other-channels", "attention-tokens-first", "encoder-tokens-first",
                 "gru-tokens-first", "positions")
}  # fmt: skip


@pytest.mark.parametrize("pooling", ["flatten", "mean", "cls", "last"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", MASKED)
def test_masks_follow_the_tokens_of_their_input(kind, sizes, pooling):
    """Padding is left out on the axis of the tokens, whatever sizes coincide."""
    torch.manual_seed(0)
    n, t, d, _, _ = SIZES[sizes]
    make, name, axes = MASKED[kind]
    batch, model = torch.randn(n, t, d), make(t, d)
    real = torch.arange(t) < torch.randint(2, t, (n, 1))
    real[0] = True
    features = [batch.double(), output_of(model, name, batch, axes)]
    network = nn.Sequential(nn.Identity(), model)
    inner = f"1.{name}" if name else "1"
    result = CKA(
        network, model1_layers=["0", inner], pooling=pooling, device="cpu", mask=lambda _: real
    ).compare([batch], progress=False)
    expected = minibatch_cka(*([by_hand(each, real, pooling)] for each in features))
    assert result["0", inner] == pytest.approx(expected, abs=2e-5)


def by_hand(tokens: Tensor, real: Tensor, pooling: str) -> Tensor:
    """Return features (n, ...) of real tokens, by loops."""
    kept = [row.nonzero().flatten().tolist() for row in real]
    if pooling == "flatten":
        filled = torch.zeros_like(tokens)
        for at in range(tokens.shape[1]):
            present = real[:, at]
            if present.any():
                filled[present, at] = tokens[present, at] - tokens[present, at].mean(0)
        return filled
    choose = {
        "mean": lambda row, at: row[at].mean(0),
        "cls": lambda row, at: row[at[0]],
        "last": lambda row, at: row[at[-1]],
    }[pooling]
    return torch.stack([choose(row, at) for row, at in zip(tokens, kept, strict=True)])


class _Searched(nn.Sequential):
    """Counts how often somebody goes through all of its modules."""

    searches = 0

    def modules(self) -> Iterator[nn.Module]:
        self.searches += 1
        return super().modules()


def test_more_layers_do_not_search_the_model_more_often() -> None:
    """Else the time would be quadratic in the layers."""
    searches = []
    for layers in (5, 50):
        model = _Searched(nn.Conv2d(3, 4, 1), *(nn.ReLU() for _ in range(layers)))
        CKA(model).compare([torch.randn(8, 3, 4, 4)], progress=False)
        searches.append(model.searches)
    assert searches[0] == searches[1]
