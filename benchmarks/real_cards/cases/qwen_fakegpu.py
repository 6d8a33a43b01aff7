"""Inference of Qwen3-8B and fine-tuning of Qwen3.5-0.8B, as published by FakeGPU."""

import os
import sys
from pathlib import Path
from typing import Any

from case import CUBLAS_OF_BLACKWELL, Case, Figure

sys.path.append(str(Path(__file__).parents[2]))  # for published_finetuning and published_qwen3

LOADED, PEAK = "Qwen3-8B, loaded", "Qwen3-8B, inference"
TUNED = {
    "full, 16, two accumulated": "6.626",
    "full, 128": "6.687",
    "full, 128, checkpointed": "6.679",
    "LoRA, 16": "1.756",
    "LoRA, 128": "2.696",
    "LoRA, 128, checkpointed": "1.876",
    "FSDP1, two ranks, 16": "3.308",
    "FSDP1, two ranks, 128": "3.357",
}
_VERSIONS = (
    "versions: with torch 2.8.0 and transformers 5.12.1, as the source, it is within 0.2 % "
    "(ranks.md); transformers 5.24 computes the gated delta rule in another way"
)

CASE = Case(
    title="Qwen3-8B and Qwen3.5-0.8B, bfloat16, batch 1",
    source="https://github.com/FakeGPU/FakeGPU (its docs/llm-*-estimation.md)",
    kind="training",
    card="rtx5090",
    devices=2,
    real="RTX PRO 5000 with 72 GB; torch 2.9.1 (Qwen3-8B) and 2.8.0, transformers 5.12.1",
    torch="2.14",
    figures={
        LOADED: Figure("16383586816", "bytes", "allocated", kind="inference"),
        PEAK: Figure("16396630528", "bytes", kind="inference"),
        **{
            name: Figure(printed, "GiB", kind="ranks" if "FSDP" in name else "", cause=_VERSIONS)
            for name, printed in TUNED.items()
        },
    },
    runs=("Qwen3-8B", *TUNED),
    environment=CUBLAS_OF_BLACKWELL,
    needs=("transformers", "peft"),
    takes="Nine runs, of 10 to 100 s each on an idle machine, one after another.",
    seen="benchmarks/published_finetuning.py and published_qwen3.py had these figures before.",
)


def measured(run: str) -> dict[str, int]:
    """Generate two tokens, or take a step of training."""
    import published_finetuning
    import torch

    if run == "Qwen3-8B":
        return _inference()
    case = published_finetuning.CASES[run]
    if case.ranks == 1:
        return {run: int(published_finetuning.measured_here(case)["bytes"])}
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (run, queue), nprocs=2, join=True)
    return {run: max(queue.get() for _ in range(2))}


def _rank(rank: int, run: str, queue: Any) -> None:
    import published_finetuning

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518", "WORLD_SIZE": "2"}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **place)
    queue.put(int(published_finetuning.measured_here(published_finetuning.CASES[run])["bytes"]))


def _inference() -> dict[str, int]:
    import published_qwen3
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**published_qwen3.CONFIGURATION)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).eval()
    model.to_empty(device="cuda")
    loaded = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tokens = torch.ones(1, published_qwen3.PROMPT_TOKENS, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=True)
        following = output.logits[:, -1:].argmax(-1)
        model(input_ids=following, past_key_values=output.past_key_values, use_cache=True)
    return {LOADED: loaded, PEAK: torch.cuda.max_memory_allocated()}
