"""Counting in the accelerator's own allocator: what it replaces, and what was live at a peak."""

import gc
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_cka_memory import DeviceError, MemoryProbe
from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.meters.accelerator import RequestedAllocations, meter
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu
KNOWS_EXPRESSIONS = sys.version_info >= (3, 11)
"""Whether Python knows which part of a line ran."""

TEMPORARY = "temporary memory of an operator, such as a workspace"
# Torch up to 2.14 keeps the workspace of a matrix product for the next one.
_IS_KEPT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
WORKSPACE = "workspace of a library" if _IS_KEPT else TEMPORARY
BACKWARD = "allocated outside Python code, such as in a backward pass"


class ExplainPeak:
    """Have a region's end explain its peak, as a broken limit has it."""

    draws_paths = False

    def figures_to_explain(self, record):
        return {"peak_increase_bytes"}

    def named_values(self):
        return {}


@pytest.fixture
def explaining(native):
    """Return a probe that explains peaks.

    A region without limits may leave garbage of earlier tests, to save time. If it is freed in the
    region, the peak may be another.
    """
    gc.collect()
    return MemoryProbe(native.device, explainer=ExplainPeak())


def collections() -> list[int]:
    """Return how often the garbage collector has run, by generation."""
    return [generation["collections"] for generation in gc.get_stats()]


def test_a_workspace_of_cublas_that_is_retained_is_named_with_the_call_that_frees_it(
    native, cuda, monkeypatch
):
    """If torch cannot drop them, a workspace of cuBLAS is retained, and what frees it is named.

    Where torch frees the workspace with the product, nothing is retained.
    """
    square = torch.ones(64, 64, device=cuda)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with MemoryProbe(native.device).measure() as region:
        monkeypatch.setattr(region._stack.meter, "_drop_workspaces", lambda: None)
        _ = square @ square
        del _
    if not _IS_KEPT:
        assert region.retained_bytes == 0
        return
    (holding,) = region.retained
    assert holding.bytes == region.retained_bytes > 0
    assert "cuBLAS" in holding.hint
    assert "call torch._C._cuda_clearCublasWorkspaces()" in holding.hint
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before


def test_region_changes_nothing_that_a_test_can_see(native, allocate):
    """A region adds no dispatch mode and patches neither threads nor functions that reset peaks."""
    module = torch.get_device_module(native.device)
    before = threading.Thread.start, module.reset_peak_memory_stats
    with native.measure():
        allocate(1000)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert (threading.Thread.start, module.reset_peak_memory_stats) == before


def test_region_resets_no_peak_of_torch(native, allocate):
    """A region does not reset torch's peaks, so a test can read its own since it began."""
    torch.accelerator.reset_peak_memory_stats(native.device)
    allocate(30 * MB)
    peak = torch.accelerator.max_memory_allocated(native.device)
    with native.measure() as region:
        allocate(MB)
    assert torch.accelerator.max_memory_allocated(native.device) == peak
    assert region.peak_increase_bytes == MB


def test_function_that_a_test_patches_and_restores_later_is_torchs_own_again(
    native, cuda, monkeypatch
):
    """A region leaves no wrapper behind if a test patches a function of torch and restores it
    later.
    """
    original = torch.cuda.reset_peak_memory_stats
    with native.measure():
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *args: None)
    monkeypatch.undo()
    assert torch.cuda.reset_peak_memory_stats is original


def test_region_that_leaves_nothing_collects_no_garbage(native, allocate):
    """A region that starts and ends at the level of the one before collects no garbage."""
    with native.measure():
        pass
    gc.disable()
    try:
        before = collections()
        with native.measure() as region:
            allocate(MB)
        assert collections() == before
    finally:
        gc.enable()
    assert region.peak_increase_bytes == MB


def test_what_a_region_kept_is_collected_before_the_next_if_it_has_become_garbage(native, allocate):
    """What became garbage after a region is collected before the next, though the level is the
    same.
    """

    class Node:
        pass

    with native.measure() as before:
        node = Node()
        node.tensor, node.cycle = allocate(MB), node
    assert before.retained_bytes == MB
    del node
    with native.measure() as after:
        pass
    assert after.start_bytes == before.start_bytes


def test_peak_consists_of_what_the_allocator_had_then(explaining, cuda, allocate):
    """The groups at the peak add up to it; one names an operator's workspace, the last is older."""
    old = allocate(4 * MB)
    values = torch.ones(1024, 1024, device=cuda)
    with explaining.measure() as region:
        product = values @ values
    groups = region.record.at_peak
    assert sum(group.bytes for group in groups) == region.peak_bytes
    *inside, before = groups
    assert (before.before_region, before.bytes) == (True, region.start_bytes)
    assert before.bytes >= old.nbytes + values.nbytes
    assert sum(group.bytes for group in inside) == region.peak_increase_bytes
    workspace, result = inside
    assert workspace.inside == WORKSPACE
    assert workspace.bytes >= 4 * MB
    assert (result.inside, result.bytes) == (None, product.nbytes)
    for group in inside:
        assert "test_accelerator_native.py" in group.created_at[0]
        assert group.code == "values @ values" or sys.version_info < (3, 11)


