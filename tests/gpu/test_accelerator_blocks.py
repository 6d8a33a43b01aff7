"""The figures of a region are those of the allocator's blocks, segments and counters."""

import pytest
import torch

from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu

BLOCK = 512
SMALL_SEGMENT = 2 * MB
"""What the allocator reserves for blocks of up to 1 MB."""
LARGE_SEGMENT = 20 * MB
"""What it reserves for blocks of 1 MB to 10 MB; a larger block has a segment of its own."""


def rounded(size: int) -> int:
    """Return the bytes of the allocator's block for `size` bytes."""
    return -(-size // BLOCK) * BLOCK


def test_snapshot_has_torchs_counters(probe, allocate):
    """``snapshot`` has the same counters as torch, under the plugin's names."""
    held = allocate(3 * MB + 1)
    stats = torch.accelerator.memory_stats(probe.device)
    snapshot = probe.snapshot()
    assert snapshot.allocated_bytes == stats["allocated_bytes.all.current"] >= held.nbytes
    assert snapshot.reserved_bytes == stats["reserved_bytes.all.current"]


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, MB, MB + 1], ids=str)
def test_retained_counts_requested_bytes_and_the_peak_counts_blocks(probe, allocate, size):
    """A region retains the requested size of a tensor, not the size of the allocator's block."""
    with probe.measure() as region:
        kept = allocate(size)
    assert region.retained_bytes == kept.nbytes == size
    assert region.net_bytes == region.peak_increase_bytes == rounded(size)


def test_block_that_is_not_split_counts_whole(probe, allocate):
    """The allocator does not split off 1 MB or less, so a tensor may occupy a segment of 12 MB."""
    size = 12 * MB - MB // 2
    with probe.measure() as region:
        kept = allocate(size)
    assert region.retained_bytes == kept.nbytes == size
    assert region.net_bytes == region.peak_increase_bytes == 12 * MB


def test_freed_tensor_counts_in_the_peak_only(probe, allocate):
    """A tensor that is freed in a region counts in its peak and is not retained."""
    with probe.measure() as region:
        allocate(BLOCK + 1)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == 2 * BLOCK


def test_reserve_holds_freed_segments_until_the_region_ends(probe, allocate):
    """A freed segment that is too small for the next tensor stays in the reserve until the end."""
    with probe.measure() as region:
        for size in (10 * MB, 12 * MB, 14 * MB):
            allocate(size)
    assert region.peak_increase_bytes == 14 * MB
    assert region.reserved_increase_bytes == (10 + 12 + 14) * MB
    assert region.reserved_after_cleaning_bytes == region.reserved_start_bytes


@pytest.mark.parametrize("empties_cache", [False, True])
def test_reserve_that_the_code_left_shows_whether_it_emptied_the_cache(
    probe, allocate, empties_cache
):
    """The reserve before a region's own cleaning shows whether the
    code emptied the cache itself.
    """
    with probe.measure() as region:
        allocate(64 * MB)
        if empties_cache:
            torch.accelerator.empty_cache()
    left_bytes = region.reserved_end_bytes - region.reserved_start_bytes
    assert left_bytes == (0 if empties_cache else 64 * MB)
    assert region.reserved_after_cleaning_bytes == region.reserved_start_bytes
    assert region.reserved_end_mb == region.reserved_end_bytes / MB


def test_small_and_large_blocks_share_no_segment(probe, allocate):
    """Many small blocks fit in one segment, and so do several large ones."""
    with probe.measure() as region:
        kept = [allocate(size) for size in (1, MB, BLOCK, 2 * MB, 8 * MB, MB + 1)]
    assert region.reserved_increase_bytes == SMALL_SEGMENT + LARGE_SEGMENT
    assert region.retained_bytes == sum(tensor.nbytes for tensor in kept)


def test_emptying_the_cache_in_the_test_lowers_no_peak(probe, allocate):
    """If a test empties the cache, the peak and the reserve from before still count."""
    with probe.measure() as region:
        allocate(14 * MB)
        torch.accelerator.empty_cache()
        allocate(MB)
    assert region.reserved_increase_bytes == 14 * MB
    assert region.peak_increase_bytes == 14 * MB
    assert region.retained_bytes == 0


@pytest.mark.parametrize("module", ["accelerator", "device"])
def test_peaks_that_the_test_resets_are_kept(probe, allocate, module):
    """A test that resets torch's peaks reads the ones since its reset, as without the plugin."""
    reset = {"accelerator": torch.accelerator, "device": torch.get_device_module(probe.device)}
    with probe.measure() as region:
        allocate(4 * MB)
        reset[module].reset_peak_memory_stats()
        level = torch.accelerator.memory_allocated()
        assert torch.accelerator.max_memory_allocated() == level
        allocate(MB)
        assert torch.accelerator.max_memory_allocated() == level + MB
    assert region.peak_increase_bytes == 4 * MB
    assert region.reserved_increase_bytes == LARGE_SEGMENT + SMALL_SEGMENT


def test_peak_and_start_are_those_of_the_allocator(probe, allocate):
    """The meter's peak is the one that torch.accelerator reports for the same code."""
    held = allocate(4 * MB)
    torch.accelerator.reset_peak_memory_stats(probe.device)
    with probe.measure() as region:
        allocate(8 * MB)
        peak = torch.accelerator.max_memory_allocated(probe.device)
    assert region.peak_bytes == peak
    assert region.peak_increase_bytes == 8 * MB
    assert region.start_bytes >= held.nbytes
    assert region.reserved_peak_bytes >= region.peak_bytes


def test_view_keeps_its_whole_storage(probe, allocate):
    """A view of one element keeps its whole storage of a million elements, so all are retained."""
    with probe.measure() as region:
        view = allocate(MB)[7:8]
    assert view.nbytes == 1
    assert region.retained_bytes == MB


def test_storage_resized_in_place_is_counted_with_its_new_size(probe, allocate):
    """A storage that is resized in place, as FSDP does, counts with its new size."""
    tensor = allocate(1000)
    with probe.measure() as region:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(3000)
    assert region.retained_bytes == 2000
    with probe.measure() as region:
        tensor.untyped_storage().resize_(0)
    assert (region.retained_bytes, region.net_bytes) == (0, -3072)


def test_tensors_on_the_cpu_are_not_counted(probe):
    """A meter of an accelerator does not count tensors on the CPU, nor copies to the CPU."""
    with probe.measure() as region:
        kept = torch.ones(1000), torch.ones(1000, device=probe.device).cpu()
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, rounded(4000))
    del kept
