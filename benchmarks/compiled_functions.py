"""Compile functions and training runs for an emulated card; compare values, peaks and caches.

python benchmarks/compiled_functions.py [--names NAME ...] [--json results.json]

Twenty functions run forward and backward, and three networks are trained for 20 steps. Their values
are compared with those of the same code on the CPU, which is not compiled. The peak and the reserve
must be equal to the byte in three processes: with empty caches, with the caches that the first has
filled, and without values. No GPU is needed. Exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 1e-4
STEPS = 20


def functions() -> dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]]:
    """Return name -> function, its inputs on the CPU, and options of ``torch.compile``."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    x, y = torch.randn(2, 48, 96)
    image = torch.randn(2, 8, 16, 16)
    q, k, v = torch.randn(3, 2, 4, 32, 16)
    at = torch.tensor([3, 1, 4, 1, 0])
    weight, norm = torch.randn(8, 8, 3, 3) / 8, torch.rand(8) + 0.5
    target = torch.randint(96, (48,))
    cell = {"mode": "reduce-overhead"}

    def broken(x: Any) -> Any:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos() if x.shape[0] > 3 else x

    def recomputed(x: Any, y: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda a, b: (a @ b.T).tanh(), x, y, use_reentrant=False)

    def rotated(q: Any, c: Any) -> Any:
        a, b = q.chunk(2, -1)
        return torch.cat((a * c.cos() - b * c.sin(), b * c.cos() + a * c.sin()), -1)

    return {
        "pointwise": (lambda x, y: torch.where(x > 0, x.exp(), y.sin()) * F.gelu(y), [x, y], {}),
        "softmax": (lambda x: x.softmax(1) + x.log_softmax(0), [x], {}),
        "layer norm": (lambda x, w: F.layer_norm(x, (96,), w), [x, y[0]], {}),
        "rms norm": (lambda x, w: F.rms_norm(x, (96,), w), [x, y[0]], {}),
        "group norm": (lambda x, w: F.group_norm(x, 4, w), [image, norm], {}),
        "reductions": (lambda x: x.amax(0) + x.var(0) + x.prod(0) + x.logsumexp(0), [x], {}),
        "scans": (lambda x: x.cumsum(1) + x.flip(1).cumprod(1), [x[:, :16].tanh()], {}),
        "sort": (lambda x: x.sort(1)[0] * x.topk(8, 1)[0].sum(1, keepdim=True), [x[:, :32]], {}),
        "product": (lambda x, y: F.relu(x @ y.T + 1).mean(0), [x, y], {}),
        "batched product": (lambda q, k: (q @ k.mT).tanh(), [q, k], {}),
        "convolution": (lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w)), 2), [image, weight], {}),
        "interpolation": (lambda x: F.interpolate(x, scale_factor=1.5), [image], {}),
        "embedding": (lambda i, w: F.embedding(i, w).mean(1), [torch.randint(48, (6, 7)), x], {}),
        "index and scatter": (lambda i, x: x[i].index_add(0, i, x[:5]), [at, x], {}),
        "cross entropy": (lambda x, t: F.cross_entropy(x, t), [x, target], {}),
        "attention": (F.scaled_dot_product_attention, [q, k, v], {}),
        "rotary embedding": (rotated, [q, torch.randn(32, 8)], {}),
        "graph break": (broken, [x], {}),
        "checkpoint": (recomputed, [x, y], {}),
        "dynamic shapes": (lambda x: F.silu(x).sum(1) * x.shape[0], [x], {"dynamic": True}),
        "in a CUDA graph": (lambda x, y: (x * y).tanh().sum(1), [x, y], cell),
    }  # fmt: skip


def trainings() -> dict[str, Callable[[], Any]]:
    """Return name -> what makes the network, and the inputs and targets of one step."""
    from torch import nn

    def perceptron() -> Any:
        layers = nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)
        return nn.Sequential(*layers), (8, 16)

    def convolutions() -> Any:
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)), (4, 3, 12, 12)

    def transformer() -> Any:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 32, 4)), (4, 8, 32)

    return {"perceptron": perceptron, "convolutions": convolutions, "transformer": transformer}


