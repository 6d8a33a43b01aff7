"""Figures of regions on the CPU: leaks are exact to the byte, and older tensors do not count."""

import gc
import platform
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_cka_memory import MemoryProbe, measure_memory_retention
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.meters.torch_versions import processor_name


class Cycle:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self, size: int) -> None:
        self.me = self
        self.tensor = torch.zeros(size)


def test_leak_is_reported_to_the_byte(cpu: MemoryProbe) -> None:
    """A leak of 1 MB and one byte is reported exactly, and not rounded to 1 MB."""
    region = cpu.run(lambda: torch.zeros(2**20 + 1, dtype=torch.uint8))
    assert region.retained_bytes == region.net_bytes == region.peak_increase_bytes == 2**20 + 1
    assert (region.reserved_peak_bytes, region.one_time_bytes) == (None, None)


def test_training_step_without_a_leak_retains_nothing(cpu: MemoryProbe) -> None:
    """With gradients and the optimizer's state allocated before, a
    training step retains nothing.
    """
    model = nn.Linear(10, 10)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(4, 10)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).sum().backward()
        optimizer.step()

    step()
    region = cpu.run(step)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes > 0


def test_garbage_in_cycles_is_not_retained(cpu: MemoryProbe) -> None:
    """Garbage in cycles is collected before the end is read, but it counts in the peak."""
    region = cpu.run(lambda: [Cycle(100), None][1])
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, 400)


def test_earlier_garbage_is_not_counted_at_the_start(cpu: MemoryProbe) -> None:
    """Earlier garbage does not count at the start; else collecting
    it would lower the net change.
    """
    Cycle(1000)
    region = cpu.run(gc.collect)
    assert region.net_bytes == 0


def test_freeing_old_tensors_does_not_hide_a_leak(cpu: MemoryProbe) -> None:
    """A new tensor is retained even if older ones are freed, so that the net change is 0."""
    old = [torch.zeros(100)]
    kept: list[torch.Tensor] = []

    def swap() -> None:
        old.clear()
        kept.append(torch.zeros(100))

    region = cpu.run(swap)
    assert (region.net_bytes, region.retained_bytes) == (0, 400)


def test_backward_does_not_count_tensors_of_an_earlier_graph(cpu: MemoryProbe) -> None:
    """Backward uses tensors that only C++ referenced; only the gradient is new."""
    x = torch.ones(100, requires_grad=True)
    loss = (x.exp().sin() * torch.arange(100)).sum()
    with cpu.measure() as region:
        loss.backward()
    assert region.retained_bytes == 400


def test_second_backward_does_not_count_a_retained_graph(cpu: MemoryProbe) -> None:
    """A second backward pass uses saved tensors that stay live, but are older than the region."""
    x = torch.ones(100, requires_grad=True)
    loss = x.exp().sin().sum()
    loss.backward(retain_graph=True)
    with cpu.measure() as region:
        loss.backward(retain_graph=True)
    assert region.retained_bytes == 0


def test_kept_graph_is_counted_with_its_saved_tensors(cpu: MemoryProbe) -> None:
    """``losses.append(loss)`` keeps a scalar and the tensors that its graph saved for backward."""
    x = torch.ones(100, requires_grad=True)
    with cpu.measure() as region:
        loss = x.exp().sum()  # exp saves its result
    assert region.retained_bytes == 400 + 4
    del loss


def test_earlier_gradients_are_not_counted(cpu: MemoryProbe) -> None:
    """An earlier gradient is found through its parameter, even without a Python object."""
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    with cpu.measure() as region:
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    assert len(norms) == 2
    assert (region.retained_bytes, region.net_bytes) == (0, 0)


def test_freeing_gradients_makes_the_net_change_negative(cpu: MemoryProbe) -> None:
    """``zero_grad`` frees tensors from before the region, so that the net change is negative."""
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    with cpu.measure() as region:
        model.zero_grad()
    assert (region.retained_bytes, region.net_bytes) == (0, -440)


