"""Training ViT-H, compiled, with optimizers whose states have 32, 8 and 4 bits."""

from typing import Any

from case import Case, Figure

PUBLISHED = {
    "AdamW, fused": "12.23",
    "8-bit AdamW": "8.33",
    "FP8 AdamW": "8.33",
    "4-bit AdamW": "7.72",
}

CASE = Case(
    title="ViT-H of 630 million parameters, 224 pixels, batch 8, bfloat16 autocast, compiled",
    source="https://github.com/pytorch/ao/blob/main/torchao/optim/README.md",
    kind="training",
    card="rtx4090",
    real="RTX 4070 Ti SUPER, torch 2.4",
    torch="2.14",
    figures={name: Figure(printed, "GB") for name, printed in PUBLISHED.items()},
    runs=tuple(PUBLISHED),
    needs=("timm", "torchao"),
    takes=(
        "Inductor compiles a network of 32 layers and, for each shape of weights, an optimizer "
        "with four or eight bits; `--runs` takes one of the four."
    ),
    differs=(
        "Three steps instead of an epoch, without evaluation, whose peak is lower. Torch is 2.14: "
        "torchao needs it."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Train for three steps."""
    import timm
    import torch
    import torchao.optim

    optimizers: dict[str, Any] = {
        "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=1e-4, fused=True),
        "8-bit AdamW": lambda weights: torchao.optim.AdamW8bit(weights, lr=1e-4),
        "FP8 AdamW": lambda weights: torchao.optim.AdamWFp8(weights, lr=1e-4),
        "4-bit AdamW": lambda weights: torchao.optim.AdamW4bit(weights, lr=1e-4),
    }
    with torch.device("meta"):
        model = timm.create_model("vit_huge_patch14_224", num_classes=45)
    model.to_empty(device="cuda")
    model.compile(fullgraph=True)
    optimizer = optimizers[run](model.parameters())
    model.train()
    for _ in range(3):
        images = torch.empty(8, 3, 224, 224)
        labels = torch.zeros(8, dtype=torch.int64)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images.to("cuda")), labels.to("cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {run: torch.cuda.max_memory_allocated()}
