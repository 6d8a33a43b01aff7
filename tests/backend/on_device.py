"""Tests of the accelerator meter on ``hostdevice``, which has memory counters like a GPU.

``test_on_device.py`` runs this file in a session in which torch has loaded ``hostdevice``.
"""

import gc
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cka import CKA
from pytest_cka_memory import MemoryProbe, measure_memory_at_batch_counts
from pytest_cka_memory.units import MB

BLOCK = 512
EDGES = (1, BLOCK, BLOCK + 1, MB + 1)


def make(size: int, device: torch.device) -> torch.Tensor:
    """Allocate so many bytes, nothing else."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def blocks(size: int) -> int:
    """What the allocator makes of `size` bytes."""
    return -(-size // BLOCK) * BLOCK


@pytest.fixture
def network(cka_memory) -> torch.nn.Module:
    """Convolution, normalisation and a linear layer, in training mode."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 10),
    ).to(cka_memory.device)


@pytest.fixture
def images(cka_memory) -> torch.Tensor:
    """A batch of eight."""
    return torch.randn(8, 3, 8, 8, device=cka_memory.device)


def test_a_snapshot_is_what_torch_says(cka_memory):
    """The same counters, under our names."""
    held = make(3 * MB + 1, cka_memory.device)
    stats = torch.accelerator.memory_stats(cka_memory.device)
    snapshot = cka_memory.snapshot()
    assert snapshot.allocated_bytes == stats["allocated_bytes.all.current"] >= held.nbytes
    assert snapshot.reserved_bytes == stats["reserved_bytes.all.current"]


@pytest.mark.parametrize("size", EDGES)
def test_a_kept_tensor_is_retained_to_the_byte(cka_memory, size):
    """Start, end and peak count its blocks."""
    with cka_memory.measure() as region:
        kept = make(size, cka_memory.device)
    assert region.retained_bytes == kept.nbytes == size
    assert region.net_bytes == region.peak_increase_bytes == blocks(size)


def test_a_tensor_let_go_is_in_the_peak_alone(cka_memory):
    """Nothing of it is retained."""
    with cka_memory.measure() as region:
        make(BLOCK + 1, cka_memory.device)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == 2 * BLOCK


def test_the_reserve_outlives_its_tensors_until_the_region_ends(cka_memory):
    """Three sizes in turn: one is live at a time, all three are reserved."""
    with cka_memory.measure() as region:
        for size in (MB, 2 * MB, 3 * MB):
            make(size, cka_memory.device)
    assert region.peak_increase_bytes == 3 * MB
    assert region.reserved_increase_bytes == 6 * MB
    assert region.reserved_end_bytes == region.reserved_start_bytes


def test_a_cache_that_the_test_empties_lowers_no_peak(cka_memory):
    """Its first reserve stays the highest."""
    with cka_memory.measure() as region:
        make(4 * MB, cka_memory.device)
        torch.accelerator.empty_cache()
        make(MB, cka_memory.device)
    assert region.reserved_increase_bytes == 4 * MB
    assert region.retained_bytes == 0


@pytest.mark.parametrize(
    "reset",
    [
        pytest.param(lambda: torch.accelerator.reset_peak_memory_stats(), id="accelerator"),
        pytest.param(lambda: torch.privateuseone.reset_peak_memory_stats(), id="device-module"),
    ],
)
def test_peaks_that_the_test_resets_are_not_forgotten(cka_memory, reset):
    """Nor does the test's own look at them change: it has reset them."""
    with cka_memory.measure() as region:
        make(4 * MB, cka_memory.device)
        reset()
        level = torch.accelerator.memory_allocated()
        assert torch.accelerator.max_memory_allocated() == level
        make(MB, cka_memory.device)
        assert torch.accelerator.max_memory_allocated() == level + MB
    assert region.peak_increase_bytes == 4 * MB
    assert region.reserved_increase_bytes == 5 * MB


def test_nested_regions_have_each_their_own_peak(cka_memory):
    """The device has one counter, and every region resets it."""
    with cka_memory.measure() as outer:
        make(8 * MB, cka_memory.device)
        kept = make(MB, cka_memory.device)
        with cka_memory.measure() as inner:
            make(2 * MB, cka_memory.device)
            with cka_memory.measure() as innermost:
                also_kept = make(1, cka_memory.device)
    assert outer.peak_increase_bytes == 8 * MB
    assert inner.peak_increase_bytes == 2 * MB
    assert innermost.peak_increase_bytes == BLOCK
    assert outer.retained_bytes == kept.nbytes + also_kept.nbytes
    assert inner.retained_bytes == innermost.retained_bytes == 1


