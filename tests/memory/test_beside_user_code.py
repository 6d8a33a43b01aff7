"""CPU meters beside subclasses, modes, script modules and patches: neither disturbs the other."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.storage_meter import StorageMeter


class Pair(torch.Tensor):
    """A wrapper subclass with two inner tensors and no storage of its own."""

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


def test_wrapper_subclass_counts_its_inner_tensors(cpu: MemoryProbe) -> None:
    """A new wrapper subclass adds the bytes of its inner
    tensors; a view of an old one adds none.
    """
    old = Pair(torch.zeros(10), torch.zeros(10))
    with cpu.measure() as region:
        new = old + 1
        view = old.view(2, 5)
    assert region.retained_bytes == 80
    del new, view


def test_tensor_subclass_that_raises_errors_does_not_break_the_meter(cpu: MemoryProbe) -> None:
    """A tensor subclass that raises errors must not stop the meter from counting other tensors."""

    class Broken(Pair):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            raise KeyError("not yet")

    broken = Broken(torch.zeros(1), torch.zeros(1))
    assert cpu.run(lambda: torch.zeros(5)).retained_bytes == 20
    del broken


def test_region_after_an_interrupted_start_of_the_ledger_still_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-C during the search for live storages, the next region must not report zeros."""
    cpu = MemoryProbe(meter=StorageMeter())

    def interrupt(*args: object, **kwargs: object) -> Iterator[None]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pytest_cka_memory.meters.storage_meter.live_storages", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cpu.run(lambda: None)
    assert cpu.run(lambda: torch.zeros(5)).retained_bytes == 20


def test_function_mode_of_the_user_sees_only_the_calls_of_the_user(cpu: MemoryProbe) -> None:
    """A user's function mode sees the user's calls only, and none of the meter's own."""
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
def test_earlier_script_modules_are_not_counted(cpu: MemoryProbe) -> None:
    """The tensors of an earlier script module are not new, although
    they get Python objects later.
    """
    module = torch.jit.script(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)).eval())
    batch = torch.ones(2, 10)
    with cpu.measure() as region:
        module(batch)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)


def test_unfinished_script_module_does_not_break_the_meter(cpu: MemoryProbe) -> None:
    """A search for live storages may run during the construction of a script module."""
    kind = torch.jit.RecursiveScriptModule
    unfinished = kind.__new__(kind)
    region = cpu.run(lambda: torch.zeros(1))
    assert region.retained_bytes == 4
    del unfinished


def test_snapshot_inside_vmap_works(cpu: MemoryProbe) -> None:
    """A snapshot can be taken inside vmap, where tensors have no storage of their own."""
    levels = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        levels.append(cpu.snapshot().allocated_bytes)
        return x * 2

    rows = torch.ones(10, 10)
    with cpu.measure() as region:
        kept = torch.vmap(doubled)(rows)
    assert levels == [region.start_bytes]
    assert region.retained_bytes == kept.nbytes == 400


def test_fake_tensors_have_no_bytes(cpu: MemoryProbe) -> None:
    """Fake tensors have shapes but no memory; only their first use allocates something."""
    with FakeTensorMode():
        nn.Linear(1000, 1000)(torch.zeros(64, 1000))
    with cpu.measure() as region, FakeTensorMode():
        fake = nn.Linear(1000, 1000)(torch.zeros(64, 1000))
    assert (region.retained_bytes, region.peak_increase_bytes) == (0, 0)
    del fake


def test_dead_weak_proxy_does_not_break_the_meter(cpu: MemoryProbe) -> None:
    """The search tells a dead weak proxy by ``type``, because ``isinstance`` raises on it."""
    target = nn.Linear(1, 1)
    proxy = weakref.proxy(target)
    del target
    gc.collect()
    region = cpu.run(lambda: torch.zeros(1))
    assert region.retained_bytes == 4
    del proxy


def test_region_inside_a_dispatch_mode_leaves_the_mode_stack_unchanged(cpu: MemoryProbe) -> None:
    """The user's modes keep their order before, inside and after a region."""

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


def test_exception_in_a_region_leaves_the_mode_stack_unchanged(cpu: MemoryProbe) -> None:
    """If an exception leaves a region, its dispatch mode is removed from the stack of modes."""
    depth = torch._C._len_torch_dispatch_stack()
    with pytest.raises(RuntimeError, match="must match"), cpu.measure():
        _ = torch.zeros(2) + torch.zeros(3)
    assert torch._C._len_torch_dispatch_stack() == depth


def test_region_restores_the_functions_of_torch(cpu: MemoryProbe) -> None:
    """A region restores the functions of torch that it has patched."""
    before = (torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage))
    with cpu.measure():
        pass
    assert (torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage)) == before


def test_region_keeps_a_patch_of_the_user_on_resize(
    cpu: MemoryProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that patches ``resize_`` restores the user's function, not torch's."""
    plain = torch.UntypedStorage.resize_

    def mine(storage: torch.UntypedStorage, size: int) -> Any:
        return plain(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", mine)
    with cpu.measure() as region:
        storage = torch.UntypedStorage(1).resize_(9)
    assert torch.UntypedStorage.resize_ is mine
    assert region.retained_bytes == 9
    del storage
