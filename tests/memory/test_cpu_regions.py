"""Whole regions on the CPU: what was before is never blamed, what is kept is found to the byte."""

import gc
import platform
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from pytest_cka_memory import MemoryProbe, measure_memory_retention
from pytest_cka_memory.meters.cpu import CpuMeter


@pytest.fixture
def cpu() -> MemoryProbe:
    return MemoryProbe("cpu")


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, size: int) -> None:
        self.me = self
        self.tensor = torch.zeros(size)


class Pair(torch.Tensor):
    """A wrapper subclass: two tensors inside, no storage of its own."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> "Pair":
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, *shape: Any) -> "Pair":
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = [x.a if isinstance(x, Pair) else x for x in args]
        second = [x.b if isinstance(x, Pair) else x for x in args]
        kwargs = kwargs or {}
        return Pair(func(*first, **kwargs), func(*second, **kwargs))


def test_a_planted_leak_is_found_to_the_byte(cpu: MemoryProbe) -> None:
    """1 MB and one byte are not 1 MB."""
    region = cpu.run(lambda: torch.zeros(2**20 + 1, dtype=torch.uint8))
    assert region.retained_bytes == region.net_bytes == region.peak_increase_bytes == 2**20 + 1
    assert (region.reserved_peak_bytes, region.one_time_bytes) == (None, None)


def test_clean_code_retains_nothing(cpu: MemoryProbe) -> None:
    """Forward, backward, optimizer step on a model of before: gradients and moments exist."""
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
    """It is collected before the end is read, and was in the peak."""
    region = cpu.run(lambda: [Cycle(100), None][1])
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, 400)


def test_garbage_of_before_is_not_in_the_start(cpu: MemoryProbe) -> None:
    """Else its death inside would be a negative net that no code of the region caused."""
    Cycle(1000)
    region = cpu.run(gc.collect)
    assert region.net_bytes == 0


def test_a_leak_is_not_hidden_by_old_tensors_freed(cpu: MemoryProbe) -> None:
    """The net change is zero; what was born and kept is not."""
    old = [torch.zeros(100)]
    kept: list[torch.Tensor] = []

    def swap() -> None:
        old.clear()
        kept.append(torch.zeros(100))

    region = cpu.run(swap)
    assert (region.net_bytes, region.retained_bytes) == (0, 400)


def test_a_graph_of_before_is_not_blamed_on_backward(cpu: MemoryProbe) -> None:
    """Backward touches what only C++ held; only the gradient is new."""
    x = torch.ones(100, requires_grad=True)
    loss = (x.exp().sin() * torch.arange(100)).sum()
    with cpu.measure() as region:
        loss.backward()
    assert region.retained_bytes == 400


def test_a_retained_graph_is_not_blamed_on_the_second_backward(cpu: MemoryProbe) -> None:
    """Saved tensors of before stay alive, and are of before."""
    x = torch.ones(100, requires_grad=True)
    loss = x.exp().sin().sum()
    loss.backward(retain_graph=True)
    with cpu.measure() as region:
        loss.backward(retain_graph=True)
    assert region.retained_bytes == 0


def test_a_graph_kept_inside_is_found_with_all_it_saved(cpu: MemoryProbe) -> None:
    """``losses.append(loss)``: a scalar, and what its graph needs for backward."""
    x = torch.ones(100, requires_grad=True)
    with cpu.measure() as region:
        loss = x.exp().sum()  # exp saves its result
    assert region.retained_bytes == 400 + 4
    del loss


def test_a_gradient_of_before_is_not_blamed(cpu: MemoryProbe) -> None:
    """It is found through its parameter, though no Python object may exist for it."""
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    with cpu.measure() as region:
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    assert len(norms) == 2
    assert (region.retained_bytes, region.net_bytes) == (0, 0)


def test_freeing_gradients_is_a_negative_net(cpu: MemoryProbe) -> None:
    """``zero_grad`` frees what was in the start level."""
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    with cpu.measure() as region:
        model.zero_grad()
    assert (region.retained_bytes, region.net_bytes) == (0, -440)


def test_wrapper_subclasses_weigh_their_parts(cpu: MemoryProbe) -> None:
    """Old ones nothing, new ones both tensors inside."""
    old = Pair(torch.zeros(10), torch.zeros(10))
    with cpu.measure() as region:
        new = old + 1
        view = old.view(2, 5)
    assert region.retained_bytes == 80
    del new, view


def test_a_tensor_that_answers_with_errors_is_no_obstacle(cpu: MemoryProbe) -> None:
    """One broken subclass anywhere in the process must not break, nor blind, the meter."""

    class Broken(Pair):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            raise KeyError("not yet")

    broken = Broken(torch.zeros(1), torch.zeros(1))
    assert cpu.run(lambda: torch.zeros(5)).retained_bytes == 20
    del broken


def test_an_interrupted_start_blinds_no_later_region(
    cpu: MemoryProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the walk: the next region must count, or it would pass with zeros."""

    def interrupt(*args: object, **kwargs: object) -> Iterator[None]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pytest_cka_memory.meters.ledger.dispatch.live_storages", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cpu.run(lambda: None)
    assert cpu.run(lambda: torch.zeros(5)).retained_bytes == 20