def test_tensor_freed_by_python_is_no_temporary_of_an_operator(explaining, allocate):
    """A tensor that Python freed was live at the peak and is no temporary inside an operator."""
    with explaining.measure() as region:
        allocate(4 * MB)
    (group,) = [group for group in region.record.at_peak if not group.before_region]
    assert (group.bytes, group.count, group.inside) == (4 * MB, 1, None)


class Repeating(torch.autograd.Function):
    """Allocates four times its gradient in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        repeated = gradient.repeat(4)
        return repeated[: gradient.numel()] * 2


def called_in_backward(function):
    """Return an autograd function whose backward pass calls `function`."""

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            function()
            return gradient * 2

    return Calling


def recomputed(x):
    return (x * 2).exp().sin()


BACKWARD_PASSES = {
    "backward": (lambda w: w.exp().exp().sum().backward(), "w.exp().exp().sum().backward()"),
    "grad": (lambda w: torch.autograd.grad(w.exp().exp().sum(), w), "torch.autograd.grad("),
    "function": (lambda w: Repeating.apply(w).sum().backward(), "gradient.repeat(4)"),
    "checkpoint": (
        lambda w: checkpoint(recomputed, w, use_reentrant=False).sum().backward(),
        "(x * 2).exp()",
    ),
    "nested": (
        lambda w: checkpoint(recomputed, w, use_reentrant=True).sum().backward(),
        "(x * 2).exp()",
    ),
}


@pytest.mark.parametrize("kind", BACKWARD_PASSES)
def test_peak_in_a_backward_pass_has_the_lines_that_called_it(explaining, kind):
    """Nodes run in a thread of torch's; the frames of the thread that waits for it are added."""
    run, code = BACKWARD_PASSES[kind]
    weight = torch.ones(2**20, device=explaining.device, requires_grad=True)
    run(weight)
    with explaining.measure() as region:
        run(weight)
    groups = region.record.at_peak
    assert sum(group.bytes for group in groups) == region.peak_bytes
    inside = [group for group in groups if not group.before_region]
    assert all(group.inside != BACKWARD for group in inside)
    if KNOWS_EXPRESSIONS:
        assert [group for group in inside if code in (group.code or "")], groups
    assert all(group.created_at for group in inside)


def test_a_thread_in_which_the_meter_still_waits_is_not_who_called_a_backward_pass(
    explaining, monkeypatch
):
    """On a busy machine it may outlive the wait; it has started none of the user's passes."""
    begun, end = threading.Event(), threading.Event()
    grad = torch.autograd.grad

    def wait():
        begun.set()
        end.wait(30)

    def blocking_grad(*args, accumulate_grad):
        on_cpu = torch.ones(1, requires_grad=True)
        return grad(called_in_backward(wait).apply(on_cpu), on_cpu)

    run, code = BACKWARD_PASSES["backward"]
    weight = torch.ones(2**20, device=explaining.device, requires_grad=True)
    run(weight)
    with explaining.measure() as region:
        monkeypatch.setattr(meter.torch_private, "RUN_BACKWARD", blocking_grad)
        waiting = threading.Thread(target=meter.run_empty_pass, args=(explaining.device,))
        waiting.start()
        try:
            assert begun.wait(30)
            monkeypatch.undo()
            run(weight)
        finally:
            end.set()
            waiting.join()
    groups = [group for group in region.record.at_peak if not group.before_region]
    assert all(group.created_at for group in groups), groups
    if KNOWS_EXPRESSIONS:  # otherwise, tensors of one line are one group
        codes = [group.code or "" for group in groups if group.bytes == weight.nbytes]
        assert [line for line in codes if code in line], codes


def test_gradient_of_a_backward_pass_has_its_line(native):
    """What a backward pass has allocated and is retained has the line that called backward()."""
    weight = torch.ones(2**20, device=native.device, requires_grad=True)
    with native.measure() as region:
        weight.exp().sum().backward()
    (gradient,) = region.retained
    assert gradient.code == "weight.exp().sum().backward()"


