"""Two steps of Llama 3 8B as torchtitan trains it on eight cards: ``fully_shard`` and bfloat16.

Configuration: torchtitan's llama3_8b without its checkpoints, so that 4,096 tokens for each card
fit instead of 8,192; AdamW. The model is that of transformers, and one process is rank 0 of a group
of eight that does not communicate.
"""

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"cards": 8, "tokens": 4096, "width": 4096, "depth": 32, "words": 128_256}
SMALL = {"cards": 1, "tokens": 32, "width": 64, "depth": 3, "words": 1_024}


def step(device, cards, tokens, width, depth, words):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # it asks the device

    backend = "fake" if cards > 1 else "gloo"
    store = distributed.HashStore()
    if distributed.is_initialized():  # a trial ended with an error
        distributed.destroy_process_group()
    distributed.init_process_group(backend, store=store, rank=0, world_size=cards)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=depth,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=words,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    with torch.device("meta" if cards > 1 else "cpu"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if cards > 1:
        model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.zeros(1, tokens, dtype=torch.long, device=device)
    for _ in range(2):
        logits = model(input_ids=text).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), text.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    distributed.destroy_process_group()