def test_a_function_mode_of_the_user_sees_only_the_users_calls(cpu: MemoryProbe) -> None:
    """To measure must not change what is measured."""
    calls: list[str] = []

    class Log(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Log(), cpu.measure() as region:
        kept = torch.zeros(5)
    assert calls == ["zeros"]
    assert region.retained_bytes == 20
    del kept


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_modules_of_before_are_not_blamed(cpu: MemoryProbe) -> None:
    """Their tensors live in C++ until asked for."""
    module = torch.jit.script(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)).eval())
    batch = torch.ones(2, 10)
    with cpu.measure() as region:
        module(batch)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)


def test_a_script_module_in_the_making_is_no_obstacle(cpu: MemoryProbe) -> None:
    """A collection, and with it our look at what lives, may come in the middle of it."""
    kind = torch.jit.RecursiveScriptModule
    in_the_making = kind.__new__(kind)
    region = cpu.run(lambda: torch.zeros(1))
    assert region.retained_bytes == 4
    del in_the_making


def test_a_look_within_vmap_is_no_obstacle(cpu: MemoryProbe) -> None:
    """Its tensors have no storage of their own."""
    levels = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        levels.append(cpu.snapshot().allocated_bytes)
        return x * 2

    rows = torch.ones(10, 10)
    with cpu.measure() as region:
        kept = torch.vmap(doubled)(rows)
    assert levels == [region.start_bytes]
    assert region.retained_bytes == kept.nbytes == 400


def test_frozen_objects_are_not_blamed(cpu: MemoryProbe) -> None:
    """``gc.freeze`` hides them from the walk at the start; allocations are still counted."""
    old = torch.zeros(100)
    gc.collect()
    gc.freeze()
    try:
        with cpu.measure() as region:
            new = old + 1
            old.add_(1)
    finally:
        gc.unfreeze()
    assert region.retained_bytes == 400
    del new


def test_fake_tensors_have_no_bytes(cpu: MemoryProbe) -> None:
    """Shapes are computed with no memory behind them."""
    with cpu.measure() as region, FakeTensorMode():
        fake = nn.Linear(1000, 1000)(torch.zeros(64, 1000))
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, 0)
    del fake


def test_a_dead_weak_proxy_is_no_obstacle(cpu: MemoryProbe) -> None:
    """``isinstance`` on it raises ReferenceError; the walk asks for types only."""
    target = Cycle(1)
    proxy = weakref.proxy(target)
    del target
    gc.collect()
    region = cpu.run(lambda: torch.zeros(1))
    assert region.retained_bytes == 4
    del proxy


def test_a_region_under_another_mode_leaves_the_stack_balanced(cpu: MemoryProbe) -> None:
    """Modes of the user stay in their order, before, inside and after."""

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    depth = torch._C._len_torch_dispatch_stack()
    with Counting():
        with cpu.measure() as region:
            kept = torch.zeros(10)
            with Counting():
                kept2 = torch.zeros(10)
        assert torch._C._len_torch_dispatch_stack() == depth + 1
        Counting.calls = 0
        torch.zeros(1)
        assert Counting.calls > 0
    assert torch._C._len_torch_dispatch_stack() == depth
    assert region.retained_bytes == 80
    del kept, kept2


