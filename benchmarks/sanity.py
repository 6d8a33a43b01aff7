"""The sanity check of Kornblith et al. 2019: what decides which layer is most similar to which?

python benchmarks/sanity.py --seeds 5 --json results.json

Networks of the paper's form ("Tiny-10") differ in their seed only. Of each layer but the logits, is
the most similar layer of the other network the same one? The data, the width and the length of
training vary, one beside the other. The peer is the paper's formula in NumPy's float64. A file that
exists is continued. The images are 16 x 16 pixels:

- stripes: ten orientations in noise, which one convolution tells apart
- digits: the 8 x 8 digits of scikit-learn, enlarged
- digits in clutter: the same at a random place, in random colours, over stripes and noise
- photographs: pieces of ten regions of scikit-learn's two photographs, in random light
"""

import argparse
import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import processor
from torch import Tensor, nn

from cka import CKA
from pytest_cka_memory.reports.files import write_whole

Images = tuple[Tensor, Tensor]
"""Images (n, 3, 16, 16), and their classes (n,)."""
SIZE = 16


def noise(count: int, generator: torch.Generator) -> Tensor:
    """Return random images."""
    return torch.randn(count, 3, SIZE, SIZE, generator=generator)


def stripes(angle: Tensor, generator: torch.Generator) -> Tensor:
    """Return stripes of these orientations (n,) with random phases and colours."""
    count = len(angle)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    phase = 6.3 * torch.rand(count, generator=generator)[:, None, None]
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    return torch.sin(1.2 * along + phase)[:, None] * colours(count, generator)


def colours(count: int, generator: torch.Generator) -> Tensor:
    """Return random colours (n, 3, 1, 1)."""
    return torch.randn(count, 3, 1, 1, generator=generator)


def of_stripes(count: int, generator: torch.Generator, held_out: bool) -> Images:
    """Stripes in noise."""
    labels = torch.arange(count) % 10
    image = stripes(labels * torch.pi / 10, generator) + 0.7 * noise(count, generator)
    return image, labels


def some_digits(count: int, generator: torch.Generator, held_out: bool) -> Images:
    """Return digits (n, 8, 8) from 0 to 1; every third one is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    mine = (torch.arange(len(data.target)) % 3 == 0) == held_out
    pixels = torch.tensor(data.images, dtype=torch.float32)[mine] / 16
    chosen = torch.randint(len(pixels), (count,), generator=generator)
    if held_out:
        chosen = torch.arange(count) % len(pixels)
    return pixels[chosen], torch.tensor(data.target)[mine][chosen]


def of_digits(count: int, generator: torch.Generator, held_out: bool) -> Images:
    """Digits, enlarged."""
    pixels, labels = some_digits(count, generator, held_out)
    image = pixels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return (2 * image[:, None] - 1).repeat(1, 3, 1, 1), labels


def of_clutter(count: int, generator: torch.Generator, held_out: bool) -> Images:
    """Digits at a random place over stripes of a random orientation."""
    pixels, labels = some_digits(count, generator, held_out)
    angle = torch.pi * torch.rand(count, generator=generator)
    image = 0.5 * stripes(angle, generator) + 0.3 * noise(count, generator)
    ink = 3 * torch.nn.functional.normalize(colours(count, generator), dim=1)
    places = torch.randint(SIZE - 7, (count, 2), generator=generator)
    for at, (y, x) in enumerate(places.tolist()):
        image[at, :, y : y + 8, x : x + 8] += pixels[at] * ink[at]
    return image, labels


def of_photographs(count: int, generator: torch.Generator, held_out: bool) -> Images:
    """Pieces of regions; pieces of the lower quarter of each region are held out."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    labels = torch.arange(count) % 10
    chance = torch.rand(count, 4, generator=generator)
    pieces = []
    for label, (down, right, mirror, light) in zip(labels.tolist(), chance.tolist(), strict=True):
        photograph = photographs[label // 5]
        height, width = photograph.shape[0], photograph.shape[1] // 5
        border = height * 3 // 4
        low, high = (border, height) if held_out else (0, border)
        y = low + int(down * (high - low - 2 * SIZE))
        x = label % 5 * width + int(right * (width - 2 * SIZE))
        piece = torch.tensor(photograph[y : y + 2 * SIZE : 2, x : x + 2 * SIZE : 2])
        piece = piece.permute(2, 0, 1) / 64 - 2
        pieces.append((piece.flip(2) if mirror > 0.5 else piece) * (0.5 + light))
    return torch.stack(pieces), labels


DATA = {
    "stripes": of_stripes,
    "digits": of_digits,
    "digits in clutter": of_clutter,
    "photographs": of_photographs,
}


def tiny_ten(width: int, seed: int) -> nn.Sequential:
    """Return the paper's "Tiny-10": 16, 32 and 64 channels if the width is 16."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    inner = 3
    form = ((1, 3, 1), (1, 3, 1), (2, 3, 2), (2, 3, 1), (2, 3, 1), (4, 3, 2), (4, 3, 1), (4, 1, 1))
    for at, (factor, kernel, stride) in enumerate(form):
        outer = factor * width
        padding = 0 if at == 6 or kernel == 1 else 1
        convolution = nn.Conv2d(inner, outer, kernel, stride, padding, bias=False)
        parts.append(nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU()))
        inner = outer
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*parts, pooled, nn.Linear(inner, 10))


def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of images whose class the model finds."""
    model.eval()
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def train(model: nn.Module, data: Images, epochs: int, seed: int) -> None:
    """Train a network: SGD with momentum, and a cosine schedule of the learning rate."""
    x, labels = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4)
    steps = epochs * math.ceil(len(x) / 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[some]), labels[some]).backward()
            optimizer.step()
            schedule.step()
    if not epochs:  # the statistics of batch norm, which evaluation needs
        with torch.no_grad():
            for _ in range(5):
                model(x)
    model.eval()


