"""Two different networks compared with each other."""

import pytest
from torch import nn
from torchvision import models

from cka import CKA


def resnet34_cifar() -> nn.Module:
    """Return a ResNet-34 with the same changes for 32 x 32 images as the ResNet-18."""
    model = models.resnet34(weights=None, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.eval()


@pytest.mark.slow
@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
@pytest.mark.max_peak_mb(96)
def test_memory_of_two_models_is_low_and_does_not_grow(
    cka_memory, make_model, loader, many_batches
):
    """Comparing two networks peaks below 96 MB: a forward pass, and the Gram matrices of both."""
    model1, model2 = make_model(), resnet34_cifar().to(cka_memory.device)
    images = loader(32, many_batches)
    with (
        cka_memory.measure("ResNet-18 and ResNet-34") as region,
        CKA(model1, model2, device=cka_memory.device) as cka,
    ):
        cka.compare(region.batches(images), progress=False)
