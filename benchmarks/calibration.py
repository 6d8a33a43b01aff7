"""How often a calibrated comparison takes unrelated networks for similar ones, and what it costs.

python benchmarks/calibration.py false-positives --pairs 1000 --json results.json
python benchmarks/calibration.py cost --json results.json

Two networks are unrelated if their inputs are: each network of a pair has its own weights and its
own random images, so the outputs of the two are independent, whatever the layers compute.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conditions import processor
from networks import NETWORKS, images
from torch import Tensor, nn

from cka import CKA
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.reports.files import write_whole

NULL = 200
LEVEL = 0.05
FIRST = 200
"""Shares are written after this number of pairs too."""


def perceptron() -> nn.Module:
    """Three hidden layers with ReLU."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def convolutional() -> nn.Module:
    """Three convolutions with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(16, 10)),
    )


KINDS = {"perceptron": perceptron, "convolutional": convolutional}


def batches(seed: int, count: int, size: int) -> list[Tensor]:
    """Return random images of 8 x 8 pixels."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, size, 3, 8, 8, generator=generator))


def false_positives(pairs: int) -> list[dict[str, Any]]:
    """Return for each kind and estimator which share of pairs has a p-value at the level.

    The shares are those of p of the two middle layers, of p_best of the best pair of layers, and of
    p of the best pair, which is not corrected.
    """
    rows = []
    for kind, make in KINDS.items():
        for estimator in ("unbiased", "biased"):
            fixed = best = naive = layers = 0
            row: dict[str, Any] = {"networks": kind, "estimator": estimator, "null": NULL}
            for number in range(pairs):
                torch.manual_seed(number)
                one, other = make(), make()
                result = CKA(one, other, device="cpu", estimator=estimator).compare(
                    batches(2 * number, 4, 32),
                    batches(2 * number + 1, 4, 32),
                    progress=False,
                    null=NULL,
                    generator=torch.Generator().manual_seed(number),
                )
                found = result.calibration
                assert found is not None
                layers = len(result.model1_layers)
                middle = layers // 2
                fixed += bool(found.p[middle, middle] <= LEVEL)
                best += bool((found.p_best <= LEVEL).any())
                naive += bool((found.p <= LEVEL).any())
                if number + 1 in (FIRST, pairs):
                    shares = (fixed, best, naive)
                    row[f"after_{number + 1}"] = [one / (number + 1) for one in shares]
            row |= {"layers": layers, "level": LEVEL, "batches": 4, "batch_size": 32}
            row |= {"processor": processor(), "torch": torch.__version__}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def forward(model: nn.Module, loader: Any) -> None:
    """Run the network over the data without keeping any result."""
    with torch.no_grad():
        for batch, _ in loader:
            model(batch)


def compared(model: nn.Module, loader: Any, part: int | None, **resamples: int) -> object:
    """Compare the network with itself."""
    cka = CKA(model, device="cpu", hsic_batch_size=part)
    return cka.compare(loader, progress=False, **resamples)


def cost(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return peak and CPU time of a ResNet-18 compared with itself, with and without resamples."""
    probe = MemoryProbe("cpu")
    model = NETWORKS["resnet18"]().eval()
    rows = []
    for size in sizes:
        loader = images(size, 2 * size)
        bare_forward = partial(forward, model, loader)
        calls: dict[str, Callable[[], object]] = {"forward pass": bare_forward}
        for part in (None,) if size <= 64 else (None, 64):
            name = "compare" if part is None else f"compare, hsic_batch_size={part}"
            calls[name] = partial(compared, model, loader, part)
            calls[f"{name}, null={NULL}"] = partial(compared, model, loader, part, null=NULL)
            calls[f"{name}, bootstrap={NULL}"] = partial(
                compared, model, loader, part, bootstrap=NULL
            )
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                start = time.process_time()
                call()
                if number > 0:
                    seconds[name].append(time.process_time() - start)
        bare = probe.run(bare_forward)
        for name, call in calls.items():
            region = probe.run(call)
            ratios = [a / b for a, b in zip(seconds[name], seconds["forward pass"], strict=True)]
            rows.append(
                {
                    "network": "resnet18",
                    "batch_size": size,
                    "what": name,
                    "peak_bytes": region.peak_bytes,
                    "peak_increase_bytes": region.peak_increase_bytes,
                    "forward_peak_bytes": bare.peak_bytes,
                    "forward_peak_increase_bytes": bare.peak_increase_bytes,
                    "cpu_time_ratio": statistics.median(ratios),
                    "rounds": rounds,
                    "batches": 2,
                    "threads": torch.get_num_threads(),
                    "processor": processor(),
                    "torch": torch.__version__,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Read the arguments, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["false-positives", "cost"])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "false-positives":
        rows = false_positives(args.pairs)
    else:
        rows = cost(args.sizes, args.rounds)
    if args.json:
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
