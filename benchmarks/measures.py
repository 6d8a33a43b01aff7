"""Measures of similarity beside each other: errors, chance, cost, parts of batches.

python benchmarks/measures.py errors --json results.json
python benchmarks/measures.py chance --pairs 500 --json results.json
python benchmarks/measures.py parts --data-sets 200 --json results.json
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import processor
from torch import Tensor, nn

from cka import CKA, CKNNA, MutualKNN, measure_from_features
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.reports.files import write_whole

Row = dict[str, Any]


# --- references in NumPy's float64, by loops ---


def products(features: Tensor) -> np.ndarray:
    """Return inner products (n, n) of samples of length 1."""
    rows = features.double().flatten(1).numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows @ rows.T


def near(similarity: np.ndarray, k: int) -> np.ndarray:
    """Return whether j is one of the k nearest neighbours of i, (n, n)."""
    own = similarity.copy()
    np.fill_diagonal(own, -np.inf)
    found = np.zeros(own.shape, bool)
    for row, order in zip(found, np.argsort(-own, 1), strict=True):
        row[order[:k]] = True
    return found


def song(one: np.ndarray, other: np.ndarray) -> float:
    """Return the unbiased HSIC of Song et al. 2012 of two matrices."""
    n = len(one)
    one, other = one - np.diag(np.diag(one)), other - np.diag(np.diag(other))
    total = (one * other.T).sum() + one.sum() * other.sum() / ((n - 1) * (n - 2))
    total -= 2 / (n - 2) * (one.sum(0) * other.sum(1)).sum()
    return float(total / (n * (n - 3)))


def reference(name: str, x: Tensor, y: Tensor, k: int) -> float:
    """Return the value of a measure."""
    both = [products(each) for each in (x, y)]
    neighbours = [near(each, k) for each in both]
    if name == "mutual_knn":
        return float((neighbours[0] & neighbours[1]).sum() / (k * len(x)))
    shared = neighbours[0] & neighbours[1]
    own = [song(m * p, m * p) for m, p in zip(neighbours, both, strict=True)]
    return song(shared * both[0], shared * both[1]) / (own[0] * own[1]) ** 0.5


def network(seed: int, width: int = 32, layers: int = 4) -> nn.Sequential:
    """A perceptron with random weights."""
    torch.manual_seed(seed)
    sizes = [20, *[width] * layers]
    parts: list[nn.Module] = []
    for one, other in pairwise(sizes):
        parts += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*parts)


# --- errors, and cost beside CKA ---


def errors() -> list[Row]:
    """Compare with the references; measure CPU time and peak of layers beside CKA."""
    rows: list[Row] = []
    measures = {"mutual_knn": MutualKNN, "cknna": CKNNA}
    for name, kind in measures.items():
        for samples in (50, 200, 1000):
            worst = 0.0
            for seed in range(10):
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(samples, 64, generator=generator) + 3
                y = torch.tanh(x @ torch.randn(64, 48, generator=generator))
                found = float(measure_from_features(x, y, measure=kind(10)))
                worst = max(worst, abs(found - reference(name, x, y, 10)))
            rows.append({"what": "error", "measure": name, "samples": samples, "error": worst})
    model = network(0, 256, 6).eval()
    for samples in (256, 1024):
        batches = list(torch.randn(samples, 20).split(128))
        probe = MemoryProbe("cpu")

        def forward(batches: list[Tensor] = batches) -> None:
            with torch.no_grad():
                for batch in batches:
                    model(batch)

        cases = {
            "forward pass": forward,
            "cka": lambda batches=batches: CKA(model, device="cpu").compare(
                batches, progress=False
            ),
            "cka, exact": lambda batches=batches: CKA(
                model, estimator="exact", device="cpu"
            ).compare(batches, progress=False),
            **{
                name: lambda batches=batches, name=name: CKA(
                    model, measure=name, device="cpu"
                ).compare(batches, progress=False)
                for name in measures
            },
        }
        for what, case in cases.items():
            case()
            start = time.process_time()
            case()
            seconds = time.process_time() - start
            with probe.measure() as region:
                case()
            rows.append(
                {"what": "cost", "measure": what, "samples": samples, "layers": len(model),
                 "cpu_seconds": seconds, "peak_increase_bytes": region.peak_increase_bytes}
            )  # fmt: skip
    return rows


# --- false positives ---


def chance(pairs: int) -> list[Row]:
    """How many pairs of unrelated networks, on data of their own, are taken for related at 5 %."""
    rows: list[Row] = []
    for name in ("cka", "mutual_knn", "cknna"):
        fixed = best = 0
        for pair in range(pairs):
            models = network(2 * pair, layers=2), network(2 * pair + 1, layers=2)
            generator = torch.Generator().manual_seed(pair)
            data = [torch.randn(2, 32, 20, generator=generator) for _ in range(2)]
            result = CKA(*models, measure=name, device="cpu").compare(
                *data, progress=False, null=99, generator=torch.Generator().manual_seed(pair)
            )
            assert result.calibration is not None
            fixed += bool(result.calibration.p[0, 3] <= 0.05)
            best += bool((result.calibration.p_best <= 0.05).any())
        rows.append({"measure": name, "pairs": pairs, "p": fixed / pairs, "p_best": best / pairs})
    return rows


# --- parts of batches ---


class Noise(nn.Module):
    """A little of the input, and noise."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return torch.randn_like(x) + 0.15 * x


def parts(data_sets: int) -> list[Row]:
    """How much CKA varies with the data if batches of 512 are split, and the peak."""
    torch.manual_seed(0)
    models = {
        "related": nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)),
        "almost unrelated": nn.Sequential(nn.Linear(20, 64), Noise(), nn.Linear(64, 10)),
    }
    rows: list[Row] = []
    for name, model in models.items():
        for size in (None, 256, 128, 64, 32, 16):
            values = []
            for data_set in range(data_sets):
                torch.manual_seed(data_set)
                data = torch.randn(2, 512, 20) * torch.logspace(0, -1, 20)
                cka = CKA(model, device="cpu", hsic_batch_size=size)
                values.append(cka.compare(data, progress=False).matrix.double())
            stacked = torch.stack(values)
            rows.append(
                {"layers": name, "part": size or 512, "data_sets": data_sets,
                 "mean": float(stacked.mean(0)[0, 2]), "deviation": float(stacked.std(0)[0, 2])}
            )  # fmt: skip
    return rows


def main() -> None:
    """Measure and print, or write to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("errors", "chance", "parts"))
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--data-sets", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        "errors": errors,
        "chance": lambda: chance(options.pairs),
        "parts": lambda: parts(options.data_sets),
    }[options.what]()
    for row in rows:
        row |= {"torch": torch.__version__, "processor": processor()}
    text = json.dumps(rows, indent=1)
    print(text)
    if options.json is not None:
        write_whole(options.json, text + "\n")


if __name__ == "__main__":
    main()