def centred_grams(model: nn.Sequential, x: Tensor) -> list[np.ndarray]:
    """Return the centred Gram matrix of each layer but the logits, of length 1, in float64."""
    grams = []
    with torch.no_grad():
        for layer in list(model)[:-1]:
            x = layer(x)
            rows = x.double().flatten(1).numpy()
            rows = rows - rows.mean(0)
            gram = rows @ rows.T
            grams.append(gram / np.linalg.norm(gram))
    return grams


def peer(one: list[np.ndarray], other: list[np.ndarray]) -> Tensor:
    """Return linear CKA of Kornblith et al. (biased) of every pair of layers."""
    return torch.tensor([[float((x * y).sum()) for y in other] for x in one])


def shares(matrix: Tensor) -> dict[str, float]:
    """Return how often the best column of a row is the same layer, or at most one beside it.

    Also how much less similar the same layer is than the best one, on average.
    """
    same = torch.arange(len(matrix))
    away = (matrix.argmax(1) - same).abs()
    return {
        "same": float((away == 0).double().mean()),
        "beside": float((away <= 1).double().mean()),
        "short": float((matrix.max(1).values - matrix.diagonal()).mean()),
    }


def mean_shares(matrices: list[Tensor]) -> dict[str, float]:
    """Return the means over pairs of networks."""
    each = [shares(matrix) for matrix in matrices]
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def case(
    name: str, width: int, epochs: int, seeds: int, count: int, held_out: int
) -> dict[str, Any]:
    """Train networks with several seeds, and look for each layer in the others."""
    data = DATA[name](count, torch.Generator().manual_seed(0), False)
    test = DATA[name](held_out, torch.Generator().manual_seed(1), True)
    models = [tiny_ten(width, seed) for seed in range(seeds)]
    for seed, model in enumerate(models):
        train(model, data, epochs, seed)
    grams = [centred_grams(model, test[0]) for model in models]
    layers = [str(at) for at in range(9)]
    batches = list(test[0].split(64))
    found: dict[tuple[int, int], Tensor] = {}
    for one in range(seeds):
        for other in range(one):
            exact = CKA(models[one], models[other], layers, device="cpu", estimator="exact")
            matrix = exact.compare(batches, progress=False).matrix.double()
            found[one, other], found[other, one] = matrix, matrix.T
    pairs = list(permutations(range(seeds), 2))
    by_peer = [peer(grams[one], grams[other]) for one, other in pairs]
    return {
        "data": name, "width": width, "epochs": epochs, "seeds": seeds, "images": count,
        "held_out": held_out,
        "accuracy": sum(accuracy(model, data) for model in models) / seeds,
        "accuracy_held_out": sum(accuracy(model, test) for model in models) / seeds,
        "exact": mean_shares([found[pair] for pair in pairs]),
        "peer": mean_shares(by_peer),
        "of_each_layer": torch.stack(
            [matrix.argmax(1) == torch.arange(9) for matrix in by_peer]
        ).double().mean(0).tolist(),
    }  # fmt: skip


CASES = [
    *((name, 16, epochs) for name in DATA for epochs in (0, 1, 4, 16)),
    *((name, 4, 16) for name in ("digits in clutter", "stripes", "digits")),
    ("digits in clutter", 16, 32),
]
"""Data, width and epochs."""


def main() -> None:
    """Measure and print, or write to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))
    done = {(row["data"], row["width"], row["epochs"]) for row in rows}
    for name, width, epochs in CASES:
        if (name, width, epochs) in done:
            continue
        row = case(name, width, epochs, options.seeds, options.images, options.held_out)
        rows.append(row | {"torch": torch.__version__, "processor": processor()})
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            write_whole(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