def test_nested_regions_have_their_own_figures(cpu: MemoryProbe) -> None:
    """Retained counts from the entry of each region; the outer region keeps its peak."""
    with cpu.measure("outer") as outer:
        a = torch.zeros(100)
        _ = torch.zeros(1000)
        del _
        with cpu.measure("inner") as inner:
            b = torch.zeros(10)
        c = torch.zeros(1)
    assert (outer.retained_bytes, inner.retained_bytes) == (444, 40)
    assert (outer.peak_increase_bytes, inner.peak_increase_bytes) == (4400, 40)
    del a, b, c


def test_region_does_not_reference_measured_tensors(cpu: MemoryProbe) -> None:
    """A region's record, probe and meter reference no measured tensor."""
    with cpu.measure() as region:
        tensor = torch.zeros(10)
        region.batch_done()
    reference = weakref.ref(tensor)
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert reference() is None
    assert storage() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_loop_over_a_loader_without_a_leak_has_no_growth(cpu: MemoryProbe, workers: int) -> None:
    """A loop that frees all batches does not grow; its shorter last batch is not judged."""
    loader = DataLoader(TensorDataset(torch.ones(37, 3)), batch_size=4, num_workers=workers)
    total = 0.0
    with cpu.measure() as region:
        for (batch,) in region.batches(loader):
            total += float(batch.sum())
            del batch
    assert total == 111.0
    assert [sample.size for sample in region.timeline] == [4] * 9 + [1]
    assert (region.growth_bytes_per_batch, region.retained_bytes) == (0.0, 0)


def test_kept_batch_that_no_operator_used_is_growth(cpu: MemoryProbe) -> None:
    """A kept batch is growth without any operator, as ``torch.frombuffer`` makes tensors."""
    kept = []
    with cpu.measure() as region:
        for _ in range(5):
            kept.append(torch.frombuffer(bytearray(48), dtype=torch.uint8))
            region.batch_done()
    assert region.growth_bytes_per_batch == 48.0
    assert region.retained_bytes == region.peak_increase_bytes == 5 * 48


def test_batches_kept_from_worker_processes_are_retained(native_meter: Meter) -> None:
    """Batches kept from workers are retained without any operator; the peak includes the end."""
    loader = DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4, num_workers=2)
    kept = []
    with MemoryProbe(meter=native_meter).measure() as region:
        for (batch,) in region.batches(loader):
            kept.append(batch)
            del batch
    assert region.retained_bytes == region.peak_increase_bytes == 480


def test_leak_of_4_bytes_per_batch_is_reported_as_4(cpu: MemoryProbe) -> None:
    """Keeping ``loss.detach()`` is reported as 4 bytes per batch, whatever a batch's size."""
    losses: list[torch.Tensor] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(9):
            yield torch.ones(8, 100)

    with cpu.measure() as region:
        for _, batch in enumerate(region.batches(batches())):
            losses.append(batch.sum())
    assert region.growth_bytes_per_batch == 4.0


def test_measure_memory_retention_runs_outside_pytest() -> None:
    """``measure_memory_retention`` returns (result, peak, retained), which contains its result."""
    result, peak_mb, retained_mb = measure_memory_retention(lambda: torch.zeros(2**18), "cpu")
    assert result.shape == (2**18,)
    assert retained_mb == 1.0
    assert peak_mb >= 1.0


def test_warm_up_run_makes_the_first_allocation_one_time(cpu: MemoryProbe) -> None:
    """A cache that the warm-up run fills is reported as one-time bytes, not as retained."""
    cache: list[torch.Tensor] = []

    def func() -> None:
        if not cache:
            cache.append(torch.zeros(100))

    region = cpu.run(func, warmup=1)
    assert (region.retained_bytes, region.one_time_bytes) == (0, 400)


def test_cpu_name_falls_back_to_the_platform_module_without_cpuinfo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without /proc/cpuinfo the CPU's name is the one that the module platform gives."""

    def no_such_file(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_such_file)
    known = (platform.processor(), platform.machine(), "cpu")
    assert processor_name() in filter(None, known)
