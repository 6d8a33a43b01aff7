"""Two steps of transformers' Trainer with a Llama of SmolLM-135M's configuration,
8 x 1,024 tokens.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"batch": 8, "tokens": 1024, "width": 576, "depth": 30, "words": 49_152}
SMALL = {"batch": 4, "tokens": 32, "width": 72, "depth": 4, "words": 1_024}


def step(device, batch, tokens, width, depth, words):
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=depth,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=words,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    texts = torch.arange(batch * 2 * tokens).remainder(words).view(batch * 2, tokens)
    rows = [{"input_ids": text, "labels": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            dataloader_pin_memory=False,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