def test_backward_passes_of_two_threads_have_no_line(explaining):
    """Torch does not tell which of two threads that wait has started a pass."""
    both = threading.Barrier(2)

    meeting = called_in_backward(both.wait)

    def run(device):
        on_device = torch.ones(2**20, device=device, requires_grad=True)
        on_cpu = torch.ones(1, requires_grad=True)
        (on_device.exp().sum() + meeting.apply(on_cpu).to(device).sum()).backward()

    with explaining.measure() as region:
        threads = [threading.Thread(target=run, args=(explaining.device,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(group.bytes for group in region.record.at_peak) == region.peak_bytes


def test_gradient_that_a_backward_pass_frees_is_no_temporary_of_an_operator(explaining):
    """A gradient lives from one operator of a backward pass to another, which its name says."""
    weight = torch.ones(2**20, device=explaining.device, requires_grad=True)
    with explaining.measure() as region:
        weight.exp().exp().sum().backward()
    temporary = [group.bytes for group in region.record.at_peak if group.inside == TEMPORARY]
    assert sum(temporary) < weight.nbytes


def test_memory_without_a_line_has_not_that_of_another_allocation(native, cuda, allocate):
    """Memory that is not allocated for a tensor has no line, also not that of the tensor before."""
    with native.measure() as region:
        kept = allocate(512)
        address = torch.cuda.caching_allocator_alloc(1024, cuda)
    found = {holding.bytes: holding.created_at for holding in region.retained}
    torch.cuda.caching_allocator_delete(address)
    assert found.keys() == {kept.nbytes, 1024}
    assert found[512]
    assert not found[1024]


def test_allocation_that_takes_a_new_segment_has_its_line(native, allocate):
    """A new allocation's line is noted even if the allocator takes a new segment under its lock."""
    native.measure()
    with native.measure() as region:
        kept = [allocate(30 * MB + number) for number in range(3)]
    (holding,) = region.retained
    assert (holding.count, holding.bytes) == (3, sum(tensor.nbytes for tensor in kept))
    assert "in test_allocation_that_takes_a_new_segment_has_its_line" in " ".join(
        holding.created_at
    )


def test_reserve_falls_with_an_emptied_cache(native, allocate):
    """When the cache is emptied, the allocator reports no block, so its counters are read again."""
    with native.measure() as region:
        allocate(30 * MB)
        torch.accelerator.empty_cache()
    with native.measure() as after:
        pass
    assert region.reserved_after_cleaning_bytes == region.reserved_start_bytes
    assert (
        after.reserved_peak_bytes
        == after.reserved_start_bytes
        == region.reserved_after_cleaning_bytes
    )


def test_retained_bytes_are_exact_if_old_tensors_are_freed(native, allocate):
    """If old tensors are freed in a region, the sizes of all blocks are read to stay exact."""
    old = [allocate(size) for size in (1, 700, MB + 1)]
    with native.measure() as region:
        del old[1]
        kept = [allocate(size) for size in (3, 513, 2 * MB + 5)]
    assert region.retained_bytes == sum(tensor.nbytes for tensor in kept)
    assert sum(holding.bytes for holding in region.retained) == region.retained_bytes


def test_peaks_of_nested_and_overlapping_regions_are_their_own(native, allocate):
    """Nested and overlapping regions have their own peaks, in whatever order they end."""
    first, second = native.measure("first"), native.measure("second")
    outer = first.__enter__()
    allocate(8 * MB)
    inner = second.__enter__()
    allocate(2 * MB)
    first.__exit__(None, None, None)
    allocate(4 * MB)
    second.__exit__(None, None, None)
    assert (outer.peak_increase_bytes, inner.peak_increase_bytes) == (8 * MB, 4 * MB)


def test_threads_that_allocate_and_free_do_not_wait_for_each_other(native, allocate):
    """Frames are noted before the allocator's lock is taken, so
    that no thread waits for another.
    """

    def work():
        for size in range(1, 3000):
            tensor = allocate(size)
            del tensor

    with native.measure() as region:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)


def test_device_that_is_no_longer_counted_is_refused(native):
    """A counter whose level is not the allocator's is refused, because every limit would pass."""
    counter = native.meter._counter
    level = torch.accelerator.memory_allocated(native.device)
    counter.set_level(level + 512, -1)
    with pytest.raises(DeviceError, match="can no longer be measured: something, perhaps"):
        native.measure().__enter__()
    counter.set_level(level, -1)
    with native.measure() as region:
        pass
    assert region.retained_bytes == 0


def test_empty_region_reads_the_statistics_twice(native, monkeypatch):
    """A region reads the allocator's statistics only twice, because each reading takes long."""
    stats = native.meter._levels._stats
    read, readings = stats.levels, []
    with native.measure():
        pass
    monkeypatch.setattr(stats, "levels", lambda: readings.append(read()) or readings[-1])
    with native.measure():
        pass
    assert len(readings) == 2


def test_retained_bytes_are_added_up_without_describing_blocks(
    native: MemoryProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an older tensor was freed, the requested bytes of each block are read, and no more."""
    described = []
    describe = RequestedAllocations.described

    def counted(self: RequestedAllocations, known: Allocation) -> Allocation:
        described.append(known)
        return describe(self, known)

    monkeypatch.setattr(RequestedAllocations, "described", counted)
    older, freed = torch.ones(3, device=native.device), torch.ones(5, device=native.device)
    with native.measure() as region:
        kept = [torch.ones(size, device=native.device) for size in range(1, 21)]
        del freed
    assert region.retained_bytes == sum(tensor.nbytes for tensor in kept)
    assert described == []
    assert sum(holding.bytes for holding in region.retained) == region.retained_bytes
    assert described
    del older
