"""One step of LoRA by peft: rank 8 on queries and values of a Llama of
SmolLM-135M's configuration, 8 x 1,024 tokens.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

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
    base = LlamaForCausalLM(config)
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
