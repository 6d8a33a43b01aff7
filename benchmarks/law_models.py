"""Training steps of 20 models of 9 families, for the laws of their peaks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import nn

DEVICE = "cuda"


class Block(nn.Module):
    """A block of a transformer, with attention of one of four ways."""

    def __init__(self, width: int, heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.way == "softmax":
            scores = q @ k.transpose(-1, -2)
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            return scores.masked_fill(mask, -1e9).softmax(-1) @ v
        backend = {
            "flash": nn.attention.SDPBackend.FLASH_ATTENTION,
            "efficient": nn.attention.SDPBackend.EFFICIENT_ATTENTION,
            "math": nn.attention.SDPBackend.MATH,
        }[self.way]
        with nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, way: str, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, heads, way) for _ in range(layers))
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class UNet(nn.Module):
    """Two levels down and up, with the skipped results kept."""

    def __init__(self, upsample: bool) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up1 = (
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(32, 16, 1))
            if upsample
            else nn.ConvTranspose2d(32, 16, 2, stride=2)
        )
        self.out = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x).relu()
        second = self.middle(self.down2(F.max_pool2d(first, 2)).relu()).relu()
        return self.out(torch.cat([first, self.up1(second)], 1))


class Graph(nn.Module):
    """Messages along edges, with or without attention over them."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.first, self.second, self.score = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(64, 1)
        self.attends = attends

    def forward(self, x: torch.Tensor, source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        messages = hidden[source]
        if self.attends:
            scores = self.score(torch.cat([messages, hidden[to]], 1)).exp()
            total = torch.zeros(len(x), 1, device=x.device).index_add(0, to, scores)
            messages = messages * scores / total[to]
        return self.second(torch.zeros_like(hidden).index_add(0, to, messages))


class Mamba(nn.Module):
    """A selective state space layer, scanned in parallel or step by step."""

    def __init__(self, in_parallel: bool) -> None:
        super().__init__()
        self.inner, self.step, self.out = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(64, 32)
        self.in_parallel = in_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        gate = self.step(inner).sigmoid().unsqueeze(2)
        values = inner.unsqueeze(-1) * gate
        if self.in_parallel:
            states = values.cumsum(1) * gate
        else:
            state, found = torch.zeros_like(values[:, 0]), []
            for position in range(x.shape[1]):
                state = state * gate[:, position] + values[:, position]
                found.append(state)
            states = torch.stack(found, 1)
        return self.out(states.sum(-1))


class CellLoop(nn.Module):
    """A recurrent cell in a loop over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, found = torch.zeros(len(x), 64, device=x.device), []
        for position in range(x.shape[1]):
            hidden = self.cell(x[:, position], hidden)
            found.append(hidden)
        return torch.stack(found, 1)


class Experts(nn.Module):
    """A mixture of 4 experts with a capacity, so that no size depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.inner = nn.Parameter(torch.zeros(4, 32, 64))
        self.outer = nn.Parameter(torch.zeros(4, 64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        capacity = len(flat) // 4
        order = chosen.argsort()[: 4 * capacity].view(4, capacity)
        inner = torch.bmm(flat[order], self.inner).relu()
        back = torch.zeros_like(flat).index_add(
            0, order.flatten(), torch.bmm(inner, self.outer).flatten(0, 1)
        )
        return (back * weights.unsqueeze(1)).view_as(x)


class LoRA(nn.Module):
    """Frozen layers with adapters of rank 4."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(layers))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = (frozen(x) + up(down(x))).relu()
        return x


class Model:
    """A network, its optimizer, its sizes and its inputs."""

    def __init__(
        self,
        family: str,
        network: Callable[[], nn.Module],
        inputs: Callable[..., tuple[torch.Tensor, ...]],
        *,
        uses_cudnn: bool = True,
        **sizes: tuple[int, ...],
    ) -> None:
        self.family, self.network, self.inputs, self.sizes = family, network, inputs, sizes
        self.uses_cudnn = uses_cudnn

    def step(self) -> Callable[..., Any]:
        """Return a training step of a new network."""
        torch.backends.cudnn.enabled = self.uses_cudnn
        network = self.network().to(DEVICE)
        trained = [each for each in network.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained)

        def step(**sizes: int) -> None:
            found = network(*self.inputs(**sizes))
            found = found[0] if isinstance(found, tuple) else found
            found.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


def _images(batch: int, px: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(batch, 3, px, px, device=DEVICE),)


def tokens(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    """Return a batch of tokens."""
    return (torch.zeros(batch, seq, dtype=torch.long, device=DEVICE),)


def _sequence(width: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda batch, seq: (torch.zeros(batch, seq, width, device=DEVICE),)


def _rows(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(batch, 256, device=DEVICE),)


def _graph(nodes: int, edges: int) -> tuple[torch.Tensor, ...]:
    ends = torch.zeros(2, edges, dtype=torch.long, device=DEVICE)
    return torch.zeros(nodes, 16, device=DEVICE), ends[0], ends[1]


def _mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), *between, nn.Linear(512, 10))


def _cnn(norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, stride=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


_BATCH = (32, 64, 128)
_IMAGES = {"batch": (2, 4, 8), "px": (32, 64, 128)}
_SEQUENCES = {"batch": (2, 4, 8), "seq": (128, 256, 512)}
_SHORT = {"batch": (2, 4, 8), "seq": (8, 16, 32)}
MODELS = {
    "MLP": Model("MLP", _mlp, _rows, batch=_BATCH),
    "MLP, dropout": Model("MLP", lambda: _mlp(nn.Dropout()), _rows, batch=_BATCH),
    "MLP, batch norm": Model("MLP", lambda: _mlp(nn.BatchNorm1d(512)), _rows, batch=_BATCH),
    "CNN": Model("CNN", lambda: _cnn(norm=False), _images, **_IMAGES),
    "CNN, batch norm": Model("CNN", lambda: _cnn(norm=True), _images, **_IMAGES),
    "UNet, transposed": Model("UNet", lambda: UNet(upsample=False), _images, **_IMAGES),
    "UNet, bilinear": Model("UNet", lambda: UNet(upsample=True), _images, **_IMAGES),
    "GNN": Model(
        "GNN", lambda: Graph(False), _graph, nodes=(128, 256, 512), edges=(1024, 2048, 4096)
    ),
    "GNN, attention": Model(
        "GNN", lambda: Graph(True), _graph, nodes=(128, 256, 512), edges=(1024, 2048, 4096)
    ),
    "GPT, softmax": Model("GPT", lambda: GPT("softmax"), tokens, **_SEQUENCES),
    "GPT, flash": Model("GPT", lambda: GPT("flash").bfloat16(), tokens, **_SEQUENCES),
    "GPT, efficient": Model("GPT", lambda: GPT("efficient"), tokens, **_SEQUENCES),
    "GPT, math": Model("GPT", lambda: GPT("math"), tokens, **_SEQUENCES),
    "Mamba, parallel": Model("Mamba", lambda: Mamba(True), _sequence(32), **_SEQUENCES),
    "Mamba, step by step": Model("Mamba", lambda: Mamba(False), _sequence(32), **_SHORT),
    # cuDNN plans its recurrent layers only on a GPU.
    "LSTM": Model(
        "LSTM", lambda: nn.LSTM(32, 64, batch_first=True), _sequence(32), uses_cudnn=False, **_SHORT
    ),
    "GRU cell in a loop": Model("LSTM", CellLoop, _sequence(32), **_SHORT),
    "mixture of experts": Model("MoE", Experts, _sequence(32), **_SEQUENCES),
    "LoRA": Model("LoRA", LoRA, _sequence(128), **_SEQUENCES),
    "LoRA, wide": Model("LoRA", lambda: LoRA(512, 2), _sequence(512), **_SEQUENCES),
}
