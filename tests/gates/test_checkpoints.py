"""Several ResNet-18 compared with each other in one pass."""

import pytest
import torch

from cka import compare_many
from pytest_cka_memory.units import MB

BATCH_SIZE = 32
MODELS = 3
DISTINCT_OUTPUTS = 59  # of 75 calls; the others return a tensor that was already measured


@pytest.mark.slow
@pytest.mark.zero_retention
def test_peak_of_many_models_is_a_forward_pass_and_gram_matrices(cka_memory, make_model, loader):
    """The peak is that of a forward pass and the Gram matrices of all compared models, or of two.

    The working space is at most 1 MB on a CPU, an eighth of one feature map. On an accelerator it
    is at most 5 %, and a matrix product has the workspace of its library.
    """
    models = {f"epoch {number}": make_model() for number in range(MODELS)}
    images = loader(BATCH_SIZE, 1)

    def forward_only():
        for batch, _ in images:
            models["epoch 0"](batch.to(cka_memory.device))

    with cka_memory.measure("bare forward") as forward, torch.no_grad():
        forward_only()
    square = torch.ones(8, 8, device=cka_memory.device)
    with cka_memory.measure("matrix product") as product:
        torch.mm(square, square)
    on_cpu = cka_memory.device.type == "cpu"
    working_space = MB if on_cpu else 0.05 * forward.peak_increase_bytes
    without_grams = forward.peak_increase_bytes + product.peak_increase_bytes + working_space
    for pairs, models_with_grams in (("all", MODELS), ("first", 2)):
        with cka_memory.measure(f"{MODELS} models, pairs={pairs!r}") as comparison:
            compare_many(models, images, pairs=pairs, device=cka_memory.device, progress=False)
        grams = models_with_grams * DISTINCT_OUTPUTS * 4 * BATCH_SIZE**2
        assert comparison.peak_increase_bytes <= without_grams + grams


@pytest.mark.slow
@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_memory_of_many_models_does_not_grow(cka_memory, make_model, loader, many_batches):
    """The Gram matrices of a batch are freed before the next one."""
    models = {f"epoch {number}": make_model() for number in range(MODELS)}
    with cka_memory.measure(f"{MODELS} models") as region:
        images = region.batches(loader(4, many_batches))
        compare_many(models, images, device=cka_memory.device, progress=False)
