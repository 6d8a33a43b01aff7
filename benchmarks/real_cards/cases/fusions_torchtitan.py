"""Three patterns of Kimi K3, eager and compiled: the memory of a forward and a backward pass."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

from case import Case, Figure

MIB = 2**20
TOKENS, WIDTH = 32768, 7168
# MiB above the inputs, eager and compiled.
PUBLISHED = {
    "SiTU-GLU, 8192 x 3072": ("960", "192"),
    "SiTU-GLU, 32768 x 6144": ("7680", "1536"),
    "attention residual, 2 sources": ("11648", "2857"),
    "attention residual, 4 sources": ("22400", "8150"),
    "attention residual, 6 sources": ("33152", "11776"),
    "attention residual, 8 sources": ("43904", "15403"),
    "gated RMSNorm, 8 x 4096 x 96 x 128": ("12300", "3120"),
}

_CAUSE = (
    "the function: the one of that day was not found, and this is written like one of a later day"
)

CASE = Case(
    title="Operators of Kimi K3 alone, bfloat16 inputs computed in float32",
    source="https://github.com/pytorch/torchtitan/blob/main/benchmarks/kimi_k3_fusion_microbench_results.md",
    kind="operators",
    card="rtx5090",
    memory="270GiB",
    real="GB300, torch 2.15 of 2026",
    torch="2.15",
    rebuilt=("The functions of that day, of which only later ones were found."),
    figures={
        f"{name}, {way}": Figure(
            printed, "MiB", kind="compiled" if way == "compiled" else "", cause=_CAUSE
        )
        for name, row in PUBLISHED.items()
        for way, printed in zip(("eager", "compiled"), row, strict=True)
    },
    seen=(
        "The first version did not collect garbage before it measured, as the source does: two "
        "rows were 8 % too low."
    ),
    runs=("SiTU-GLU", "attention residual", "gated RMSNorm"),
    differs="Two passes to warm up instead of seconds of them. The kernels of FLA are left out.",
)


def measured(run: str) -> dict[str, int]:
    """Measure the shapes of a pattern one after another, as the source does."""
    import torch

    found = {}
    function, shapes = _PATTERNS[run]
    compiled = torch.compile(function)
    for name, make in shapes():
        for called in (function, compiled):
            _pass(called, make())
        for way, called in (("eager", function), ("compiled", compiled)):
            _pass(called, make())
            gc.collect()
            torch.cuda.empty_cache()
            inputs = make()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            _pass(called, inputs)
            found[f"{name}, {way}"] = torch.cuda.max_memory_allocated() - before
            del inputs
    return found


def _pass(function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    import torch

    output = function(*inputs)
    grad = torch.randn(output.shape, dtype=output.dtype, device="cuda")
    wanted = [tensor for tensor in inputs if torch.is_tensor(tensor)]
    torch.autograd.grad(output, wanted, grad_outputs=grad)


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def _situ(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    import torch

    dtype = gate.dtype
    gate, up = gate.float(), up.float()
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    up = linear_beta * torch.tanh(up / linear_beta)
    return (gate * up).to(dtype)


def _situ_shapes() -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    for rows, width in ((8192, 3072), (32768, 6144)):
        make = lambda r=rows, w=width: (_random(r, w), _random(r, w), 4.0, 25.0)  # noqa: E731
        yield f"SiTU-GLU, {rows} x {width}", make


def _residual(prefix: Any, blocks: Any, projection: Any, norm: Any, eps: float) -> Any:
    import torch

    values = torch.cat((blocks, prefix.unsqueeze(1)), dim=1)
    exact = values.float()
    variance = exact.pow(2).mean(dim=-1, keepdim=True)
    keys = exact * torch.rsqrt(variance + eps)
    scores = (keys * (norm.float() * projection.float())).sum(dim=-1)
    shares = torch.softmax(scores, dim=-1).unsqueeze(1)
    return torch.matmul(shares, exact).squeeze(1).to(values.dtype)


def _residual_shapes() -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    def made(saved: int) -> tuple[Any, ...]:
        wide = (_random(TOKENS, WIDTH), _random(TOKENS, saved, WIDTH))
        return *wide, _random(WIDTH), _random(WIDTH), 1e-5

    for saved in (1, 3, 5, 7):
        yield f"attention residual, {saved + 1} sources", lambda s=saved: made(s)


def _gated(x: Any, gate: Any, weight: Any, eps: float) -> Any:
    import torch

    normalized = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (normalized * gate.float().sigmoid()).to(x.dtype)


def _gated_shapes() -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    shape = (8, 4096, 96, 128)
    name = "gated RMSNorm, 8 x 4096 x 96 x 128"
    yield name, lambda: (_random(*shape), _random(*shape), _random(128), 1e-5)


_PATTERNS = {
    "SiTU-GLU": (_situ, _situ_shapes),
    "attention residual": (_residual, _residual_shapes),
    "gated RMSNorm": (_gated, _gated_shapes),
}