def test_overlapping_regions_count_each_its_own(cka_memory):
    """The first ends while the second is open."""
    first, second = cka_memory.measure("first"), cka_memory.measure("second")
    with first as early:
        kept = make(100, cka_memory.device)
        late = second.__enter__()
        also_kept = make(10, cka_memory.device)
    and_this = make(1, cka_memory.device)
    second.__exit__(None, None, None)
    assert early.retained_bytes == kept.nbytes + also_kept.nbytes
    assert late.retained_bytes == also_kept.nbytes + and_this.nbytes


def test_growth_is_told_to_the_byte(cka_memory):
    """Four bytes per batch, though each takes a block."""
    kept = []
    with cka_memory.measure() as region:
        for batch in region.batches([torch.zeros(8)] * 16):
            kept.append(batch.to(cka_memory.device).sum())
    assert region.growth_bytes_per_batch == 4.0
    assert region.retained_bytes == 16 * 4


@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_training_is_flat_and_keeps_nothing(cka_memory, network, images):
    """The optimiser's state was made before, in a first step."""
    optimizer = torch.optim.AdamW(network.parameters())

    def step():
        optimizer.zero_grad()
        checkpoint(network, images, use_reentrant=False).square().mean().backward()
        optimizer.step()

    step()
    with cka_memory.measure() as region:
        for _ in region.batches([torch.zeros(8)] * 8):
            step()
        optimizer.zero_grad()  # or these, which are born inside, were retained
    assert region.peak_increase_bytes > 0


def test_a_first_step_keeps_gradients_and_the_optimisers_state(cka_memory, network, images):
    """Twice the parameters for Adam's averages, once for the gradients; its steps are counted on
    the CPU.
    """
    parameters = sum(parameter.nbytes for parameter in network.parameters())
    with cka_memory.measure() as region:
        optimizer = torch.optim.Adam(network.parameters())
        network(images).sum().backward()
        optimizer.step()
    assert region.retained_bytes == 3 * parameters


def test_a_graph_keeps_what_its_operators_saved(cka_memory):
    """An input of the product and the result of the exponential."""
    weight = torch.ones(1000, device=cka_memory.device, requires_grad=True)
    with cka_memory.measure() as region:
        factor = torch.ones(1000, device=cka_memory.device)
        result = (weight * factor).exp()
        loss = result.sum()
        del factor, result
    assert region.retained_bytes == 4000 + 4000 + loss.nbytes


def test_a_cycle_is_no_leak(cka_memory):
    """It is collected before the reading."""

    class Node:
        pass

    with cka_memory.measure() as region:
        node = Node()
        node.tensor, node.me = make(MB, cka_memory.device), node
        del node
    assert region.retained_bytes == 0


def test_a_free_that_waits_for_another_stream_is_no_leak(cka_memory):
    """Until the region ends and cleans, the allocator counts it as asked for."""
    with cka_memory.measure() as region:
        tensor = make(MB, cka_memory.device)
        tensor.record_stream(torch.accelerator.current_stream())
        del tensor
        stats = torch.accelerator.memory_stats()
        assert (
            stats["requested_bytes.all.current"] - region._open_region.start.requested_bytes == MB
        )
    assert region.retained_bytes == 0


def test_a_block_that_no_tensor_owns_is_retained(cka_memory):
    """The allocator tells of it; no operator bore it."""
    with cka_memory.measure() as region:
        address = torch.privateuseone.hold(1000)
    assert region.retained_bytes == 1000
    with cka_memory.measure() as region:
        torch.privateuseone.let_go(address)
    assert (region.retained_bytes, region.net_bytes) == (0, -1024)


def test_a_storage_resized_in_place_is_counted_as_it_is(cka_memory):
    """As FSDP does with its parameters."""
    tensor = make(1000, cka_memory.device)
    with cka_memory.measure() as region:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(3000)
    assert region.retained_bytes == 2000
    with cka_memory.measure() as region:
        tensor.untyped_storage().resize_(0)
    assert (region.retained_bytes, region.net_bytes) == (0, -3072)


def test_a_view_keeps_its_whole_storage(cka_memory):
    """One element of a million."""
    with cka_memory.measure() as region:
        view = make(MB, cka_memory.device)[7:8]
    assert view.nbytes == 1
    assert region.retained_bytes == MB


def test_a_thread_is_counted(cka_memory):
    """What it bears belongs to the region around."""
    kept = []
    with cka_memory.measure() as region:
        thread = threading.Thread(target=lambda: kept.append(make(100, cka_memory.device)))
        thread.start()
        thread.join()
    assert region.retained_bytes == 100


def test_tensors_of_the_cpu_are_not_counted(cka_memory):
    """Nor what is copied there."""
    with cka_memory.measure() as region:
        kept = torch.ones(1000), torch.ones(1000, device=cka_memory.device).cpu()
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, blocks(4000))
    del kept


