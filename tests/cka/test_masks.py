"""Padding is left out of the features of tokens, whatever form its mask has."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from cka_reference import minibatch_cka
from torch import Tensor, nn

from cka import CKA, CKAWarning, InputError, SettingError

LENGTHS = torch.tensor([5, 3, 4, 2, 5, 1, 4, 3])
RIGHT = torch.arange(5) < LENGTHS[:, None]
LEFT = RIGHT.flip(1)


class Text(nn.Module):
    """Embeds tokens, and mixes neighbouring tokens only if it gets their mask."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(20, 6)
        self.mlp = nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return torch.tanh(self.mlp(self.embedding(input_ids)))


def ids(pad: int, real: Tensor = RIGHT) -> Tensor:
    """Return eight texts of up to five tokens, padded with one token's number."""
    tokens = torch.randint(2, 20, (8, 5), generator=torch.Generator().manual_seed(3))
    return torch.where(real, tokens, pad)


def batch_of(pad: int, real: Tensor = RIGHT) -> dict[str, Tensor]:
    return {"input_ids": ids(pad, real), "attention_mask": real.long()}


def matrix(batch, pooling="mean", model=None, **settings):
    model = Text() if model is None else model
    return CKA(model, pooling=pooling, **settings).compare([batch], progress=False).matrix


def expected(pooling: str, real: Tensor = RIGHT, pad: int = 0) -> float:
    """Return CKA of both layers of ``Text`` in float64, by loops over samples and tokens."""
    model = Text().double()
    with torch.no_grad():
        embedded = model.embedding(ids(pad, real))
        layers = [embedded, model.mlp(embedded)]
    return minibatch_cka(*([pooled(layer, real, pooling)] for layer in layers))


def pooled(tokens: Tensor, real: Tensor, pooling: str) -> Tensor:
    """Return features of samples: of ``flatten``, what centring leaves of the real tokens."""
    kept = [[at for at in range(real.shape[1]) if row[at]] for row in real]
    if pooling == "mean":
        return torch.stack([tokens[i, at].mean(0) for i, at in enumerate(kept)])
    if pooling == "cls":
        return torch.stack([tokens[i, at[0]] for i, at in enumerate(kept)])
    centred = torch.zeros_like(tokens)
    for position in range(real.shape[1]):
        present = [i for i, at in enumerate(kept) if position in at]
        for i in present:
            centred[i, position] = tokens[i, position] - tokens[present, position].mean(0)
    return centred


@pytest.mark.parametrize("pooling", ["mean", "cls", "flatten"])
@pytest.mark.parametrize("real", [RIGHT, LEFT], ids=["right", "left"])
def test_padding_is_left_out_of_the_features(pooling, real):
    """With a mask, CKA is that of loops over the real tokens, whatever the pad token is."""
    for pad in (0, 1):
        found = matrix(batch_of(pad, real), pooling)
        assert float(found[0, 1]) == pytest.approx(expected(pooling, real), abs=1e-6)


def test_padding_counts_without_a_mask():
    """Without a mask padding counts, so averages depend on the number of the pad token."""
    first, second = (matrix(batch_of(pad), mask=None)[0, 1] for pad in (0, 1))
    assert abs(first - second) > 1e-3
    assert abs(first - expected("mean")) > 1e-3


@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_exact_estimate_with_padding_does_not_depend_on_the_batches(pooling):
    """In the exact estimate padding is replaced by the mean over all samples, of every batch."""
    order = LENGTHS.argsort(descending=True)
    whole = {name: value[order] for name, value in batch_of(0).items()}
    parts = [{name: value[at] for name, value in whole.items()} for at in (slice(2), slice(2, 8))]
    assert parts[0]["attention_mask"].all()
    cka = CKA(Text(), pooling=pooling, estimator="exact")
    for batches in ([whole], parts):
        found = cka.compare(batches, progress=False)
        assert found["embedding", "mlp"] == pytest.approx(expected(pooling), abs=1e-6)


