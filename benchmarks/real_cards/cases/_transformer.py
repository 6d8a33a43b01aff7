"""A language model of single operators, as a course's assignment gives it to its students.

RMS norms that compute in float32, rotary positions, attention whose scores are all there, SwiGLU
and a head that is not tied; every product is an einsum.
"""

from collections.abc import Callable
from typing import Any

import torch
from _attention import attention
from torch import nn

SIZES = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
}
"""Width, width of the MLP, layers, heads."""
VOCABULARY = 10_000


def weight(*shape: int) -> nn.Parameter:
    """Return a parameter; nothing here depends on its values."""
    return nn.Parameter(torch.empty(*shape))


class Linear(nn.Module):
    """A product with a matrix (out, in)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = weight(outer, inner)

    def forward(self, x: Any) -> Any:
        """Return (..., outer)."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    """A root mean square norm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = weight(width)

    def forward(self, x: Any) -> Any:
        """Return the shape and type of x."""
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Positions(nn.Module):
    """Rotary positions; ``gathered`` looks each position up, otherwise a slice has them."""

    def __init__(self, length: int, width: int, gathered: bool) -> None:
        super().__init__()
        self.gathered = gathered
        self.register_buffer("table", torch.empty(2, length, width // 2), persistent=False)

    def forward(self, x: Any, places: Any) -> Any:
        """Return (..., length, width)."""
        pairs = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        first, second = pairs
        if self.gathered:
            cos, sin = self.table[:, places.expand(*x.shape[:1], 1, -1)]
        else:
            cos, sin = self.table[:, : x.shape[-2]].unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        if self.gathered:
            return torch.stack((turned_first, turned_second), dim=-1).flatten(-2).contiguous()
        return torch.concat((turned_first, turned_second), dim=-1)


class Attention(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, width: int, heads: int, positions: Positions) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.positions = positions

    def forward(self, x: Any) -> Any:
        """Return (batch, length, width)."""
        length = x.shape[1]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        gathered = self.positions.gathered
        places = torch.arange(length, device=x.device)[None, None] if gathered else None
        q, k = self.positions(q, places), self.positions(k, places)
        order = torch.arange(length, device=x.device)
        mask = order[:, None] >= order[None, :]
        found = attention(q, k, v, mask)
        found = found.transpose(1, 2).flatten(2).contiguous()
        return self.out(found)


class Gated(nn.Module):
    """SwiGLU: three matrices."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Linear(width, inner), Linear(inner, width), Linear(width, inner)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        """Return the shape of x."""
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Any) -> Any:
    """Return x * sigmoid(x)."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """A layer: attention and MLP, each after a norm and beside a residual."""

    def __init__(self, width: int, inner: int, heads: int, positions: Positions) -> None:
        super().__init__()
        self.attention = Attention(width, heads, positions)
        self.mlp = Gated(width, inner)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Any) -> Any:
        """Return the shape of x."""
        x_attention = self.attention(self.norm1(x))
        after = x + x_attention
        x_mlp = self.mlp(self.norm2(after))
        return after + x_mlp


class Model(nn.Module):
    """The language model; tokens (batch, length) give logits (batch, length, vocabulary)."""

    def __init__(self, size: str, length: int, *, gathered: bool = True) -> None:
        super().__init__()
        width, inner, layers, heads = SIZES[size]
        self.embedding = weight(VOCABULARY, width)
        positions = Positions(length, width // heads, gathered)
        self.positions = positions
        self.layers = nn.ModuleList(Block(width, inner, heads, positions) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Linear(width, VOCABULARY)

    def forward(self, tokens: Any, through: Callable[[Any, Any], Any] | None = None) -> Any:
        """Return the logits; ``through`` takes the layers and x, if it is given."""
        x = self.embedding[tokens]
        if through is not None:
            x = through(self.layers, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


def model(size: str, length: int, *, gathered: bool = True) -> Model:
    """Return a model on the device, allocated parameter by parameter."""
    with torch.device("meta"):
        made = Model(size, length, gathered=gathered)
    return made.to_empty(device="cuda")


def log_softmax(x: Any) -> Any:
    """Return the logarithm of the softmax; what it shifts lives no longer than this function."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean loss, of single operators."""
    logs = -log_softmax(logits)
    return torch.mean(torch.gather(logs, -1, targets.unsqueeze(-1)))


class PlainAdamW:
    """AdamW parameter by parameter, whose moments are new tensors after each step."""

    def __init__(self, parameters: Any, *, decay_first: bool = False) -> None:
        self.parameters = list(parameters)
        self.state: dict[int, tuple[Any, Any]] = {}
        self.decay_first = decay_first

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Take a step."""
        for at, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            grad = parameter.grad.data
            if self.decay_first:
                parameter.data -= 1e-5 * parameter.data
            before = (torch.zeros_like(grad), torch.zeros_like(grad))
            before = self.state.get(at, before)
            first = 0.9 * before[0] + (0.1 * grad)
            second = 0.999 * before[1] + (0.001 * torch.square(grad))
            parameter.data -= 1e-3 * first / (torch.sqrt(second) + 1e-8)
            if not self.decay_first:
                parameter.data -= 1e-5 * parameter.data
            self.state[at] = (first, second)