def test_each_device_is_measured_alone(cka_memory):
    """A probe of the second one does not see the first, which is the current one."""
    with MemoryProbe("privateuseone:1").measure() as second, cka_memory.measure() as first:
        kept = make(100, torch.device("privateuseone:0")), make(10, torch.device("privateuseone:1"))
    assert (first.retained_bytes, second.retained_bytes) == (100, 10)
    assert kept[1].device.index == 1


def test_another_current_device_changes_nothing(cka_memory):
    """The region measures the device it began with."""
    with cka_memory.measure() as region:
        torch.accelerator.set_device_index(1)
        kept = make(100, cka_memory.device), make(10, torch.device("privateuseone"))
    torch.accelerator.set_device_index(0)
    assert kept[1].device.index == 1
    assert region.retained_bytes == 100


@pytest.fixture
def small_device(cka_memory):
    """A device with room for four more megabytes."""
    torch.accelerator.empty_cache()
    torch.privateuseone.set_capacity(torch.accelerator.memory_reserved() + 4 * MB)
    yield cka_memory.device
    torch.privateuseone.set_capacity(8 * 1024 * MB)


def test_out_of_memory_in_a_region_leaves_its_figures_right(cka_memory, small_device):
    """What was live then is in the peak; what failed is in none."""
    with cka_memory.measure() as region:
        with pytest.raises(torch.OutOfMemoryError):
            _ = make(3 * MB, small_device), make(2 * MB, small_device)
        gc.collect()
        kept = make(10, small_device)
    assert region.peak_increase_bytes == 3 * MB
    assert region.retained_bytes == kept.nbytes


def test_a_full_cache_is_emptied_before_memory_runs_out(cka_memory, small_device):
    """So the reserve never rises above the device."""
    with cka_memory.measure() as region:
        make(3 * MB, small_device)
        make(4 * MB, small_device)
    assert region.peak_increase_bytes == region.reserved_increase_bytes == 4 * MB


def test_out_of_memory_in_a_backward_pass_keeps_nothing(cka_memory, network, images):
    """The gradients that were made are told; the graph is gone with the error."""
    torch.accelerator.empty_cache()
    with cka_memory.measure() as region:
        loss = network(images).sum()
        torch.accelerator.empty_cache()
        torch.privateuseone.set_capacity(torch.accelerator.memory_reserved() + 8 * BLOCK)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        torch.privateuseone.set_capacity(8 * 1024 * MB)
        del loss
    gradients = [p.grad.nbytes for p in network.parameters() if p.grad is not None]
    assert region.retained_bytes == sum(gradients)


@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_cka_keeps_nothing(cka_memory, network):
    """Comparing all layers, batch after batch."""
    loader = torch.utils.data.DataLoader(torch.randn(48, 3, 8, 8), batch_size=8)
    with cka_memory.measure() as region, CKA(network.eval(), device=cka_memory.device) as cka:
        result = cka.compare(region.batches(loader), progress=False)
    assert result.matrix.device.type == "cpu"


@pytest.mark.parametrize("on_it", [True, False], ids=["model-there", "device-named"])
def test_cka_runs_on_the_device(cka_memory, network, on_it):
    """Where the model is, or on the device named, without a number; then the model is back."""
    device = cka_memory.device if on_it else torch.device("cpu")
    network = network.eval().to(device)
    ran_on = set()
    network.register_forward_hook(lambda module, args, output: ran_on.add(output.device))
    cka = CKA(network, device=None if on_it else cka_memory.device.type)
    cka.compare([torch.randn(8, 3, 8, 8)] * 2, progress=False)
    assert ran_on == {cka_memory.device}
    assert {parameter.device for parameter in network.parameters()} == {device}


def test_cka_after_running_out_of_memory_keeps_nothing(cka_memory, network):
    """Its hooks are off, its Gram matrices gone."""
    loader = torch.utils.data.DataLoader(torch.randn(64, 3, 8, 8), batch_size=64)
    cka = CKA(network.eval(), device=cka_memory.device)
    torch.accelerator.empty_cache()
    torch.privateuseone.set_capacity(torch.accelerator.memory_reserved() + 200 * 1024)
    with cka_memory.measure() as region:
        with pytest.raises(torch.OutOfMemoryError), cka:
            cka.compare(loader, progress=False)
        torch.privateuseone.set_capacity(8 * 1024 * MB)
    assert region.retained_bytes == 0
    assert not any(module._forward_hooks for module in network.modules())


def test_the_seeds_functions_measure_the_device(cka_memory):
    """``measure_memory_at_batch_counts`` over a loop that keeps 4 bytes per batch."""
    kept = []

    def use(model, loader):
        for batch in loader:
            kept.append(model(batch.to(cka_memory.device)).sum().detach())

    retained = measure_memory_at_batch_counts(use, torch.nn.ReLU, [torch.ones(8)] * 4, (1, 4))
    assert retained == [4 / MB, 16 / MB]
