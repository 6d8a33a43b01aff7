"""With pooling="tokens" each token that the mask keeps is a sample."""

from __future__ import annotations

import pytest
import torch
from cka_ranks import Encoder, token_batch
from cka_reference import gretton_hsic, linear, song_hsic
from torch import nn

from cka import (
    CKA,
    CKAWarning,
    InputError,
    LayerError,
    SettingError,
    compare_many,
    save_features,
)


def batches():
    """Return batches of other numbers of samples and tokens, with and without padding."""
    return [
        token_batch(5, 6, 1, padding=True),
        token_batch(7, 9, 2, padding=False),
        token_batch(3, 8, 3, padding=True),
    ]


def encoder(seed):
    """Return an encoder in float64."""
    model = Encoder().double()
    torch.manual_seed(seed)
    for weights in model.parameters():
        nn.init.normal_(weights)
    return model


def outputs_of(model, batch):
    """Return the output of each layer, in the order of execution."""
    outputs = []
    layers = [model.embedding, *model.layers] if isinstance(model, Encoder) else list(model)
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
        for layer in layers
    ]
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return outputs


def rows_of(model, batch):
    """Return the kept tokens (m, d) of each layer, taken one by one."""
    rows = []
    for output in outputs_of(model, batch):
        tokens = [
            output[sample, token]
            for sample in range(output.shape[0])
            for token in range(output.shape[1])
            if batch["attention_mask"][sample, token]
        ]
        rows.append(torch.stack(tokens).double())
    return rows


def reference(model, other, batches, hsic):
    """Return CKA of each pair of layers: HSIC over the tokens of a batch, summed over batches."""
    sums = torch.zeros(3, 3, 3, dtype=torch.float64)
    for batch in batches:
        both = [[linear(x) for x in rows_of(each, batch)] for each in (model, other)]
        for i, x in enumerate(both[0]):
            for j, y in enumerate(both[1]):
                sums[:, i, j] += torch.tensor(
                    [hsic(x, y), hsic(x, x), hsic(y, y)], dtype=torch.float64
                )
    return sums[0] / (sums[1] * sums[2]).sqrt()


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_each_kept_token_is_a_sample(estimator):
    """CKA and compare_many equal HSIC in float64 of the tokens, picked one by one."""
    model, other = encoder(1), encoder(2)
    hsic = song_hsic if estimator == "unbiased" else gretton_hsic
    expected = reference(model, other, batches(), hsic)
    settings = {"pooling": "tokens", "estimator": estimator, "device": "cpu"}
    layers = ["embedding", "layers.0", "layers.1"]
    result = CKA(model, other, layers, **settings).compare(batches(), progress=False)
    torch.testing.assert_close(result.matrix, expected, rtol=0, atol=1e-12)
    assert result.samples == sum(int(batch["attention_mask"].sum()) for batch in batches())
    many = compare_many(
        {"a": model, "b": other, "c": encoder(3)},
        batches(), layers=layers, progress=False, **settings,
    )  # fmt: skip
    torch.testing.assert_close(many["a", "b"].matrix, expected, rtol=0, atol=1e-12)


def test_exact_estimate_is_over_the_tokens_of_all_batches():
    """One unbiased HSIC of all tokens, also if batches have other numbers of them."""
    model, layers = encoder(1), ["embedding", "layers.0", "layers.1"]
    cka = CKA(model, model1_layers=layers, pooling="tokens", estimator="exact", device="cpu")
    found = cka.compare(batches(), progress=False).matrix
    parts = [rows_of(model, batch) for batch in batches()]
    grams = [linear(torch.cat(of_layer)) for of_layer in zip(*parts, strict=True)]
    own = [song_hsic(gram, gram) for gram in grams]
    for i, x in enumerate(grams):
        for j, y in enumerate(grams):
            value = song_hsic(x, y) / (own[i] * own[j]) ** 0.5
            assert float(found[i, j]) == pytest.approx(float(value), abs=1e-12)


def test_padding_is_neutral():
    """Values and positions of padding do not matter, nor how much of it there is."""
    model, other = encoder(1), encoder(2)
    wide = []
    for batch in batches():
        samples, tokens = batch["input_ids"].shape
        ids = torch.full((samples, tokens + 4), 49)
        mask = torch.zeros(samples, tokens + 4, dtype=torch.long)
        kept = batch["attention_mask"].bool()
        for sample, (row, real) in enumerate(zip(batch["input_ids"], kept, strict=True)):
            count = int(real.sum())
            start = 0 if sample % 2 else tokens + 4 - count  # on either side
            ids[sample, start : start + count] = row[real]
            mask[sample, start : start + count] = 1
        wide.append({"input_ids": ids, "attention_mask": mask})
    cka = CKA(model, other, pooling="tokens", device="cpu")
    expected = cka.compare(batches(), progress=False)
    torch.testing.assert_close(
        cka.compare(wide, progress=False).matrix, expected.matrix, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        cka.compare(batches(), wide, progress=False).matrix, expected.matrix, rtol=0, atol=1e-12
    )


def test_parts_have_tokens_of_all_samples():
    """In parts of a batch, tokens are drawn from all texts: texts that differ are seen to differ.

    Each text has one value in all its tokens and almost no noise, so within one text nothing is
    left to compare.
    """
    torch.manual_seed(0)
    texts = torch.randn(40, 1, 4, dtype=torch.float64)
    x = texts + 0.01 * torch.randn(40, 16, 4, dtype=torch.float64)
    noise = 0.01 * torch.randn(40, 16, 4, dtype=torch.float64)

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.noisy = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.noisy(self.plain(x * 1) + noise[: len(x), : x.shape[1]])

    def found(size):
        cka = CKA(
            Noisy(), model1_layers=["plain", "noisy"], pooling="tokens", hsic_batch_size=size,
            device="cpu",
        )  # fmt: skip
        return cka.compare([x], progress=False)["plain", "noisy"]

    within = torch.corrcoef(torch.stack([(x - texts).flatten(), (x - texts + noise).flatten()]))
    assert within[0, 1] < 0.75  # within texts, half of the variance is noise
    assert found(None) > 0.99
    assert found(16) == pytest.approx(found(None), abs=0.01)


