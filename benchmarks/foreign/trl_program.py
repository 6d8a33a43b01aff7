"""Fine-tuning and preferences as in TRL's README, with a random Llama of two layers.

The tokenizer of torchtitan's tests is the only one at hand without a network.
"""

import sys
import tempfile

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1])
tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
CONFIG = {
    "vocab_size": len(tokenizer) + 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
COMMON = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
}


def model():
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def end(name, trainer):
    trainer.train()
    assert next(trainer.model.parameters()).is_cuda
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == COMMON["max_steps"]
    print("RESULT", name, losses, flush=True)


with tempfile.TemporaryDirectory() as folder:
    texts = Dataset.from_dict({"text": ["a card has memory"] * 16})
    end(
        "SFT",
        SFTTrainer(
            model=model(),
            args=SFTConfig(output_dir=folder, **COMMON),
            processing_class=tokenizer,
            train_dataset=texts,
        ),
    )
    pairs = {"prompt": "what is", "chosen": " a card", "rejected": " nothing here"}
    end(
        "DPO",
        DPOTrainer(
            model=model(),
            ref_model=model(),
            args=DPOConfig(output_dir=folder, **COMMON),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({key: [text] * 16 for key, text in pairs.items()}),
        ),
    )
