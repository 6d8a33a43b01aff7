"""Models of transformers, with random weights: masks against loops over tokens in float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from cka_reference import reference_matrix
from torch import Tensor

from cka import CKA, CKAResult
from cka.capture.outputs import tensors_in

tf = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::cka.CKAWarning")

VOCABULARY, TOKENS = 50, 7
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def bert(seed: int = 0):
    torch.manual_seed(seed)
    config = tf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SMALL)
    return tf.BertModel(config).double().eval()


def gpt2():
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return tf.GPT2Model(config).double().eval()


def t5():
    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config).double().eval()


# A block and what is around it: the reference is slow.
BERT_LAYERS = ["embeddings", "encoder.layer.1.**", "pooler"]
GPT2_LAYERS = ["wte", "h.1.**", "ln_f"]
T5_LAYERS = ["**.1.**.k", "**.q", "encoder", "decoder", "lm_head"]


def masks(tokens: int = TOKENS, *, left: bool = False, seed: int = 0) -> list[Tensor]:
    """Return two masks of eight texts, in which one text has all tokens and one has one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, tokens, (2, 8), generator=generator)
    lengths[:, 0], lengths[:, 1] = tokens, 1
    real = torch.arange(tokens) < lengths[:, :, None]
    return list(real.flip(2) if left else real)


def texts(of_masks: list[Tensor], pad: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (8, of_masks[0].shape[1])
    return [
        torch.where(real, torch.randint(2, VOCABULARY, shape, generator=generator), pad)
        for real in of_masks
    ]


def batches(pad: int = 0, *, left: bool = False) -> list:
    of_masks = masks(left=left)
    return [
        tf.BatchEncoding({"input_ids": ids, "attention_mask": real.long()})
        for ids, real in zip(texts(of_masks, pad), of_masks, strict=True)
    ]


def reference(model, loader, of_masks, pooling, is_decoder=lambda label: False):
    """Return {label: [features of a batch]} of all outputs, by loops over real tokens.

    ``of_masks`` has a pair for each batch: the masks of the encoder's and the decoder's tokens.
    """
    found: dict[str, list[Tensor]] = {}
    calls: Counter[str] = Counter()
    now: dict[int, Tensor | None] = {}

    def hook_of(name):
        def hook(module, args, output):
            label = f"{name}:{calls[name]}" if calls[name] else name
            calls[name] += 1
            out = next(tensor for tensor in tensors_in(output) if tensor.ndim).detach().clone()
            real = now[is_decoder(label)]
            if out.ndim == 3 and real is not None and out.shape[:2] == real.shape:
                out = pooled(out, real, pooling)
            elif out.ndim == 3 and pooling == "mean":
                out = out.mean(1)
            elif out.ndim == 4 and pooling == "mean":  # images
                out = out.mean((2, 3))
            found.setdefault(label, []).append(out)

        return hook

    handles = [
        module.register_forward_hook(hook_of(name)) for name, module in model.named_modules()
    ]
    with torch.no_grad():
        for batch, pair in zip(loader, of_masks, strict=True):
            calls.clear()
            now.update(enumerate(pair))
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


def pooled(tokens: Tensor, real: Tensor, pooling: str) -> Tensor:
    if pooling == "mean":
        return torch.stack([tokens[i, row].mean(0) for i, row in enumerate(real)])
    centred = torch.zeros_like(tokens)
    for position in range(real.shape[1]):
        present = real[:, position]
        if present.any():
            at = tokens[present, position]
            centred[present, position] = at - at.mean(0)
    return centred


def assert_equals(result: CKAResult, rows: dict, columns: dict) -> None:
    """Check every entry."""
    assert min(result.matrix.shape) > 8
    union = {**{f"1 {k}": v for k, v in rows.items()}, **{f"2 {k}": v for k, v in columns.items()}}
    one = [f"1 {name}" for name in result.model1_layers]
    two = [f"2 {name}" for name in result.model2_layers]
    expected = reference_matrix(union, [*one, *two])[: len(one), len(one) :]
    assert (result.matrix - expected).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_bert_and_bert_are_compared_by_their_real_tokens(pooling):
    """The number of the pad token does not change CKA of BERT with BERT."""
    one, two, loader = bert(0), bert(1), batches()
    result = CKA(one, two, BERT_LAYERS, BERT_LAYERS, pooling=pooling).compare(
        loader, progress=False
    )
    pairs = [(real, None) for real in masks()]
    rows, columns = (reference(model, loader, pairs, pooling) for model in (one, two))
    assert_equals(result, rows, columns)
    again = CKA(one, two, BERT_LAYERS, BERT_LAYERS, pooling=pooling)
    again = again.compare(batches(pad=1), progress=False)
    torch.testing.assert_close(again.matrix, result.matrix)


def test_gpt2_and_bert_are_compared_with_their_own_padding():
    """GPT-2 is padded on the left and BERT on the right, each by its own loader and mask."""
    one, two = gpt2(), bert()
    left, right = batches(1, left=True), batches(0)
    cka = CKA(one, two, GPT2_LAYERS, BERT_LAYERS, pooling="mean")
    result = cka.compare(left, right, progress=False)
    assert_equals(
        result,
        reference(one, left, [(real, None) for real in masks(left=True)], "mean"),
        reference(two, right, [(real, None) for real in masks()], "mean"),
    )


@pytest.mark.parametrize("decoder_tokens", [TOKENS, TOKENS - 2], ids=["equal", "fewer"])
def test_t5_is_compared_by_the_tokens_of_its_encoder_and_its_decoder(decoder_tokens):
    """In T5, keys and values of cross-attention have the encoder's
    tokens, the head the decoder's.
    """

    def is_decoder(label):
        return label.startswith(("decoder", "lm_head")) and not label.endswith(
            ("EncDecAttention.k", "EncDecAttention.v")
        )

    model, of_masks = t5(), list(zip(masks(), masks(decoder_tokens, seed=5), strict=True))
    loader = [
        {
            **batch,
            "decoder_input_ids": ids,
            "decoder_attention_mask": real.long(),
        }
        for batch, ids, (_, real) in zip(
            batches(), texts([real for _, real in of_masks], 1), of_masks, strict=True
        )
    ]
    # T5 computes softmax in float32, which differs by 1e-7 on a GPU; the reference is on the CPU.
    cka = CKA(model, model1_layers=T5_LAYERS, pooling="mean", device="cpu")
    result = cka.compare(loader, progress=False)
    assert {"decoder.block.1.layer.1.EncDecAttention.k", "lm_head"} <= set(result.model1_layers)
    found = reference(model, loader, of_masks, "mean", is_decoder)
    assert_equals(result, found, found)


@pytest.mark.slow
def test_vision_transformer_and_resnet_are_compared_without_masks():
    """A vision transformer has one token more than patches, and nothing in it is masked."""
    torch.manual_seed(0)
    vit = tf.ViTModel(tf.ViTConfig(image_size=8, patch_size=4, **SMALL)).double().eval()
    config = tf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    resnet = tf.ResNetModel(config).double().eval()
    loader = [{"pixel_values": torch.randn(8, 3, 8, 8).double()} for _ in range(2)]
    result = CKA(vit, resnet, pooling="mean").compare(loader, progress=False)
    pairs = [(None, None)] * 2
    rows, columns = (reference(model, loader, pairs, "mean") for model in (vit, resnet))
    assert_equals(result, rows, columns)
