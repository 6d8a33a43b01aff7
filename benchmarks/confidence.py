"""How often the bootstrap's 95 % interval has the true CKA, and the standard error's too.

python benchmarks/confidence.py --data-sets 200 --json results.json

The true value is that of 200 000 generated samples, from the covariances of the outputs. The
networks are small: the first has related layers, the second ends in layers that are almost
unrelated to the first one, because most of what they get is noise.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conditions import processor
from torch import Tensor, nn

from cka import CKA
from pytest_cka_memory.reports.files import write_whole

RESAMPLES = 200
FEATURES = 20
SPLITS = ((16, 8), (64, 4), (128, 2), (256, 1))
"""Batch size and number of batches."""


class Noise(nn.Module):
    """A little of the input, and noise."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return torch.randn_like(x) + 0.15 * x


def related() -> nn.Module:
    """Two layers with ReLU between them."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 10))


def unrelated() -> nn.Module:
    """The same with noise between them."""
    return nn.Sequential(nn.Linear(FEATURES, 64), Noise(), nn.Linear(64, 10))


def samples(count: int) -> Tensor:
    """Return random samples, whose features have different scales."""
    return torch.randn(count, FEATURES) * torch.logspace(0, -1, FEATURES)


def true_values(model: nn.Sequential) -> Tensor:
    """Return CKA of every pair of layers, (L, L)."""
    features, outputs = samples(200_000), []
    with torch.no_grad():
        for layer in model:
            features = layer(features)
            outputs.append(features.double() - features.double().mean(0))
    products = torch.tensor(
        [[float((x.T @ y / len(x)).square().sum()) for y in outputs] for x in outputs]
    )
    own = products.diagonal().sqrt()
    return products / own / own[:, None]


def coverage(make: Callable[[], nn.Module], data_sets: int) -> list[dict[str, Any]]:
    """Return the shares for every split of the samples into batches."""
    torch.manual_seed(0)
    model = make()
    assert isinstance(model, nn.Sequential)
    true = true_values(model)
    rows = []
    for size, count in SPLITS:
        values, errors, of_batches, hits, hits_of_batches = [], [], [], [], []
        for number in range(data_sets):
            result = CKA(model, device="cpu").compare(
                [samples(size) for _ in range(count)],
                progress=False,
                bootstrap=RESAMPLES,
                generator=torch.Generator().manual_seed(number),
            )
            found = result.confidence
            assert found is not None
            values.append(result.matrix)
            errors.append(found.standard_error)
            of_batches.append(result.standard_error)
            hits.append((found.low <= true) & (true <= found.high))
            hits_of_batches.append((result.matrix - true).abs() <= 1.96 * result.standard_error)
        for one, other in ((0, 2), (1, 2)):
            at = (slice(None), one, other)
            rows.append(
                {
                    "network": make.__name__,
                    "layers": f"{one} and {other}",
                    "batch_size": size,
                    "batches": count,
                    "data_sets": data_sets,
                    "resamples": RESAMPLES,
                    "true": float(true[one, other]),
                    "deviation": float(torch.stack(values)[at].std()),
                    "bootstrap_error": float(torch.stack(errors)[at].mean()),
                    "bootstrap_share": float(torch.stack(hits)[at].double().mean()),
                    "torch": torch.__version__,
                    "processor": processor(),
                }
            )
            if count > 1:
                rows[-1] |= {
                    "batches_error": float(torch.stack(of_batches)[at].mean()),
                    "batches_share": float(torch.stack(hits_of_batches)[at].double().mean()),
                }
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Read the arguments, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-sets", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for make in (related, unrelated) for row in coverage(make, args.data_sets)]
    if args.json:
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
