"""One step of LoRA by peft: rank 8 on queries and values of a Llama of
SmolLM-135M's configuration, 8 x 1,024 tokens.
"""

import torch
from _set_ups import LLAMA_SIZES, LLAMA_SMALL, llama_config
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

SIZES, SMALL = LLAMA_SIZES, LLAMA_SMALL


def step(device, batch, tokens, width, depth, words):
    base = LlamaForCausalLM(llama_config(width, depth, words))
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    text = torch.randint(0, words, (batch, tokens), device=device)
    for _ in range(2):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
