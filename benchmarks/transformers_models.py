"""Tests of transformers for all models, on tiny models of seven architectures.

They are the methods of ``ModelTesterMixin`` in ``tests/test_modeling_common.py``, which the source
distribution of transformers contains. The tests of each model, of generation and of export are only
in its repository, so the models are configured here, and the mixins of those two are empty.
``emulated_suites.py`` copies this file into the unpacked source distribution.
"""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import transformers

for _module, _mixin in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    _empty = types.ModuleType(f"tests.{_module}")
    setattr(_empty, _mixin, type(_mixin, (), {}))
    sys.modules[_empty.__name__] = _empty

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import (  # noqa: E402
    ModelTesterMixin,
    floats_tensor,
    ids_tensor,
    random_attention_mask,
)

BATCH, LENGTH, WORDS, WIDTH, HEADS, LAYERS, CHANNELS, SIDE, PATCH = 4, 7, 99, 32, 4, 2, 3, 30, 2
POSITIONS = 40  # few, so that layers and not embeddings decide where a model is split


class Tester:
    """A tiny configuration and a batch, in the form in which the mixin asks for them."""

    batch_size, seq_length, hidden_size = BATCH, LENGTH, WIDTH
    num_attention_heads, num_hidden_layers, num_choices = HEADS, LAYERS, 3
    image_size, patch_size, is_training = SIDE, PATCH, True
    decoder_seq_length = encoder_seq_length = LENGTH
    mask_length = num_masks = 0  # of patches, for models that learn to restore them

    def __init__(self, config: Callable[[], Any], inputs: Callable[[], dict[str, Any]]) -> None:
        self.get_config = config
        self._inputs = inputs

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return a new configuration and a new batch."""
        return self.get_config(), self._inputs()


def words() -> dict[str, Any]:
    """Return a batch for a language model."""
    shape = [BATCH, LENGTH]
    return {"input_ids": ids_tensor(shape, WORDS), "attention_mask": random_attention_mask(shape)}


def pairs() -> dict[str, Any]:
    """Return a batch for a model with an encoder and a decoder."""
    return words() | {f"decoder_{name}": value for name, value in words().items()}


def images() -> dict[str, Any]:
    """Return a batch for a model of images."""
    return {"pixel_values": floats_tensor([BATCH, CHANNELS, SIDE, SIDE])}


def sizes(**more: Any) -> dict[str, Any]:
    """Return the arguments of most configurations."""
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 37,
        "pad_token_id": 0,
        **more,
    }


class BertTest(ModelTesterMixin, unittest.TestCase):
    """An encoder of text."""

    all_model_classes = (
        transformers.BertModel,
        transformers.BertForMaskedLM,
        transformers.BertForSequenceClassification,
    )

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.BertConfig(
                vocab_size=WORDS, max_position_embeddings=POSITIONS, **sizes()
            ),
            words,
        )


class DistilBertTest(ModelTesterMixin, unittest.TestCase):
    """A smaller encoder of text."""

    all_model_classes = (
        transformers.DistilBertModel,
        transformers.DistilBertForMaskedLM,
        transformers.DistilBertForTokenClassification,
    )

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.DistilBertConfig(
                vocab_size=WORDS,
                max_position_embeddings=POSITIONS,
                dim=WIDTH,
                n_layers=LAYERS,
                n_heads=HEADS,
                hidden_dim=37,
            ),
            words,
        )


class Gpt2Test(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """A decoder of text."""

    all_model_classes = (transformers.GPT2Model, transformers.GPT2LMHeadModel)

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.GPT2Config(
                vocab_size=WORDS,
                n_positions=POSITIONS,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                bos_token_id=98,
                eos_token_id=98,
                pad_token_id=97,
            ),
            words,
        )


class LlamaTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """A decoder of text with rotary positions and grouped heads."""

    all_model_classes = (transformers.LlamaModel, transformers.LlamaForCausalLM)

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **sizes()),
            words,
        )


class T5Test(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """An encoder and a decoder of text."""

    is_encoder_decoder = True
    all_model_classes = (transformers.T5Model, transformers.T5ForConditionalGeneration)

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.T5Config(
                vocab_size=WORDS,
                d_model=WIDTH,
                d_kv=WIDTH // HEADS,
                d_ff=37,
                num_layers=LAYERS,
                num_heads=HEADS,
                decoder_start_token_id=0,
                pad_token_id=0,
            ),
            pairs,
        )


class ViTTest(ModelTesterMixin, unittest.TestCase):
    """A transformer of images."""

    test_resize_embeddings = False
    all_model_classes = (transformers.ViTModel, transformers.ViTForImageClassification)

    def setUp(self) -> None:
        arguments = {key: value for key, value in sizes().items() if key != "pad_token_id"}
        self.model_tester = Tester(
            lambda: transformers.ViTConfig(image_size=SIDE, patch_size=PATCH, **arguments), images
        )
        patches = (SIDE // PATCH) ** 2
        self.model_tester.seq_length = self.model_tester.encoder_seq_length = patches + 1
        self.model_tester.mask_length, self.model_tester.num_masks = patches, patches // 2


class ResNetTest(ModelTesterMixin, unittest.TestCase):
    """A convolutional network."""

    test_resize_embeddings = has_attentions = False
    model_split_percents = (0.5, 0.9)  # at 0.7, accelerate puts all of so small a model on the CPU
    all_model_classes = (transformers.ResNetModel, transformers.ResNetForImageClassification)

    def setUp(self) -> None:
        self.model_tester = Tester(
            lambda: transformers.ResNetConfig(
                num_channels=CHANNELS, embedding_size=10, hidden_sizes=[10, 20], depths=[1, 1]
            ),
            images,
        )
