"""What computed values on the emulated device cost, beside the CPU's own time.

``python benchmarks/values_cost.py`` prints the time of small operators on the CPU and on the
device, and of ResNet-18, forward and backward at batch 8 with images of 64 × 64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import emulated_cuda

emulated_cuda.load("a100")

import torch  # noqa: E402
import torchvision  # noqa: E402


def microseconds(function: Callable[[], Any], calls: int = 500) -> float:
    """Return the time of a call in the fastest of nine series: others may use the machine."""
    series = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        series.append((time.perf_counter() - start) / calls * 1e6)
    return min(series)


def operators() -> None:
    """Print a table of operators on 64 elements."""
    print("| operator | CPU, µs | emulated, µs | more, µs |\n| --- | --- | --- | --- |")
    x, mask = torch.rand(8, 8), torch.arange(8) > 3
    for name, function in (
        ("x + x", lambda x, mask: x + x),
        ("x * 2", lambda x, mask: x * 2),
        ("x.relu_()", lambda x, mask: x.relu_()),
        ("x @ x", lambda x, mask: x @ x),
        ("x.sum()", lambda x, mask: x.sum()),
        ("x.softmax(1)", lambda x, mask: x.softmax(1)),
        ("x.sum().item()", lambda x, mask: x.sum().item()),
        ("x[mask]", lambda x, mask: x[mask]),
        ("dropout(x)", lambda x, mask: torch.nn.functional.dropout(x)),
        ("x.view(64)", lambda x, mask: x.view(64)),
    ):
        times = []
        for device in ("cpu", "cuda"):
            arguments = x.to(device), mask.to(device)
            times.append(microseconds(lambda a=arguments, f=function: f(*a)))
        print(f"| `{name}` | {times[0]:.1f} | {times[1]:.1f} | {times[1] - times[0]:.1f} |")


def network() -> None:
    """Print the time of a training step without an optimizer."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    images = torch.randn(8, 3, 64, 64)
    times = {}
    for device in ("cpu", "cuda"):
        model.to(device)
        batch = images.to(device)

        def step(batch: torch.Tensor = batch) -> None:
            model(batch).square().sum().backward()

        step()
        times[device] = microseconds(step, 3) / 1000
    ratio = times["cuda"] / times["cpu"]
    print(
        f"ResNet-18, forward and backward: {times['cpu']:.0f} ms on the CPU, "
        f"{times['cuda']:.0f} ms emulated, {ratio:.2f} times as long"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    operators()
    network()