def test_an_exception_leaves_the_stack_balanced(cpu: MemoryProbe) -> None:
    """As does an orderly end."""
    depth = torch._C._len_torch_dispatch_stack()
    with pytest.raises(RuntimeError, match="must match"), cpu.measure():
        _ = torch.zeros(2) + torch.zeros(3)
    assert torch._C._len_torch_dispatch_stack() == depth


def test_torchs_functions_are_as_before_after_a_region(cpu: MemoryProbe) -> None:
    """Nothing stays patched."""
    before = (torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage))
    with cpu.measure():
        pass
    assert (torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage)) == before


def test_a_patch_of_the_user_on_resize_survives(
    cpu: MemoryProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back as it was found, not as torch made it."""
    plain = torch.UntypedStorage.resize_

    def mine(storage: torch.UntypedStorage, size: int) -> Any:
        return plain(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", mine)
    with cpu.measure() as region:
        storage = torch.UntypedStorage(1).resize_(9)
    assert torch.UntypedStorage.resize_ is mine
    assert region.retained_bytes == 9
    del storage


def test_nested_regions_have_their_own_figures(cpu: MemoryProbe) -> None:
    """Retained counts from each entry; the outer peak survives the inner reset."""
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


def test_a_region_does_not_keep_what_it_measured(cpu: MemoryProbe) -> None:
    """Neither does its record, its probe or its meter."""
    with cpu.measure() as region:
        tensor = torch.zeros(10)
        region.batch_done()
    reference = weakref.ref(tensor)
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert reference() is None
    assert storage() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_clean_loop_over_a_loader_is_flat(cpu: MemoryProbe, workers: int) -> None:
    """Batches come and go; the short last one is not judged."""
    loader = DataLoader(TensorDataset(torch.ones(37, 3)), batch_size=4, num_workers=workers)
    total = 0.0
    with cpu.measure() as region:
        for (batch,) in region.batches(loader):
            total += float(batch.sum())
            del batch
    assert total == 111.0
    assert [sample.size for sample in region.timeline] == [4] * 9 + [1]
    assert (region.growth_bytes_per_batch, region.retained_bytes) == (0.0, 0)


def test_a_kept_batch_is_growth_though_no_operator_touched_it(cpu: MemoryProbe) -> None:
    """Buffers become tensors without an operator."""
    kept = []
    with cpu.measure() as region:
        for _ in range(5):
            kept.append(torch.frombuffer(bytearray(48), dtype=torch.uint8))
            region.batch_done()
    assert region.growth_bytes_per_batch == 48.0
    assert region.retained_bytes == region.peak_increase_bytes == 5 * 48


def test_batches_kept_from_worker_processes_are_retained(cpu: MemoryProbe) -> None:
    """Those untouched by any operator too; the peak is never below the end."""
    loader = DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4, num_workers=2)
    kept = []
    with cpu.measure() as region:
        for (batch,) in region.batches(loader):
            kept.append(batch)
            del batch
    assert region.retained_bytes == region.peak_increase_bytes == 480


def test_a_leak_of_4_bytes_a_batch_is_reported_as_4(cpu: MemoryProbe) -> None:
    """``losses.append(loss.detach())``, in a loop that also alternates."""
    losses: list[torch.Tensor] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(9):
            yield torch.ones(8, 100)

    with cpu.measure() as region:
        for _, batch in enumerate(region.batches(batches())):
            losses.append(batch.sum())
    assert region.growth_bytes_per_batch == 4.0


def test_the_notebooks_function_runs_outside_pytest() -> None:
    """(result, peak_mb, retained_mb): the result is alive, and so retained."""
    result, peak_mb, retained_mb = measure_memory_retention(lambda: torch.zeros(2**18), "cpu")
    assert result.shape == (2**18,)
    assert retained_mb == 1.0
    assert peak_mb >= 1.0


def test_a_warm_up_takes_the_first_allocation(cpu: MemoryProbe) -> None:
    """A cache on the function is one-time."""
    cache: list[torch.Tensor] = []

    def func() -> None:
        if not cache:
            cache.append(torch.zeros(100))

    region = cpu.run(func, warmup=1)
    assert (region.retained_bytes, region.one_time_bytes) == (0, 400)


def test_a_machine_that_tells_no_model_is_named_by_what_python_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only Linux has /proc/cpuinfo, and not everywhere."""

    def no_such_file(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_such_file)
    known = (platform.processor(), platform.machine(), "cpu")
    assert CpuMeter().device_name in filter(None, known)
