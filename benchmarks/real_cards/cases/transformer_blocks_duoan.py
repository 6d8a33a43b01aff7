"""What is allocated after each layer of a language model, in the forward and the backward pass."""

from typing import Any

from case import CUBLAS_OF_BLACKWELL, Case, Figure

# GiB after each layer, by the layer's number.
FORWARD = """
38.4029 38.5661 38.7294 38.8927 39.0550 39.2173 39.3797 39.5420 39.7043 39.8666 40.0289
40.1912 40.3535 40.5158 40.6782 40.8405 41.0028 41.1651 41.3274 41.4897 41.6520 41.8143
41.9766 42.1390 42.3013 42.4636 42.6259 42.7882 42.9505 43.1128 43.2751 43.4374
"""
BACKWARD = """
50.8413 50.6134 50.3861 50.1587 49.9314 49.7030 49.4747 49.2464 49.0180 48.7897 48.5614
48.3330 48.1047 47.8764 47.6480 47.4197 47.1914 46.9630 46.7347 46.5064 46.2780 46.0497
45.8214 45.5930 45.3647 45.1364 44.9080 44.6797 44.4514 44.2230 43.9947 43.7664
"""
AROUND = {
    "before the forward pass": "38.2352",
    "after the forward pass": "43.4472",
    "after the loss": "43.4863",
    "after the backward pass": "50.9269",
}

CASE = Case(
    title="A language model of 3.4 billion parameters, batch 4, 128 tokens, layer by layer",
    source="https://github.com/duoan/cs336-assignment2-systems/blob/main/benchmark_results/memory/block_memory_xl_ctx128.txt",
    kind="training",
    card="rtx5090",
    memory="94.97GiB",
    real="not named, but Blackwell with 94.97 GiB, as a log there says; torch 2.11.0 (uv.lock)",
    torch="2.11",
    figures={
        **{
            f"forward, layer {layer}": Figure(printed, "GiB", "allocated")
            for layer, printed in enumerate(FORWARD.split())
        },
        **{
            f"backward, layer {layer}": Figure(printed, "GiB", "allocated")
            for layer, printed in enumerate(BACKWARD.split())
        },
        **{name: Figure(printed, "GiB", "allocated") for name, printed in AROUND.items()},
    },
    environment=CUBLAS_OF_BLACKWELL,
)


def measured(run: str) -> dict[str, int]:
    """Take three steps, then one with hooks of each layer."""
    import torch
    from _transformer import VOCABULARY, PlainAdamW, cross_entropy, model

    torch.set_float32_matmul_precision("high")
    data = torch.randint(0, VOCABULARY, (4, 129), device="cuda")
    inputs, targets = data[:, :-1], data[:, 1:]
    network = model("2.7B", 128, gathered=False)
    optimizer = PlainAdamW(network.parameters(), decay_first=True)
    for _ in range(3):
        optimizer.zero_grad()
        logits = network(inputs)
        loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    found: dict[str, int] = {}
    for at, layer in enumerate(network.layers):
        _hook(layer, at, found)
    found["before the forward pass"] = torch.cuda.memory_allocated()
    logits = network(inputs)
    found["after the forward pass"] = torch.cuda.memory_allocated()
    loss = cross_entropy(logits, targets)
    found["after the loss"] = torch.cuda.memory_allocated()
    loss.backward()
    found["after the backward pass"] = torch.cuda.memory_allocated()
    return found


def _hook(layer: Any, at: int, found: dict[str, int]) -> None:
    import torch

    def before(*_: Any) -> None:
        torch.cuda.synchronize()

    def forward(*_: Any) -> None:
        found[f"forward, layer {at}"] = torch.cuda.memory_allocated()

    def backward(*_: Any) -> None:
        found[f"backward, layer {at}"] = torch.cuda.memory_allocated()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(forward)
    layer.register_full_backward_pre_hook(before)
    layer.register_full_backward_hook(backward)
