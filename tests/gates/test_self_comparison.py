"""ResNet-18 compared with itself at several batch sizes."""

import pytest
import torch

from cka import CKA

CPU_LARGEST_BATCH = 128


@pytest.fixture(params=[64, 128, 256, 512])
def batch_size(request, cka_memory):
    """Return each batch size; skip those that take minutes on a CPU."""
    if cka_memory.device.type == "cpu" and request.param > CPU_LARGEST_BATCH:
        pytest.skip(f"batches of {request.param} images take minutes on a CPU; use an accelerator")
    return request.param


@pytest.mark.slow
@pytest.mark.zero_retention
def test_compare_retains_no_memory(cka_memory, make_model, loader, batch_size):
    """Once the result is freed, every byte that `compare` allocated is freed."""
    model, images = make_model(), loader(batch_size, 2)
    with (
        cka_memory.measure(f"batch {batch_size}") as region,
        CKA(model, model, device=cka_memory.device) as cka,
    ):
        cka.compare(region.batches(images), progress=False)


@pytest.mark.slow
@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_memory_does_not_grow_from_batch_to_batch(cka_memory, make_model, loader, many_batches):
    """Not one byte more is live after a later batch than after an earlier one."""
    model, images = make_model(), loader(64, many_batches)
    with (
        cka_memory.measure(f"{many_batches} batches of 64") as region,
        CKA(model, model, device=cka_memory.device) as cka,
    ):
        cka.compare(region.batches(images), progress=False)


@pytest.mark.slow
@pytest.mark.zero_retention
def test_peak_of_self_comparison_is_that_of_the_forward_pass(cka_memory, make_model, loader):
    """Comparing 75 layers needs at most 5 % more memory than a forward pass.

    On an accelerator, the workspace that its library allocates for a matrix product is added.
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


@pytest.mark.slow
def test_only_the_result_is_retained(cka_memory, make_model, loader):
    """Retained bytes are those of the result's tensors on the device; none on an accelerator."""
    model, images = make_model(), loader(64, 1)
    with cka_memory.measure("with its result") as region:
        result = CKA(model, device=cka_memory.device).compare(images, progress=False)
    # Its sums are views of one storage.
    kept = [*vars(result).values(), result.sums.cross]
    tensors = [value for value in kept if isinstance(value, torch.Tensor)]
    on_device = [value for value in tensors if value.device.type == cka_memory.device.type]
    assert region.retained_bytes == sum(value.untyped_storage().nbytes() for value in on_device)


@pytest.mark.slow
def test_resamples_take_little_memory_beside_the_comparison(cka_memory, make_model, loader):
    """With 200 resamples the peak is at most 5 % of a forward pass above that without them."""
    model, images = make_model(), loader(64, 2)
    with cka_memory.measure("bare forward") as forward, torch.no_grad():
        for batch, _ in images:
            model(batch.to(cka_memory.device))
            del batch
    cka = CKA(model, device=cka_memory.device)
    with cka_memory.measure("compare") as plain:
        cka.compare(images, progress=False)
    for resamples in ({"null": 200}, {"bootstrap": 200}):
        with cka_memory.measure(f"compare with {resamples}") as resampled:
            cka.compare(images, progress=False, **resamples)
        beside = resampled.peak_increase_bytes - plain.peak_increase_bytes
        assert beside <= 0.05 * forward.peak_increase_bytes, resamples
