"""Compare the memory of Qwen3-8B on the emulated device with figures published for a real card.

python benchmarks/published_qwen3.py [--json results.json]

The figures are of FakeGPU's docs/llm-inference-estimation.md: an RTX PRO 5000 with 72 GB, torch
2.9.1 with CUDA 12.8, bfloat16, a prompt of 9 tokens and two generated ones. The model is built from
its configuration on the meta device and then allocated, so no weights are needed. It takes
a minute, 3 GB of the computer's memory and no GPU. Exits with 1 if a figure is further off than
0.1 %.
"""

import argparse
import json
import os
from pathlib import Path

PUBLISHED_BYTES = {"loaded": 16_383_586_816, "inference_peak": 16_396_630_528}
"""What ``memory_allocated()`` and ``max_memory_allocated()`` returned on the card."""
WORKSPACE = ":4096:2:16:8"
"""What cuBLAS takes there with torch 2.9.1; later versions take 32 MB."""
TOLERANCE = 0.001
CARD = "rtx5090"  # of the same generation
CONFIGURATION = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
PROMPT_TOKENS, NEW_TOKENS = 9, 2


def measured() -> dict[str, int]:
    """Return the bytes of the loaded model, and the peak of generating two tokens."""
    import emulated_cuda

    emulated_cuda.load(CARD, values=False)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**CONFIGURATION)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).eval()
    model.to_empty(device="cuda")
    loaded = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tokens = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        cache = None
        for _ in range(NEW_TOKENS):
            output = model(tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            # Not the most likely token: without values there is none.
            tokens = torch.ones(1, 1, dtype=torch.int64, device="cuda")
    return {"loaded": loaded, "inference_peak": torch.cuda.max_memory_allocated()}


def main() -> None:
    """Print each figure beside the published one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    found = measured()
    rows = [
        {"figure": f"Qwen3-8B, {name.replace('_', ' ')}", "bytes": found[name], "published": bytes_}
        for name, bytes_ in PUBLISHED_BYTES.items()
    ]
    for row in rows:
        off = row["bytes"] - row["published"]
        print(f"{row['figure']}: {row['bytes']:,} bytes, published {row['published']:,}: {off:+,}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if any(abs(row["bytes"] / row["published"] - 1) > TOLERANCE for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
