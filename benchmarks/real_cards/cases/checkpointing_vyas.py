"""A notebook that checkpoints parts of a small transformer: the peak of each run of ten steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

from case import Case, Figure

DEPTH = 12


class Network(NamedTuple):
    """One of the notebook's networks."""

    published: str
    """MB (10**6 bytes) at the peak of its steps."""
    attention: bool
    mlp: bool
    every_other: bool = False
    weights: bool = True
    """Whether attention returns its weights, which rules out fused kernels."""


# Cell by cell; every network of a cell is made before the first one is measured.
CELLS = (
    {
        "no checkpoints": Network("3140", False, False),
        "both checkpointed": Network("1414", True, True),
        "MLP checkpointed": Network("3093", False, True),
        "attention checkpointed": Network("1787", True, False),
    },
    {
        "all, again": Network("1819", True, True),
        "every other layer": Network("2803", True, True, every_other=True),
    },
    {
        "all, third time": Network("2216", True, True),
        "all, fused attention": Network("1691", True, True, weights=False),
        "every other layer, fused": Network("1987", True, True, every_other=True, weights=False),
    },
)

CASE = Case(
    title="A transformer of 12 layers x 512, 4,096 tokens, bfloat16",
    source="https://github.com/vinitvyas09/optimizers/blob/main/hw2_activation_checkpointing.ipynb",
    kind="training",
    card="a100-40gb",
    real="A100-SXM4-40GB, torch 2.9.0 with CUDA 12.6",
    torch="2.9",
    figures={
        name: Figure(network.published, "MB") for cell in CELLS for name, network in cell.items()
    },
    differs="Three steps instead of ten. What earlier cells of the notebook kept is not known.",
)


def measured(run: str) -> dict[str, int]:
    """Run the cells one after another; networks of earlier cells stay, with their gradients."""
    import torch

    found: dict[str, int] = {}
    kept: list[Any] = []
    for cell in CELLS:
        x = torch.randn(1, 4096, 512, dtype=torch.bfloat16, device="cuda")
        made = {name: _made(network) for name, network in cell.items()}
        kept.append((x, made))
        for name, (blocks, forward) in made.items():
            found[name] = _peak(blocks, forward, x)
    return found


def _peak(blocks: Any, forward: Callable[[Any], Any], x: Any) -> int:
    import torch

    optimizer = torch.optim.AdamW(blocks.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.zero_grad()
        out = forward(x)
        loss = out.mean()
        loss.backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated()


def _made(network: Network) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from torch import nn
    from torch.nn.functional import relu
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(512, 4, batch_first=True)
            self.linear1, self.linear2 = nn.Linear(512, 2048), nn.Linear(2048, 512)
            self.norm1, self.norm2 = nn.LayerNorm(512), nn.LayerNorm(512)

        def attention(self, x: Any) -> Any:
            h = self.norm1(x)
            return x + self.attn(h, h, h, need_weights=network.weights)[0]

        def mlp(self, x: Any) -> Any:
            h = self.norm2(x)
            return x + self.linear2(relu(self.linear1(h)))

    blocks = nn.ModuleList(Block().to(dtype=torch.bfloat16, device="cuda") for _ in range(DEPTH))

    def forward(x: Any) -> Any:
        for at, block in enumerate(blocks):
            chosen = at % 2 == 1 if network.every_other else at > 0
            for part, wanted in ((block.attention, network.attention), (block.mlp, network.mlp)):
                again = chosen and wanted
                x = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return x

    return blocks, forward