def test_models_need_the_same_tokens():
    """Another number of tokens of a sample is an error that names align_tokens."""
    model, other = encoder(1), encoder(2)
    one, fewer = token_batch(5, 6, 1, padding=False), token_batch(5, 6, 1, padding=True)
    cka = CKA(model, other, pooling="tokens", device="cpu")
    with pytest.raises(InputError, match=r"6 and 3 tokens of sample 0.*cka.align_tokens"):
        cka.compare([one], [fewer], progress=False)
    moved = {"input_ids": one["input_ids"], "attention_mask": fewer["attention_mask"].flip(0)}
    moved["attention_mask"][0, 0] = 0
    moved["attention_mask"][1, 5] = 0
    with pytest.raises(InputError, match=r"tokens of sample \d.*cka.align_tokens"):
        cka.compare([fewer], [moved], progress=False)


@pytest.mark.parametrize("resamples", [{"null": 9}, {"bootstrap": 9}])
def test_tokens_are_not_resampled(resamples):
    """Null and bootstrap are refused by name, also for several models."""
    (name,) = resamples
    message = rf"does not support {name}=, got {name}=9.*or use pooling='mean'"
    with pytest.raises(SettingError, match=message):
        CKA(encoder(1), pooling="tokens").compare(batches(), progress=False, **resamples)
    with pytest.raises(SettingError, match=message):
        compare_many({"a": encoder(1), "b": encoder(2)}, batches(), pooling="tokens", **resamples)


def test_stored_features_have_no_tokens_as_samples(tmp_path):
    """save_features refuses the pooling and names what to write."""
    with pytest.raises(SettingError, match="does not support pooling='tokens'; compare the mod"):
        save_features(encoder(1), batches(), tmp_path / "features", pooling="tokens")


class Pooled(Encoder):
    """An encoder with a layer of one vector for each text, and one of every second token."""

    def __init__(self):
        super().__init__()
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, input_ids, attention_mask):
        x = super().forward(input_ids, attention_mask)
        return self.head(self.second(x[:, ::2]).mean(1))


def test_layers_without_the_same_tokens_are_left_out():
    """A warning names layers of pooled texts and of fewer tokens; alone they are an error."""
    cka = CKA(Pooled(), pooling="tokens", device="cpu")
    with pytest.warns(CKAWarning, match=r"not have the same tokens as the first.*: head, second"):
        result = cka.compare(batches(), progress=False)
    assert result.model1_layers == ["embedding", "layers.0", "layers.1"]
    head = CKA(Pooled(), model1_layers="head", pooling="tokens", device="cpu")
    with pytest.raises(LayerError, match=r"no layer is left.*each token for a sample"):
        head.compare(batches(), progress=False)


def test_pixels_are_samples_without_a_mask():
    """The positions of an image are samples, in layers of one resolution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1)).double()
    x = torch.randn(4, 3, 6, 5, dtype=torch.float64)
    result = CKA(model, pooling="tokens", device="cpu").compare([x], progress=False)
    grams = []
    for output in outputs_of(model, x):
        rows = output.permute(0, 2, 3, 1).reshape(-1, output.shape[1])
        grams.append(linear(rows))
    value = song_hsic(grams[0], grams[2])
    value /= (song_hsic(grams[0], grams[0]) * song_hsic(grams[2], grams[2])) ** 0.5
    assert result["0", "2"] == pytest.approx(float(value), abs=1e-12)
    assert result.samples == 4 * 30


class Translator(nn.Module):
    """An encoder and a decoder, each with tokens of its own."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.mixed = nn.Linear(8, 8)

    def forward(self, input_ids, decoder_input_ids, **masks):
        return self.mixed(self.target(decoder_input_ids)) + self.source(input_ids).mean(1)[:, None]


def test_tokens_of_a_decoder_are_not_those_of_the_encoder():
    """As many tokens in both do not make them the same; without masks they cannot be told apart."""
    source, target = token_batch(6, 7, 1, padding=False), token_batch(6, 7, 2, padding=False)
    batch = {"input_ids": source["input_ids"], "decoder_input_ids": target["input_ids"]}
    layers = ["target", "mixed", "source"]
    cka = CKA(Translator(), model1_layers=layers, pooling="tokens", device="cpu")
    with pytest.raises(InputError, match='pooling="tokens" needs one mask for each kind of tokens'):
        cka.compare([batch], progress=False)
    masks = {
        "attention_mask": source["attention_mask"],
        "decoder_attention_mask": target["attention_mask"],
    }
    with pytest.warns(CKAWarning, match=r"not have the same tokens as the first.*: source"):
        result = cka.compare([{**batch, **masks}], progress=False)
    assert result.model1_layers == ["target", "mixed"]
    assert result.samples == 42


def test_stated_axes_keep_the_mask():
    """If the axes of all layers are stated, padding is left out all the same."""
    model = encoder(1)
    for pooling in ("flatten", "mean", "tokens"):
        found = [
            CKA(model, pooling=pooling, axes=axes).compare(batches()[:2], progress=False)
            for axes in (None, {"**": "ntd"})
        ]
        torch.testing.assert_close(found[0].matrix, found[1].matrix, rtol=0, atol=1e-12)
