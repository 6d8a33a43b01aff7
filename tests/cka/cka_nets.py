"""Small networks, each with one property that is difficult for a comparison, and their inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def batches_of(*sizes: int, features: tuple[int, ...] = (6,), seed: int = 0) -> list[Tensor]:
    """Return random batches of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *features, generator=generator) for size in sizes]


def mlp(seed: int = 0, width: int = 6) -> nn.Sequential:
    """Three layers; the activation is not in place."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 5))


class InPlace(nn.Module):
    """A convolution, batch norm and in-place activation, as in torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Residual(nn.Module):
    """One activation module that is called twice, with an in-place addition between the calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.relu = nn.ReLU(inplace=True)  # registered first, runs after fc1
        self.fc1 = nn.Linear(6, 6)
        self.fc2 = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.fc1(x))
        out = self.fc2(out)
        out += x
        return self.relu(out)


class Backwards(nn.Module):
    """Modules that run in the reverse order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)
        self.middle = nn.Linear(5, 4)
        self.first = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Constant(nn.Module):
    """A layer whose output is the same for every sample."""

    def __init__(self, value: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.constant = nn.Linear(5, 3)
        nn.init.zeros_(self.constant.weight)
        nn.init.constant_(self.constant.bias, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.constant(self.fc(x))


class Aliases(nn.Module):
    """Blocks and identities that return the same tensor as the layer before or inside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.same = nn.Identity()
        self.block = nn.Sequential(nn.Sequential(nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.same(self.fc(x)))


def cifar_resnet18() -> nn.Module:
    """ResNet-18 for 32 × 32 images, with its initial random weights."""
    models = __import__("torchvision").models
    torch.manual_seed(0)
    model = models.resnet18(weights=None)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model.eval()