# ---- One process ----


def work(names: list[str], values: bool) -> None:
    """Print a line of JSON for each function and training."""
    import emulated_cuda

    emulated_cuda.load("a100", values=values)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, (function, inputs, options) in functions().items():
        if name in names:
            print(json.dumps([name, *compared(function, inputs, options, values)]), flush=True)
    for name, make in trainings().items():
        if name in names:
            print(json.dumps([name, *trained(make, values)]), flush=True)


def compared(
    function: Callable[..., Any], inputs: list[Any], options: dict[str, Any], values: bool
) -> tuple[float, list[int], float]:
    """Return the largest difference, peak and reserve, and the seconds of the first call."""
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(function, **options)
    on_device, on_cpu = (
        [x.detach().clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        for device in ("cuda", "cpu")
    )
    start_measuring()
    begun = time.process_time()
    found = forward_and_backward(compiled, on_device)
    seconds = round(time.process_time() - begun, 1)
    figures = [torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
    if not values:
        return 0.0, figures, seconds
    expected = forward_and_backward(function, on_cpu)
    return largest_difference(found, expected), figures, seconds


def forward_and_backward(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    result = function(*inputs)
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in inputs if x.grad is not None)]


def largest_difference(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference beside 1 and the number that is expected."""
    assert len(found) == len(expected)
    pairs = [(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return float(max(((a - b).abs() / (1 + b.abs())).max() for a, b in pairs))


def trained(make: Callable[[], Any], values: bool) -> tuple[float, list[int], float]:
    """Return the same of 20 steps; differences are those of losses."""
    import torch

    torch._dynamo.reset()
    start_measuring()
    begun = time.process_time()
    on_device = list(losses(make, "cuda", torch.compile))
    seconds = round(time.process_time() - begun, 1)
    figures = [torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
    if not values:
        return 0.0, figures, seconds
    on_cpu = list(losses(make, "cpu", lambda network: network))
    return max(abs(a - b) for a, b in zip(on_device, on_cpu, strict=True)), figures, seconds


def losses(make: Callable[[], Any], device: str, wrap: Callable[[Any], Any]) -> Iterator[float]:
    import torch

    torch.manual_seed(0)
    network, shape = make()
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    step = wrap(network)
    for _ in range(STEPS):
        x, y = torch.randn(shape), torch.randint(4, shape[:1])
        loss = torch.nn.functional.cross_entropy(step(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item() if sys.argv[-1] == "on" else 0.0


def start_measuring() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# ---- Three processes ----


def outcomes(names: list[str], values: str, caches: Path) -> dict[str, Any]:
    """Return name -> what a new process found."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, "--names", *names, "--work", values]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, check=False, stdout=subprocess.PIPE, text=True
    )
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    return {row[0]: row[1:] for row in rows}


def main() -> int:
    known = [*functions(), *trainings()]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", choices=["on", "off"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.names, options.work == "on")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cold, warm, without = (
            outcomes(options.names, values, Path(folder)) for values in ("on", "on", "off")
        )
    rows, wrong = [], []
    for name in options.names:
        found = [one.get(name, [None, None, None]) for one in (cold, warm, without)]
        difference, figures, seconds = found[0]
        same = all(one[1] == figures for one in found)
        row = {"name": name, "difference": difference, "peak_and_reserve": figures}
        row |= {"same_peaks": same, "seconds_cold": seconds, "seconds_warm": found[1][2]}
        rows.append(row)
        if difference is None or difference > TOLERANCE or not same:
            wrong.append(name)
            print(name, found)
        print(json.dumps(row), flush=True)
    print(f"{len(rows) - len(wrong)} of {len(rows)} as on the CPU, with the same peaks")
    if options.json:
        import torch
        import triton

        data = {"torch": torch.__version__, "triton": triton.__version__, "card": "a100"}
        data |= {"date": time.strftime("%Y-%m-%d"), "rows": rows}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
