"""Draw the pictures of docs/explanation/cka.md: five comparisons of small networks.

python benchmarks/cka_pictures.py docs/images

All data is generated: gratings of four orientations in noise, and sentences of a made-up grammar.
The networks are small and are trained here, in about a minute on one core. What the pictures show
are properties of CKA that also appear with real networks; they are no measurements of these.
"""

import argparse
import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import torch
from PIL import Image
from torch import Tensor, nn

from cka import CKA, CKAResult

SIZE, CLASSES = 12, 4
WORDS, LENGTH = 24, 16
STEPS = 150


def gratings(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 12, 12) of stripes in noise, and the number of their orientation."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles = labels * math.pi / CLASSES
    phases = torch.rand(count, generator=generator) * 2 * math.pi
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None]
    stripes = torch.sin(along * 1.3 + phases[:, None, None])
    noise = torch.randn(count, SIZE, SIZE, generator=generator)
    return (stripes + noise)[:, None], labels


def sentences(count: int, generator: torch.Generator) -> Tensor:
    """Return sentences (n, 16) in which each word depends on the two words before it."""
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    for at in range(2, LENGTH):
        follows = torch.rand(count, generator=generator) < 0.9
        next_words = (words[:, at - 1] * 5 + words[:, at - 2] * 3 + 1) % WORDS
        words[:, at] = torch.where(follows, next_words, words[:, at])
    return words


def convolutional(width: int = 8) -> nn.Module:
    """Four convolutions, and a linear layer."""
    layers: dict[str, nn.Module] = {}
    channels = 1
    for number, stride in enumerate((1, 2, 1, 1), start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, stride, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        channels = width
    layers |= {"flatten": nn.Flatten(), "fc": nn.Linear(width * SIZE**2 // 4, CLASSES)}
    return nn.Sequential(OrderedDict(layers))


def perceptron(width: int, depth: int) -> nn.Module:
    """Blocks of a linear layer and ReLU, each added to its input."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "in": nn.Linear(SIZE**2, width)}
    layers |= {f"block{number}": Block(width) for number in range(1, depth + 1)}
    layers["out"] = nn.Linear(width, CLASSES)
    return nn.Sequential(OrderedDict(layers))


class Block(nn.Module):
    """A linear layer and ReLU, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return x + torch.relu(self.linear(x))


class LanguageModel(nn.Module):
    """A small transformer that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 48)
        self.position = nn.Parameter(torch.randn(LENGTH, 48) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True, norm_first=True)
            for _ in range(6)
        )
        self.head = nn.Linear(48, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of every next word, (n, 16, 24)."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.embedding(words) + self.position
        for block in self.blocks:
            x = block(x, src_mask=mask)
        scores: Tensor = self.head(x)
        return scores


def trained(model: nn.Module, seed: int) -> nn.Module:
    """Train a classifier of gratings, or a language model, and return it."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    language = isinstance(model, LanguageModel)
    for _ in range(STEPS * 4 if language else STEPS):
        if language:
            words = sentences(64, generator)
            scores, labels = model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten()
        else:
            images, labels = gratings(64, generator)
            scores = model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    right = (scores.argmax(1) == labels).float().mean()
    print(f"{type(model).__name__}, seed {seed}: {right:.0%} of the last batch right", flush=True)
    return model.eval()


def batches(seed: int, count: int = 4, size: int = 128) -> list[Tensor]:
    """Return images that no network was trained on."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [gratings(size, generator)[0] for _ in range(count)]


def made(seed: int, make: object, *arguments: int) -> nn.Module:
    """Return a network with the random weights of a seed."""
    torch.manual_seed(seed)
    assert callable(make)
    model: nn.Module = make(*arguments)
    return model


def compared(
    one: nn.Module, other: nn.Module | None, names: tuple[str, str], data: list[Tensor]
) -> CKAResult:
    """Compare two networks, or one with itself."""
    layers = (
        ["embedding", "blocks.?", "head"]
        if isinstance(one, LanguageModel)
        else [name for name, _ in one.named_children() if name != "flatten"]
    )
    return CKA(
        *(one, other, layers, layers), model1_name=names[0], model2_name=names[1], device="cpu"
    ).compare(data, progress=False)


def pictures() -> Iterator[tuple[str, list[CKAResult]]]:
    """Yield the name of each picture, and the results in it."""
    start = made(0, convolutional)
    yield "untrained", [compared(start, None, ("untrained", "untrained"), batches(0))]

    one, two = (trained(made(seed, convolutional), seed) for seed in (1, 2))
    yield "two-seeds", [compared(one, two, ("seed 1", "seed 2"), batches(0))]

    networks = {
        "narrow and shallow": trained(made(3, perceptron, 16, 4), 3),
        "wide and deep": trained(made(3, perceptron, 256, 16), 3),
    }
    yield (
        "wide-and-deep",
        [compared(model, None, (name, name), batches(0)) for name, model in networks.items()],
    )

    language = trained(made(4, LanguageModel), 4)
    texts = [sentences(128, torch.Generator().manual_seed(1000 + at)) for at in range(4)]
    yield "language-model", [compared(language, None, ("language model",) * 2, texts)]

    layers = [nn.Conv2d, nn.Linear]
    cka = CKA(
        *(one, two, layers, layers), model1_name="seed 1", model2_name="seed 2", device="cpu",
        estimator="biased",
    )  # fmt: skip
    few = batches(0, count=1, size=24)
    others = batches(1, count=1, size=24)
    yield (
        "calibrated",
        [
            cka.compare(few, progress=False, null=200),
            cka.compare(few, others, progress=False, null=200),
        ],
    )


TITLES = {
    "untrained": ["random weights"],
    "two-seeds": ["trained with two seeds"],
    "wide-and-deep": ["4 blocks, 16 features", "16 blocks, 256 features"],
    "language-model": ["a transformer's blocks"],
    "calibrated": ["the same images", "other images for seed 2"],
}


def draw(name: str, results: list[CKAResult], folder: Path) -> None:
    """Write one picture with the heat maps side by side."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(4.6 * len(results), 4.2), layout="constrained", squeeze=False
    )
    for at, (result, ax) in enumerate(zip(results, axes[0], strict=True)):
        result.plot(ax=ax)
        ax.set_title(TITLES[name][at])
    path = folder / f"cka-{name}.png"
    figure.savefig(path, dpi=100)
    plt.close(figure)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB", flush=True)


def main() -> None:
    """Train, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    mpl.use("agg")
    torch.set_num_threads(1)
    for name, results in pictures():
        draw(name, results, args.folder)
        for result in results:
            print(result, flush=True)


if __name__ == "__main__":
    main()
