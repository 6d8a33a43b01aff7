"""Two accelerators: each is measured by itself."""

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


@pytest.fixture
def second_probe(second_device):
    """Return a probe for the second device."""
    return MemoryProbe(second_device)


@pytest.fixture
def restore_current_device():
    """Make the current device the current one again after the test."""
    index = torch.accelerator.current_device_index()
    yield
    torch.accelerator.set_device_index(index)


def test_each_device_is_measured_by_itself(probe, second_probe, allocate):
    """A probe of the second device does not see the current device, which is the first one."""
    with second_probe.measure() as second, probe.measure() as first:
        kept = allocate(100), allocate(10, second_probe.device)
    assert (first.retained_bytes, second.retained_bytes) == (100, 10)
    assert (first.net_bytes, second.net_bytes) == (512, 512)
    assert kept[1].device == second_probe.device


def test_each_device_has_its_own_peak_and_reserve(probe, second_probe, allocate):
    """A region on one device resets the peak of that device only."""
    with probe.measure() as first:
        allocate(14 * MB)
        with second_probe.measure() as second:
            allocate(MB, second_probe.device)
    assert (first.peak_increase_bytes, second.peak_increase_bytes) == (14 * MB, MB)
    assert (first.reserved_increase_bytes, second.reserved_increase_bytes) == (14 * MB, 2 * MB)


def test_another_current_device_changes_nothing(
    probe, second_device, allocate, restore_current_device
):
    """A region measures the device on which it began, also if another one becomes current."""
    with probe.measure() as region:
        torch.accelerator.set_device_index(second_device.index)
        kept = allocate(100), torch.empty(10, dtype=torch.uint8, device=second_device.type)
    assert kept[1].device == second_device
    assert region.retained_bytes == 100


def test_copy_to_the_other_device_is_counted_there(probe, second_probe, allocate):
    """A copy to another device is retained there, and its source on the first device."""
    with probe.measure() as first, second_probe.measure() as second:
        source = allocate(1000)
        copy = source[:100].to(second_probe.device)
    assert (first.retained_bytes, second.retained_bytes) == (source.nbytes, copy.nbytes)


def test_gradients_are_retained_on_the_device_of_their_parameters(probe, second_probe):
    """Gradients are retained on their parameters' device, whose thread runs the backward pass."""
    first_layer = torch.nn.Linear(10, 20).to(probe.device)
    second_layer = torch.nn.Linear(20, 30).to(second_probe.device)
    batch = torch.ones(4, 10, device=probe.device)
    with probe.measure() as first, second_probe.measure() as second:
        second_layer(first_layer(batch).to(second_probe.device)).sum().backward()
    assert first.retained_bytes == sum(p.nbytes for p in first_layer.parameters())
    assert second.retained_bytes == sum(p.nbytes for p in second_layer.parameters())
