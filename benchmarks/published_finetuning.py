"""Compare fine-tuning of Qwen3.5-0.8B on emulated devices with figures published for real cards.

python benchmarks/published_finetuning.py [--cases NAME ...] [--json results.json]

The figures are of FakeGPU's docs/llm-sft-memory-estimation.md: RTX PRO 5000 cards with 72 GB, torch
2.8.0 with CUDA 12.8, transformers 5.12.1, bfloat16, batch 1, AdamW without ``foreach``: the peak of
a forward pass, a backward pass and the step. The rows of LoRA need peft; those of FSDP start two
ranks with NCCL. Each row takes up to a minute and 3 GB of the computer's memory, and no GPU. Exits
with 1 if a figure is further off than 1 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 0.01
GIB = 2**30
CARD = "rtx5090"  # of the same generation
WORKSPACE = ":4096:2:16:8"
"""What cuBLAS takes there with torch 2.8; later versions take 32 MB."""


class Case(NamedTuple):
    """A row of the published table, with its figure in GiB."""

    published: float
    tokens: int
    accumulated: int = 1
    checkpointed: bool = False
    lora: bool = False
    ranks: int = 1


CASES = {
    "full, 16, two accumulated": Case(6.626, 16, accumulated=2),
    "full, 128": Case(6.687, 128),
    "full, 128, checkpointed": Case(6.679, 128, checkpointed=True),
    "LoRA, 16": Case(1.756, 16, lora=True),
    "LoRA, 128": Case(2.696, 128, lora=True),
    "LoRA, 128, checkpointed": Case(1.876, 128, checkpointed=True, lora=True),
    "FSDP1, two ranks, 16": Case(3.308, 16, ranks=2),
    "FSDP1, two ranks, 128": Case(3.357, 128, ranks=2),
}
CONFIGURATION = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
PARAMETERS = 752_393_024


def model_of(case: Case) -> Any:
    """Return the model on the device, as the row trains it.

    Raises:
        ValueError: if this version of transformers builds another model from the configuration.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**CONFIGURATION)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        raise ValueError(f"the model has {found:,} parameters, the published one {PARAMETERS:,}")
    model.to_empty(device="cuda")
    model.tie_weights()
    model.train()
    if case.checkpointed:
        model.gradient_checkpointing_enable()
    if case.lora:
        import peft

        model.enable_input_require_grads()
        lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    return sharded(model) if case.ranks > 1 else model


def sharded(model: Any) -> Any:
    """Shard each of the 24 layers and the root, without prefetching."""
    from functools import partial

    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    layers = {type(model.model.layers[0])}
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
        backward_prefetch=None,
        forward_prefetch=False,
        use_orig_params=True,
    )


def measured_here(case: Case) -> dict[str, int | str]:
    """Return the peak of a training step, measured in this process, and the versions."""
    import torch
    import transformers

    if case.ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    model = model_of(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    tokens = torch.ones(1, case.tokens, dtype=torch.int64, device="cuda")
    labels = tokens.clone()
    labels[:, : case.tokens // 2] = -100
    torch.cuda.reset_peak_memory_stats()
    for _ in range(case.accumulated):
        output = model(input_ids=tokens, labels=labels, use_cache=False)
        (output.loss / case.accumulated).backward()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    if case.ranks > 1:
        torch.distributed.destroy_process_group()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"bytes": peak, **versions}


def measured(name: str) -> dict[str, Any]:
    """Return what the rank with the highest peak found; each rank has a process of its own."""
    ranks = CASES[name].ranks
    emulated = ["-m", "emulated_cuda", "--card", CARD, "--devices", str(ranks), "--no-values"]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        given = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": WORKSPACE, "OMP_NUM_THREADS": "1"}
        script = [__file__, "--one", name, "--into", folder]
        command = [sys.executable, *emulated, *(launch if ranks > 1 else []), *script]
        subprocess.run(command, env=given, check=True)
        found = [json.loads(file.read_text("utf-8")) for file in Path(folder).iterdir()]
    return max(found, key=lambda rank: int(rank["bytes"]))


def main() -> None:
    """Print each figure beside the published one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        found = json.dumps(measured_here(CASES[args.one]))
        (args.into / os.environ.get("RANK", "0")).write_text(found, encoding="utf-8")
        return
    rows = []
    for name in args.cases:
        row = {"case": name, "published_gib": CASES[name].published, **measured(name)}
        gib = row["bytes"] / GIB
        off = gib / row["published_gib"] - 1
        print(f"{name}: {gib:.3f} GiB, published {row['published_gib']}: {off:+.2%}", flush=True)
        rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if any(abs(row["bytes"] / GIB / row["published_gib"] - 1) > TOLERANCE for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