@dataclass
class Record:
    input_ids: Tensor
    attention_mask: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda b: (b, torch.zeros(8)), id="dict-in-tuple"),
        pytest.param(lambda b: Record(**b), id="dataclass"),
        pytest.param(lambda b: [Record(**b), torch.zeros(8)], id="dataclass-in-list"),
        pytest.param(lambda b: {**b, "attention_mask": b["attention_mask"].bool()}, id="bool"),
        pytest.param(lambda b: {**b, "attention_mask": b["attention_mask"].float()}, id="float"),
        pytest.param(lambda b: {**b, "attention_mask": b["attention_mask"].half()}, id="half"),
    ],
)
def test_mask_is_found_in_batches_of_every_structure(wrap):
    """A mask of any dtype is found in batches of every structure."""
    assert torch.equal(matrix(wrap(batch_of(0))), matrix(batch_of(0)))


def test_mask_is_found_as_an_attribute_of_any_object():
    """Objects of other types need feed=, which gets the whole batch."""
    batch = SimpleNamespace(**batch_of(0))
    batch.attention_mask = batch.attention_mask.tolist()
    model = Text()
    cka = CKA(model, device="cpu", pooling="mean", feed=lambda model, b: model(ids(0)))
    found = cka.compare([batch], progress=False).matrix
    assert torch.equal(found, matrix(batch_of(0)))


def test_model_gets_the_mask_of_a_dataclass():
    """A model gets the first field of a dataclass and its mask; else it would read padding."""
    seen = []

    class Reads(Text):
        def forward(self, input_ids, attention_mask=None):
            seen.append(attention_mask)
            return super().forward(input_ids)

    matrix(Record(**batch_of(0)), model=Reads())
    assert torch.equal(seen[-1].cpu(), RIGHT.long())


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param("tokens", id="name"),
        pytest.param(lambda batch: batch["tokens"], id="function"),
        pytest.param(lambda batch: batch["tokens"].tolist(), id="list"),
        pytest.param("my_key_padding_mask", id="name-of-an-inverted-mask"),
    ],
)
def test_mask_may_be_a_name_or_a_function_of_the_batch(mask):
    """By torch's convention, True is padding in a mask whose name ends in key_padding_mask."""
    batch = {"input_ids": ids(0), "tokens": RIGHT.long(), "my_key_padding_mask": ~RIGHT}
    found = matrix(batch, mask=mask, feed=lambda model, b: model(b["input_ids"]))
    assert torch.equal(found, matrix(batch_of(0)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "flatten"])
def test_mask_without_padding_changes_nothing(pooling):
    """A mask without padding gives the values without a mask, to the digit."""
    everything = {"input_ids": ids(0), "attention_mask": torch.ones(8, 5)}
    assert torch.equal(matrix(everything, pooling), matrix(everything, pooling, mask=None))


def test_each_model_has_the_mask_of_its_own_batches():
    """Two models with differently padded loaders give the values of the real tokens."""
    one, other = Text(0), Text(1)
    found = CKA(one, other, pooling="mean").compare(
        [batch_of(0)], [batch_of(1, LEFT)], progress=False
    )
    with torch.no_grad():
        first = pooled(one.double().embedding(ids(0)), RIGHT, "mean")
        second = pooled(other.double().embedding(ids(1, LEFT)), LEFT, "mean")
    assert found["embedding", "embedding"] == pytest.approx(
        minibatch_cka([first], [second]), abs=1e-6
    )


def test_pair_of_masks_gives_each_model_its_own():
    """A pair of masks gives each side its own, also if a model is compared with itself."""
    model = Text()
    result = CKA(model, pooling="mean", mask=("auto", None)).compare([batch_of(0)], progress=False)
    assert not result.self_comparison
    assert result["embedding", "embedding"] < 0.99
    assert result["mlp", "mlp"] < 0.99


@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_layer_that_is_the_same_for_every_token_is_constant(pooling):
    """A layer with equal tokens is constant, in spite of rounding and the number of tokens."""
    model = Text()
    model.mlp.weight.data.zero_()
    model.mlp.bias.data.fill_(0.1)
    with pytest.warns(CKAWarning, match="same for every sample: mlp$"):
        assert matrix(batch_of(0), pooling, model=model)[0, 1].isnan()


