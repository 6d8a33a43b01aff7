"""Two steps of transformers' Trainer with a Llama of SmolLM-135M's configuration,
8 x 1,024 tokens.
"""

import tempfile

import torch
from _set_ups import LLAMA_SIZES, LLAMA_SMALL, llama_config
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

SIZES, SMALL = LLAMA_SIZES, LLAMA_SMALL


def step(device, batch, tokens, width, depth, words):
    model = LlamaForCausalLM(llama_config(width, depth, words))
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
