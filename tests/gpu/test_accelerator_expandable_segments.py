"""Expandable segments: the allocator maps memory page by page into one range of addresses."""

import pytest
import torch

from pytest_cka_memory.units import MB

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("expandable_segments")]

PAGE = 20 * MB
"""What the allocator maps at a time for blocks of more than 1 MB; 2 MB for smaller ones."""


@pytest.mark.parametrize("size", [1, 513, MB + 1, 30 * MB], ids=str)
def test_retained_counts_requested_bytes_and_the_peak_counts_blocks(probe, allocate, size):
    """Expandable segments give the same figures as segments of a fixed size."""
    with probe.measure() as region:
        kept = allocate(size)
    assert region.retained_bytes == kept.nbytes == size
    assert region.net_bytes == region.peak_increase_bytes == -(-size // 512) * 512


def test_reserve_grows_with_the_largest_tensor(probe, allocate):
    """An expandable segment extends a freed block, so its reserve is that of the largest tensor."""
    with probe.measure() as region:
        for size in (10 * MB, 12 * MB, 14 * MB):
            allocate(size)
    assert region.peak_increase_bytes == 14 * MB
    assert region.reserved_increase_bytes == PAGE
    assert region.reserved_after_cleaning_bytes == region.reserved_start_bytes


def test_pages_between_kept_tensors_are_released_when_the_region_ends(probe, allocate):
    """At a region's end an expandable segment gives back pages that lie between live tensors."""
    with probe.measure() as region:
        first, second, third = (allocate(PAGE) for _ in range(3))
        del second
    assert region.retained_bytes == first.nbytes + third.nbytes
    assert region.reserved_increase_bytes == 3 * PAGE
    assert region.reserved_after_cleaning_bytes - region.reserved_start_bytes == 2 * PAGE


def test_outer_region_keeps_its_peak_when_an_inner_region_opens(probe, allocate):
    """Cleaning before an inner region unmaps pages of the outer one, which keeps its peak."""
    with probe.measure() as outer:
        allocate(30 * MB)
        with probe.measure() as inner:
            allocate(MB)
    assert (outer.peak_increase_bytes, inner.peak_increase_bytes) == (30 * MB, MB)
    assert (outer.reserved_increase_bytes, inner.reserved_increase_bytes) == (2 * PAGE, 2 * MB)


def test_training_retains_gradients_and_nothing_else(probe, network):
    """Training retains its gradients only, also if workspaces of libraries are in the segments."""
    images = torch.ones(8, 3, 8, 8, device=probe.device)
    with probe.measure() as region:
        network(images).sum().backward()
    assert region.retained_bytes == sum(p.nbytes for p in network.parameters())
