"""The networks of the benchmarks, small enough for a CPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

IMAGE_SIZE = 32


def resnet18() -> nn.Module:
    """Return the variant for CIFAR that the original notebook uses."""
    model = models.resnet18(weights=None, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def resnet50() -> nn.Module:
    """Return torchvision's variant, whose stem reduces 32 x 32 pixels to 8 x 8."""
    return models.resnet50(weights=None, num_classes=10)


def vit() -> nn.Module:
    """Return ViT-S with patches of 4 x 4 for images of 32 x 32."""
    return models.VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=4,
        num_layers=12,
        num_heads=6,
        hidden_dim=384,
        mlp_dim=1536,
        num_classes=10,
    )


NETWORKS = {"resnet18": resnet18, "resnet50": resnet50, "vit": vit}


def images(batch_size: int, samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return random images with labels; memory and time do not depend on the pixels."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 3, IMAGE_SIZE, IMAGE_SIZE), torch.zeros(samples))
    return DataLoader(data, batch_size=batch_size)
