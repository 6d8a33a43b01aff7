"""The accelerator meter against the device's own counters; skipped, visibly, without a device."""

import pytest
import torch

from cka import CKA
from pytest_cka_memory import MemoryProbe, measure_memory_retention
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


@pytest.fixture
def probe():
    """Measure the accelerator."""
    return MemoryProbe("auto")


@pytest.fixture
def network(probe):
    """Large enough to make libraries allocate their workspaces."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(512, 512), torch.nn.ReLU(inplace=True), torch.nn.Linear(512, 512)
    return torch.nn.Sequential(*layers).to(probe.device).eval()


@pytest.mark.parametrize("size", [1, 512, 513, MB, MB + 1], ids=str)
def test_a_kept_tensor_is_retained_to_the_byte(probe, size):
    """As asked for, not as the allocator rounds it."""
    kept = []
    with probe.measure() as region:
        kept.append(torch.zeros(size, dtype=torch.uint8, device=probe.device))
    assert region.retained_bytes == size
    assert region.net_bytes >= size


def test_peak_and_start_are_the_allocators(probe):
    """The figures of torch.accelerator, read around the same code."""
    held = torch.zeros(4 * MB, dtype=torch.uint8, device=probe.device)
    with probe.measure() as region:
        torch.zeros(8 * MB, dtype=torch.uint8, device=probe.device)
        peak = torch.accelerator.max_memory_allocated(probe.device)
    assert region.peak_bytes == peak
    assert region.peak_increase_bytes >= 8 * MB
    assert region.start_bytes >= held.nbytes
    assert region.reserved_peak_bytes >= region.peak_bytes


def test_a_leak_of_four_bytes_a_batch_reads_four(probe):
    """Though each takes a block of 512 bytes."""
    kept = []
    with probe.measure() as region:
        for _ in region.batches([torch.zeros(8)] * 16):
            kept.append(torch.zeros(1, device=probe.device))
    assert region.growth_bytes_per_batch == 4.0


def test_what_a_failed_backward_pass_held_is_not_retained(probe, fail_late):
    """Though torch's thread holds the error, and its frames, a moment longer than the caller."""
    with probe.measure() as region:
        fail_late(probe.device)
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes > 4000


def test_an_old_tensor_freed_inside_hides_no_leak(probe):
    """Net is zero, retained is not."""
    old = [torch.zeros(MB, dtype=torch.uint8, device=probe.device)]
    with probe.measure() as region:
        new = torch.zeros(MB, dtype=torch.uint8, device=probe.device)
        old.clear()
    assert region.net_bytes == 0
    assert region.retained_bytes == new.nbytes


def test_the_outer_region_keeps_its_peak(probe):
    """The inner one resets the device's only peak counter."""
    with probe.measure() as outer:
        torch.zeros(16 * MB, dtype=torch.uint8, device=probe.device)
        with probe.measure() as inner:
            torch.zeros(MB, dtype=torch.uint8, device=probe.device)
    assert inner.peak_increase_bytes < 2 * MB
    assert outer.peak_increase_bytes >= 16 * MB


def test_library_workspaces_are_no_leak(probe, network):
    """Not even of the first region that makes a library allocate one; they are told apart."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region, torch.no_grad():
        network(batch)
    assert region.retained_bytes == 0
    if probe.device.type == "cuda":
        assert region.one_time_bytes is not None


def test_a_backward_pass_on_the_devices_own_thread_is_seen(probe, network):
    """Gradients are born there: exactly the parameters' bytes, each named by its path."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region:
        network(batch).sum().backward()
    assert region.retained_bytes == sum(p.nbytes for p in network.parameters())
    assert {holding.held_by.split(" in ")[0] for holding in region.retained} <= {
        f"network[{index}].{name}.grad" for index in (0, 2) for name in ("weight", "bias")
    }


def test_cka_retains_nothing_from_the_first_run(probe, network):
    """The seed's first run showed 9.12 MB, which was library workspace."""
    loader = torch.utils.data.DataLoader(torch.randn(256, 512), batch_size=64)

    def compare():
        with CKA(network, network, device=probe.device) as cka:
            cka.compare(loader, progress=False)

    _, peak_mb, retained_mb = measure_memory_retention(compare)
    assert retained_mb == 0.0
    assert peak_mb > 0.0
