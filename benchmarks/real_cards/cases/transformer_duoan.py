"""Training steps of language models of four sizes, and checkpointing of groups of layers."""

import math
from typing import Any

from case import CUBLAS_OF_BLACKWELL, Case, Figure

SOURCE = "https://github.com/duoan/cs336-assignment2-systems/tree/main/benchmark_results"
SIZES = {"small": "5.04", "medium": "13.72", "large": "27.49", "2.7B": "65.54"}
GROUPS = {1: "63.60", 2: "69.56", 4: "81.48"}

CASE = Case(
    title="Training of language models, float32, batch 4",
    source=SOURCE,
    kind="training",
    card="rtx5090",
    memory="94.97GiB",
    real="not named, but Blackwell with 94.97 GiB, as a log there says; torch 2.11.0 (uv.lock)",
    torch="2.11",
    figures={
        **{f"{size}, 512 tokens": Figure(printed, "GiB") for size, printed in SIZES.items()},
        **{
            f"2.7B, 2,048 tokens, {group} layers a checkpoint": Figure(printed, "GiB")
            for group, printed in GROUPS.items()
        },
    },
    runs=(*SIZES, *(f"group {group}" for group in GROUPS)),
    environment=CUBLAS_OF_BLACKWELL,
    differs="Three steps to warm up instead of five, and two that are measured instead of ten.",
)


def measured(run: str) -> dict[str, int]:
    """Train: a few steps, then the peak of the following ones."""
    import torch
    from _transformer import VOCABULARY, PlainAdamW, cross_entropy, model

    torch.set_float32_matmul_precision("high")
    group = int(run.removeprefix("group ")) if run.startswith("group") else 0
    size, length = ("2.7B", 2048) if group else (run, 512)
    data = torch.randint(0, VOCABULARY, (4, length + 1), device="cuda")
    inputs, targets = data[:, :-1], data[:, 1:]
    network = model(size, length, gathered=False)
    optimizer = PlainAdamW(network.parameters(), decay_first=True)
    through = _in_groups(group) if group else None
    for _ in range(3):
        optimizer.zero_grad()
        logits = network(inputs, through)
        loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(1 if group else 2):
        logits = network(inputs, through)
        loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    name = f"2.7B, 2,048 tokens, {group} layers a checkpoint" if group else f"{run}, 512 tokens"
    return {name: torch.cuda.max_memory_allocated()}


def _in_groups(group: int) -> Any:
    from torch.utils.checkpoint import checkpoint

    def of_group(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    def through(layers: Any, x: Any) -> Any:
        for at in range(math.ceil(len(layers) / group)):
            part = layers[at * group : (at + 1) * group]
            x = checkpoint(of_group, part, x, use_reentrant=False)
        return x

    return through
