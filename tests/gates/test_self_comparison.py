"""The seed's benchmark: ResNet-18 compared with itself, at each of its batch sizes."""

import pytest
import torch

from cka import CKA

CPU_LARGEST_BATCH = 128


@pytest.fixture(params=[64, 128, 256, 512])
def batch_size(request, cka_memory):
    """The seed's batch sizes, as far as the device computes them in reasonable time."""
    if cka_memory.device.type == "cpu" and request.param > CPU_LARGEST_BATCH:
        pytest.skip(f"{request.param} images a batch take minutes on a CPU; run on an accelerator")
    return request.param


@pytest.mark.zero_retention
def test_retains_nothing(cka_memory, make_model, loader, batch_size):
    """After `compare` and its result are gone, so is every byte it allocated."""
    model, images = make_model(), loader(batch_size, 2)
    with (
        cka_memory.measure(f"batch {batch_size}") as region,
        CKA(model, model, device=cka_memory.device) as cka,
    ):
        cka.compare(region.batches(images), progress=False)


@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_stays_flat(cka_memory, make_model, loader, many_batches):
    """Memory does not grow by a byte from batch to batch."""
    model, images = make_model(), loader(64, many_batches)
    with (
        cka_memory.measure(f"{many_batches} batches of 64") as region,
        CKA(model, model, device=cka_memory.device) as cka,
    ):
        cka.compare(region.batches(images), progress=False)


@pytest.mark.zero_retention
def test_peaks_like_the_bare_forward(cka_memory, make_model, loader):
    """Comparing 75 layers costs at most 5 % more memory than running the network once.

    On an accelerator, and the workspace that its library takes for any matrix product.
    """
    model, images = make_model(), loader(64, 1)

    def forward_only():
        for batch, _ in images:
            model(batch.to(cka_memory.device))

    with cka_memory.measure("bare forward") as forward, torch.no_grad():
        forward_only()
    square = torch.ones(8, 8, device=cka_memory.device)
    with cka_memory.measure("matrix product") as product:
        torch.mm(square, square)
    with (
        cka_memory.measure("self-comparison") as comparison,
        CKA(model, model, device=cka_memory.device) as cka,
    ):
        cka.compare(images, progress=False)
    allowed = 1.05 * forward.peak_increase_bytes + product.peak_increase_bytes
    assert comparison.peak_increase_bytes <= allowed


def test_keeps_its_result_and_nothing_else(cka_memory, make_model, loader):
    """The returned matrices are all that is alive on the device, if anything is."""
    model, images = make_model(), loader(64, 1)
    with cka_memory.measure("with its result") as region:
        result = CKA(model, device=cka_memory.device).compare(images, progress=False)
    held = [value for value in vars(result).values() if isinstance(value, torch.Tensor)]
    on_device = [value for value in held if value.device.type == cka_memory.device.type]
    assert region.retained_bytes == sum(value.untyped_storage().nbytes() for value in on_device)