@pytest.mark.parametrize("pooling", ["mean", "cls", "flatten"])
def test_padding_may_be_nan(pooling):
    """Padding may be NaN, as from attention over no token;
    positions that no sample uses are zero.
    """
    real = torch.cat([LEFT, torch.zeros(8, 2, dtype=torch.bool)], 1)
    values = torch.randn(8, 7, 3)
    values[~real] = torch.nan
    found = CKA(nn.Identity(), nn.Identity(), pooling=pooling, mask=lambda batch: real)
    found = found.compare([values], [values.flip(2) ** 3], progress=False)
    reference = [pooled(x.double(), real, pooling) for x in (values, values.flip(2) ** 3)]
    assert found[0, 0] == pytest.approx(minibatch_cka(*([x] for x in reference)), abs=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn),
        *(torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.complex64),
    ],
)
@pytest.mark.parametrize("pooling", ["mean", "flatten", "cls"])
def test_tokens_of_any_dtype_are_pooled(dtype, pooling):
    """Tokens of any dtype are pooled; sums of half precision are computed in float32."""
    whole = torch.randint(0, 9, (8, 5, 3))
    cka = CKA(nn.Identity(), nn.Identity(), pooling=pooling, mask=lambda batch: RIGHT)
    result = cka.compare([whole.to(dtype)], [whole.double()], progress=False)
    # A mean over samples in the place of padding is rounded to the dtype.
    assert result[0, 0] == pytest.approx(1, abs=1e-3 if dtype == torch.bfloat16 else 1e-5)


def test_layers_with_other_token_counts_are_named_in_a_warning():
    """Layers with other token counts are named in a warning, because their padding is unknown."""
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 4), nn.ConstantPad2d((0, 0, 1, 0), 1.0))
    batch = batch_of(0)
    settings = {"model1_layers": ["1", "2"], "feed": lambda model, b: model(b["input_ids"])}
    with pytest.warns(CKAWarning, match="not applied to layers whose number of tokens .*: 2$"):
        matrix(batch, model=model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix({**batch, "attention_mask": torch.ones(8, 5)}, model=model, **settings)
        matrix(batch, model=model, mask=None, **settings)


def test_layers_with_tokens_in_more_dimensions_are_left_out_with_a_warning():
    """Attention weights (n, heads, t, t) have padding in two dimensions, so they are left out."""

    class Attention(Text):
        def __init__(self):
            super().__init__()
            self.weights = nn.Identity()

        def forward(self, input_ids, attention_mask):
            x = super().forward(input_ids)
            self.weights((x @ x.mT)[:, None])
            return x

    with pytest.warns(CKAWarning, match="tokens in more than one axis.*: weights$"):
        assert matrix(batch_of(0), model=Attention()).shape == (2, 2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        pytest.param(
            torch.where(torch.arange(8)[:, None] == 3, 0, RIGHT.long()),
            r"only padding and no token for 1 of 8 samples \(the first is sample 3 .*; leave",
            id="only-padding",
        ),
        pytest.param(
            torch.zeros(8, 1, 5, 5),
            r"shape \(8, 1, 5, 5\), but .* shape \(8, tokens\); write mask=function",
            id="four-dimensions",
        ),
        pytest.param(
            torch.where(RIGHT, 0.0, -1e9),
            r"other than 0 and 1 \(from -1000000000.0 to 0.0\)",
            id="bias",
        ),
    ],
)
def test_mask_that_cannot_be_used_is_an_error(mask, message):
    """A mask that cannot be used is an error if a layer has as
    many tokens; mask=None reads none.
    """
    batch = {"input_ids": ids(0), "attention_mask": mask}
    with pytest.raises(InputError, match=message):
        matrix(batch)
    assert matrix(batch, mask=None).shape == (2, 2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        pytest.param(
            "missing", "no entry 'missing'.*entries are input_ids, attention_mask", id="name"
        ),
        pytest.param(lambda batch: "text", "mask= is a str, not a mask; write", id="function"),
    ],
)
def test_mask_that_is_not_found_is_an_error(mask, message):
    """If a mask is not found, the error lists the entries of the batch."""
    with pytest.raises(InputError, match=message):
        matrix(batch_of(0), mask=mask)


