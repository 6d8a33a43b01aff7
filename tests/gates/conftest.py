"""Model and data of the gates: CIFAR images and a ResNet-18 for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, models, transforms

DATA_ROOT = Path(__file__).parents[2] / "data"

TRANSFORM = transforms.Compose(
    [
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ]
)


class GeneratedImages(Dataset):
    """Images of CIFAR-10's shape.

    They are not those of ``torchvision.datasets.FakeData``, which seeds the generators of all kinds
    of devices for each image: that takes longer than to compare models on them.
    """

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return random numbers that are the same each time, and a class."""
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10

    def __len__(self) -> int:
        """Return as many as CIFAR-10 has for training."""
        return 50_000


def load_images() -> tuple[Dataset, str]:
    """Return CIFAR-10 if it is on disk, otherwise generated images, and a description."""
    try:
        real = datasets.CIFAR10(root=DATA_ROOT, train=True, download=False, transform=TRANSFORM)
    except RuntimeError:  # not on disk; memory does not depend on the values of pixels
        shape = "CIFAR-10's shape"
        return GeneratedImages(), f"generated images of {shape} (the data set is not on disk)"
    return real, "CIFAR-10"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ignore warnings about NaN on a device that computes no values: all its outputs are zero."""
    if "values=off" in (config.getoption("cka_memory_device", None) or ""):
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.filterwarnings("ignore:CKA is NaN:UserWarning"))


def pytest_report_header() -> str:
    """Name the data set in the header of the session."""
    return f"gates: {load_images()[1]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the data set in the summary of the session, next to the figures."""
    terminalreporter.write_line(f"gates: {load_images()[1]}")


@pytest.fixture
def loader() -> Callable[[int, int], DataLoader]:
    """Return a function that builds a loader from a batch size and a number of batches."""

    def build(batch_size: int, batches: int) -> DataLoader:
        images = Subset(load_images()[0], range(batch_size * batches))
        return DataLoader(images, batch_size=batch_size, shuffle=False, num_workers=0)

    return build


def resnet18_cifar(num_classes: int = 10) -> nn.Module:
    """Return a ResNet-18 for 32 x 32 images with random weights."""
    torch.manual_seed(0)
    model = models.resnet18(weights=None)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.fc.in_features, num_classes)
    return model.eval()


@pytest.fixture
def make_model(cka_memory) -> Callable[[], nn.Module]:
    """Return a function that builds a new ResNet-18 on the measured device."""
    return lambda: resnet18_cifar().to(cka_memory.device)


@pytest.fixture
def many_batches(cka_memory) -> int:
    """Return the number of batches for growth figures: fewer on a CPU, to save time."""
    return 5 if cka_memory.device.type == "cpu" else 16
