"""Tensors on streams other than the current one."""

import pytest
import torch

from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


@pytest.fixture
def side_stream(cuda):
    """Return a stream that is not the current one."""
    return torch.cuda.Stream(cuda)


def requested_bytes(device: torch.device) -> int:
    """Return the sum of requested bytes that the allocator counts."""
    return torch.accelerator.memory_stats(device)["requested_bytes.all.current"]


def test_block_that_waits_for_another_stream_is_not_retained(probe, allocate, side_stream):
    """A freed block in use by another stream is not retained: the region's end waits for it."""
    before = requested_bytes(probe.device)
    with probe.measure() as region:
        tensor = allocate(MB)
        with torch.cuda.stream(side_stream):
            torch.cuda._sleep(10_000_000)
            tensor.record_stream(side_stream)
        del tensor
        assert requested_bytes(probe.device) - before == MB
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == MB
    assert requested_bytes(probe.device) == before


def test_block_that_waits_for_another_stream_is_not_growth(probe, allocate, side_stream):
    """A block that waits for another stream is used again in a later batch and is not growth."""
    with probe.measure() as region:
        for _ in region.batches([torch.zeros(8)] * 8):
            tensor = allocate(MB)
            tensor.record_stream(side_stream)
            del tensor
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes == MB


def test_tensor_kept_on_another_stream_is_retained(probe, allocate, side_stream):
    """The allocator's counters are those of all streams, so a tensor on any stream is retained."""
    with probe.measure() as region, torch.cuda.stream(side_stream):
        kept = allocate(1000)
    assert region.retained_bytes == kept.nbytes
    assert region.net_bytes == 1024


def test_streams_share_no_reserve(probe, allocate, side_stream):
    """A freed block can be used again on its own stream only, so each stream has its reserve."""
    with probe.measure() as region:
        with torch.cuda.stream(side_stream):
            allocate(12 * MB)
            allocate(12 * MB)
        allocate(12 * MB)
    assert region.peak_increase_bytes == 12 * MB
    assert region.reserved_increase_bytes == 24 * MB
    assert region.reserved_after_cleaning_bytes == region.reserved_start_bytes


def test_workspaces_of_another_stream_are_not_retained(probe, side_stream):
    """CuBLAS has a workspace for each stream; it is not retained."""
    square = torch.ones(64, 64, device=probe.device)
    with probe.measure() as region:
        product = square @ square
        with torch.cuda.stream(side_stream):
            side_product = square @ square
    assert region.retained_bytes == product.nbytes + side_product.nbytes
    assert region.net_bytes == region.retained_bytes
    assert region.peak_increase_bytes > region.retained_bytes