@pytest.mark.parametrize("mask", [3, ("auto",), ("auto", 3), RIGHT])
def test_mask_of_another_type_is_an_error(mask):
    """A mask of another type is an error when the CKA is created."""
    with pytest.raises(SettingError, match="as a mask; write"):
        CKA(Text(), mask=mask)


class Translation(nn.Module):
    """An encoder and a decoder with cross-attention's projections, and one shared embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(20, 6)
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.ModuleDict({"key": nn.Linear(6, 6), "query": nn.Linear(6, 6)})
        self.decoder.forward = self.decode
        self.head = nn.Linear(6, 4)

    def decode(self, states, encoded):
        return self.decoder["query"](states) + self.decoder["key"](encoded).mean(1, keepdim=True)

    def forward(self, input_ids, decoder_input_ids, attention_mask=None, **masks):
        encoded = self.encoder(self.shared(input_ids))
        return self.head(self.decoder(self.shared(decoder_input_ids), encoded))


@pytest.mark.parametrize("masked_decoder", [True, False])
def test_decoder_has_its_own_mask_even_if_it_has_as_many_tokens(masked_decoder):
    """Layers of a decoder use its own mask; layers that get the
    encoder's output use the encoder's.
    """
    batch = {**batch_of(0), "decoder_input_ids": ids(1, LEFT)}
    if masked_decoder:
        batch["decoder_attention_mask"] = LEFT
    model = Translation().eval()
    # The embedding is called before the decoder, so its second call has the encoder's mask.
    layers = ["encoder", "decoder.key", "decoder.query", "head"]
    result = CKA(model, model1_layers=layers, pooling="mean").compare([batch], progress=False)
    decoder = LEFT if masked_decoder else torch.ones_like(LEFT)
    outputs = {}
    for name, mask in zip(layers, [RIGHT, RIGHT, decoder, decoder], strict=True):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name, mask=mask: outputs.update(
                {name: pooled(out.detach().double(), mask, "mean")}
            )
        )
    model(**batch)
    for name in layers:
        assert result["encoder", name] == pytest.approx(
            minibatch_cka([outputs["encoder"]], [outputs[name]]), abs=1e-6
        )
    hooks = [module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_of_torch_has_the_padding_masks_of_both_sides():
    """In the padding masks of torch's transformer True is padding,
    on both sides of equal length.
    """
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True).eval()
    padding = {"src_key_padding_mask": ~RIGHT, "memory_key_padding_mask": ~RIGHT}
    batch = {"src": torch.randn(8, 5, 8), "tgt": torch.randn(8, 5, 8), **padding}
    batch["tgt_key_padding_mask"] = ~LEFT
    layers = ["encoder.layers.1", "encoder", "decoder.layers.0.linear1", "decoder"]
    result = CKA(model, model1_layers=layers, pooling="mean").compare([batch], progress=False)
    outputs = {}
    for name in layers:
        mask = RIGHT if name.startswith("encoder") else LEFT
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name, mask=mask: outputs.update(
                {name: pooled(out.detach().double(), mask, "mean")}
            )
        )
    with torch.no_grad():
        model(**batch)
    for name in layers:
        assert result["encoder.layers.1", name] == pytest.approx(
            minibatch_cka([outputs["encoder.layers.1"]], [outputs[name]]), abs=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_is_neutral_in_half_precision(dtype):
    """The mean in the place of padding is not rounded to half precision, so it adds nothing."""
    torch.manual_seed(0)
    real = torch.arange(9) < torch.randint(2, 10, (32, 1))
    first = (torch.randn(32, 9, 16) + 2).to(dtype)
    second = torch.tanh(first.float() @ torch.randn(16, 12)).to(dtype)
    cka = CKA(nn.Identity(), nn.Identity(), mask=lambda batch: real, device="cpu")
    found = cka.compare([first], [second], progress=False)
    by_hand = [pooled(each.double(), real, "flatten") for each in (first, second)]
    expected = minibatch_cka([by_hand[0]], [by_hand[1]])
    assert float(found.matrix[0, 0]) == pytest.approx(expected, abs=1e-6)
