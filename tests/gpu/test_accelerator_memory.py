"""The accelerator meter compared with the device's own counters."""

import pytest
import torch

from cka import CKA
from pytest_cka_memory import MemoryProbe, measure_memory_retention
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


@pytest.fixture
def probe():
    """Return a probe for the accelerator."""
    return MemoryProbe("auto")


@pytest.fixture
def network(probe):
    """Return a network that is large enough for libraries to allocate workspaces."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(512, 512), torch.nn.ReLU(inplace=True), torch.nn.Linear(512, 512)
    return torch.nn.Sequential(*layers).to(probe.device).eval()


@pytest.mark.parametrize("size", [1, 512, 513, MB, MB + 1], ids=str)
def test_retained_bytes_of_a_tensor_are_exact(probe, size):
    """The requested size is counted, not the size of the allocator's block."""
    kept = []
    with probe.measure() as region:
        kept.append(torch.zeros(size, dtype=torch.uint8, device=probe.device))
    assert region.retained_bytes == size
    assert region.net_bytes >= size


def test_peak_and_start_are_those_of_the_allocator(probe):
    """The peak is that of torch.accelerator for the same code."""
    held = torch.zeros(4 * MB, dtype=torch.uint8, device=probe.device)
    with probe.measure() as region:
        torch.zeros(8 * MB, dtype=torch.uint8, device=probe.device)
        peak = torch.accelerator.max_memory_allocated(probe.device)
    assert region.peak_bytes == peak
    assert region.peak_increase_bytes >= 8 * MB
    assert region.start_bytes >= held.nbytes
    assert region.reserved_peak_bytes >= region.peak_bytes


def test_leak_of_four_bytes_per_batch_is_reported_exactly(probe):
    """The allocator uses a block of 512 bytes for each."""
    kept = []
    with probe.measure() as region:
        for _ in region.batches([torch.zeros(8)] * 16):
            kept.append(torch.zeros(1, device=probe.device))
    assert region.growth_bytes_per_batch == 4.0


def test_tensors_of_a_failed_backward_pass_are_not_retained(probe, fail_late):
    """Torch's backward thread references the error and its frames longer than the caller does."""
    with probe.measure() as region:
        fail_late(probe.device)
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes > 4000


def test_freeing_an_old_tensor_does_not_hide_a_leak(probe):
    """The net change is zero; the retained bytes are not."""
    old = [torch.zeros(MB, dtype=torch.uint8, device=probe.device)]
    with probe.measure() as region:
        new = torch.zeros(MB, dtype=torch.uint8, device=probe.device)
        old.clear()
    assert region.net_bytes == 0
    assert region.retained_bytes == new.nbytes


def test_outer_region_keeps_its_peak_when_an_inner_region_opens(probe):
    """The inner region resets the only peak counter of the device."""
    with probe.measure() as outer:
        torch.zeros(16 * MB, dtype=torch.uint8, device=probe.device)
        with probe.measure() as inner:
            torch.zeros(MB, dtype=torch.uint8, device=probe.device)
    assert inner.peak_increase_bytes < 2 * MB
    assert outer.peak_increase_bytes >= 16 * MB


def test_library_workspaces_are_not_retained(probe, network):
    """The first region in which a library allocates one reports it as one-time bytes."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region, torch.no_grad():
        network(batch)
    assert region.retained_bytes == 0
    if probe.device.type == "cuda":
        assert region.one_time_bytes is not None


def test_gradients_allocated_by_the_backward_thread_are_retained(probe, network):
    """They have exactly the parameters' bytes, and each is named by an expression."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region:
        network(batch).sum().backward()
    assert region.retained_bytes == sum(p.nbytes for p in network.parameters())
    assert {holding.held_by.split(" in ")[0] for holding in region.retained} <= {
        f"network[{index}].{name}.grad" for index in (0, 2) for name in ("weight", "bias")
    }


def test_first_cka_run_retains_nothing(probe, network):
    """The workspaces that libraries allocate in the first run are not counted."""
    loader = torch.utils.data.DataLoader(torch.randn(256, 512), batch_size=64)

    def compare():
        with CKA(network, network, device=probe.device) as cka:
            cka.compare(loader, progress=False)

    _, peak_mb, retained_mb = measure_memory_retention(compare)
    assert retained_mb == 0.0
    assert peak_mb > 0.0
