"""Regions on an accelerator: nested, overlapping, with batches, threads and reference cycles."""

import sys
import threading

import pytest
import torch

from pytest_cka_memory import measure_memory_at_batch_counts
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu

BLOCK = 512


def test_nested_regions_each_have_their_own_peak(probe, allocate):
    """The device has one peak counter that every region resets, and still each has its own peak."""
    with probe.measure() as outer:
        allocate(8 * MB)
        kept = allocate(MB)
        with probe.measure() as inner:
            allocate(2 * MB)
            with probe.measure() as innermost:
                also_kept = allocate(1)
    assert outer.peak_increase_bytes == 8 * MB
    assert inner.peak_increase_bytes == 2 * MB
    assert innermost.peak_increase_bytes == BLOCK
    assert outer.retained_bytes == kept.nbytes + also_kept.nbytes
    assert inner.retained_bytes == innermost.retained_bytes == 1


def test_overlapping_regions_each_count_their_own_tensors(probe, allocate):
    """If the first region ends while the second is open, each counts its own tensors."""
    first, second = probe.measure("first"), probe.measure("second")
    with first as early:
        kept = allocate(100)
        late = second.__enter__()
        also_kept = allocate(10)
    third = allocate(1)
    second.__exit__(None, None, None)
    assert early.retained_bytes == kept.nbytes + also_kept.nbytes
    assert late.retained_bytes == also_kept.nbytes + third.nbytes


def test_freeing_an_old_tensor_does_not_hide_a_leak(probe, allocate):
    """Freeing an old tensor makes the net change zero, but the new tensor is retained."""
    old = [allocate(MB)]
    with probe.measure() as region:
        new = allocate(MB)
        old.clear()
    assert region.net_bytes == 0
    assert region.retained_bytes == new.nbytes


def test_growth_is_exact_to_the_byte(probe):
    """Growth is 4 bytes per batch, though the allocator uses a block of 512 bytes for them."""
    kept = []
    with probe.measure() as region:
        for batch in region.batches([torch.zeros(8)] * 16):
            kept.append(batch.to(probe.device).sum())
    assert region.growth_bytes_per_batch == 4.0
    assert region.retained_bytes == 16 * 4


def test_batch_counts_are_measured_on_the_device(probe):
    """``measure_memory_at_batch_counts`` finds the 4 bytes that a loop keeps per batch."""
    kept = []

    def use(model, loader):
        for batch in loader:
            kept.append(model(batch.to(probe.device)).sum().detach())

    retained = measure_memory_at_batch_counts(use, torch.nn.ReLU, [torch.ones(8)] * 4, (1, 4))
    assert retained == [4 / MB, 16 / MB]


def test_reference_cycle_is_not_retained(probe, allocate):
    """A reference cycle is collected before the region's end is read, so it is not retained."""

    class Node:
        pass

    with probe.measure() as region:
        node = Node()
        node.tensor, node.cycle = allocate(MB), node
        del node
    assert region.retained_bytes == 0


def test_tensors_of_another_thread_are_counted(probe, allocate):
    """Tensors that another thread allocates belong to the region that is open."""
    kept = []
    with probe.measure() as region:
        thread = threading.Thread(target=lambda: kept.append(allocate(100)))
        thread.start()
        thread.join()
    assert region.retained_bytes == 100


def test_a_retained_tensor_is_named_with_its_expression_and_reference(probe):
    """A retained tensor has an expression that leads to it and the line that allocated it."""
    kept = []
    with probe.measure() as region:
        kept.append(torch.zeros(100, device=probe.device))
    (holding,) = region.retained
    assert (holding.bytes, holding.count, holding.shape) == (400, 1, (100,))
    assert holding.code == "torch.zeros(100, device=probe.device)" or sys.version_info < (3, 11)
    assert holding.held_by.startswith("kept[0] in ")
    assert "test_accelerator_regions.py" in holding.created_at[0]
