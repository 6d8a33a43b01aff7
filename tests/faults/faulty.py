"""Faulty tests, each followed by two ordinary tests; ``test_faults.py`` runs them in one session.

The first ordinary test keeps 100 bytes and the second keeps nothing. They must get these figures
after any fault.
"""

import asyncio
import faulthandler
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pytest_cka_memory import MemoryProbe

KEPT: list[object] = []
TOO_LARGE = 2**62
LONGEST_WAIT_SECONDS = 60


def keep(bytes_: int = 100) -> None:
    KEPT.append(torch.zeros(bytes_, dtype=torch.uint8))


@pytest.fixture(autouse=True)
def _clear_kept() -> Iterator[None]:
    yield
    KEPT.clear()


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _broken(*args: object, **kwargs: object) -> None:
    raise AssertionError("the plugin called what a test had patched")


def _wrapped(function: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: function(*args)


def compute_forever() -> None:
    while True:
        torch.zeros(10)


class Fault:
    """Base class that adds the two ordinary tests at the end of a class."""

    def __init_subclass__(cls) -> None:
        cls.test_keeps_after = _keeps  # type: ignore[attr-defined]
        cls.test_frees_after = _frees  # type: ignore[attr-defined]


def _keeps(self: Fault) -> None:
    keep(100)


@pytest.mark.zero_retention
def _frees(self: Fault) -> None:
    torch.zeros(40, dtype=torch.uint8)


class TestOutOfMemory(Fault):
    def test_it(self) -> None:
        held = torch.zeros(4000, dtype=torch.uint8)
        torch.empty(TOO_LARGE, dtype=torch.uint8)
        del held


class TestOutOfMemoryCaught(Fault):
    def test_it(self) -> None:
        held = torch.zeros(4000, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(TOO_LARGE, dtype=torch.uint8)
        del held
        keep()


class TestOutOfMemoryInBackward(Fault):
    def test_it(self) -> None:
        weight = torch.ones(10, requires_grad=True)
        weight.register_hook(lambda gradient: torch.empty(TOO_LARGE, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            (weight * 2).sum().backward()
        del weight
        keep()


class TestExceptionInNestedRegions(Fault):
    def test_it(self, cka_memory: MemoryProbe) -> None:
        with cka_memory.measure("outer"), cka_memory.measure("inner"):
            keep()
            raise ValueError("inside")


class TestSkippedHalfWay(Fault):
    def test_it(self, cka_memory: MemoryProbe) -> None:
        with cka_memory.measure():
            keep()
            pytest.skip("half way")


class TestExpectedToFail(Fault):
    @pytest.mark.xfail(strict=True)
    def test_it(self, cka_memory: MemoryProbe) -> None:
        with cka_memory.measure():
            keep()
            raise ValueError("as expected")


class TestForks(Fault):
    def test_it(self) -> None:
        before = torch.zeros(1000, dtype=torch.uint8)
        child = os.fork()
        if child == 0:
            with MemoryProbe("cpu").measure() as region:
                keep(5000)
            os._exit(0 if region.retained_bytes == 5000 else 1)
        assert os.waitpid(child, 0)[1] == 0
        del before
        keep()


def _sum_in_child(results: "multiprocessing.Queue[float]") -> None:
    keep(5000)
    results.put(float(torch.ones(1000).sum()))


class TestForksByMultiprocessing(Fault):
    def test_it(self) -> None:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_sum_in_child, args=(results,))
        child.start()
        assert results.get(timeout=LONGEST_WAIT_SECONDS) == 1000.0
        child.join()
        assert child.exitcode == 0
        keep()


class TestCollectorDisabled(Fault):
    @classmethod
    def teardown_class(cls) -> None:
        gc.enable()

    def test_it(self) -> None:
        gc.disable()
        cycle: list[object] = [torch.zeros(4000, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        keep()

    def test_it_stays_disabled(self) -> None:
        assert not gc.isenabled()


class TestObjectsFrozen(Fault):
    @classmethod
    def teardown_class(cls) -> None:
        gc.unfreeze()

    def test_it(self) -> None:
        keep()
        gc.freeze()


class TestTorchPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = torch.zeros
        for name in ("empty", "zeros", "ones", "tensor", "is_tensor", "typename"):
            monkeypatch.setattr(torch, name, _broken)
        for name in ("__add__", "__eq__", "numel", "element_size", "untyped_storage", "size"):
            monkeypatch.setattr(torch.Tensor, name, _broken)
        KEPT.append(plain(100, dtype=torch.uint8))


class TestDispatchPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TorchDispatchMode", "is_traceable_wrapper_subclass", "_push_mode"):
            monkeypatch.setattr(torch.utils._python_dispatch, name, _broken)
        keep()


class TestThreadsPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: plain(thread))
        in_thread(keep)

    def test_a_thread_after(self) -> None:
        in_thread(keep)

    def test_another_thread_after(self) -> None:
        in_thread(keep)


class TestResizingPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = torch.UntypedStorage.resize_
        patched = lambda storage, size: plain(storage, size)  # noqa: E731
        monkeypatch.setattr(torch.UntypedStorage, "resize_", patched)
        torch.UntypedStorage(0).resize_(10)
        keep()

    def test_a_resize_after(self) -> None:
        keep(50)
        KEPT[0].untyped_storage().resize_(100)  # type: ignore[attr-defined]


class TestCollectorPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gc, "collect", lambda *_: 0)
        cycle: list[object] = [torch.zeros(4000, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        keep()


class TestCollectorCallbacksCleared(Fault):
    def test_it(self) -> None:
        gc.callbacks.clear()
        keep()


class TestPythonPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.open", _broken)
        monkeypatch.setattr("builtins.isinstance", _wrapped(isinstance))
        monkeypatch.setattr(os, "environ", {})
        keep()


class TestModulesForgotten(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "pytest_cka_memory":
                monkeypatch.delitem(sys.modules, name)
        keep()


class TestTorchHidden(Fault):
    """Tests do this to check what happens if torch is not installed."""

    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError):
            importlib.import_module("torch")
        keep()


class TestModeLeftOn(Fault):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    mode = Mode()

    @classmethod
    def teardown_class(cls) -> None:
        cls.mode.__exit__(None, None, None)

    def test_it(self) -> None:
        self.mode.__enter__()
        keep()

    def test_it_stays_on(self) -> None:
        assert _get_current_dispatch_mode_stack()[0] is self.mode


class TestDefaultsChanged(Fault):
    @classmethod
    def teardown_class(cls) -> None:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)

    def test_it(self) -> None:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        keep()


class TestCachesEmptied(Fault):
    def test_it(self) -> None:
        torch.cuda.empty_cache()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces() if torch.cuda.is_available() else None
        keep()


class TestOverlap(Fault):
    def test_it(self, cka_memory: MemoryProbe) -> None:
        first, second = cka_memory.measure("first"), cka_memory.measure("second")
        first.__enter__()
        keep(1)
        second.__enter__()
        keep(10)
        first.__exit__(None, None, None)
        keep(100)
        second.__exit__(None, None, None)
        keep(1000)


class TestTasksInterleaved(Fault):
    def test_it(self, cka_memory: MemoryProbe) -> None:
        async def work(label: str, steps: int, bytes_: int) -> None:
            with cka_memory.measure(label):
                for _ in range(steps):
                    await asyncio.sleep(0)
                    keep(bytes_)

        async def both() -> None:
            await asyncio.gather(work("short", 1, 1), work("long", 3, 10))

        asyncio.run(both())


class TestTaskCancelled(Fault):
    def test_it(self, cka_memory: MemoryProbe) -> None:
        async def waits() -> None:
            with cka_memory.measure("cancelled"):
                keep(10)
                await asyncio.sleep(LONGEST_WAIT_SECONDS)

        async def cancels() -> None:
            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with cka_memory.measure("around"):
            asyncio.run(cancels())


class TestThreadOutlives(Fault):
    """A tensor that the thread allocates during a later test is counted in that test."""

    go, done = threading.Event(), threading.Event()

    def lives_on(self) -> None:
        self.go.wait(LONGEST_WAIT_SECONDS)
        KEPT.append(torch.ones(7, dtype=torch.uint8))
        self.done.set()

    def test_it(self) -> None:
        threading.Thread(target=self.lives_on, daemon=True).start()
        keep()

    @pytest.mark.max_retained_mb("106 B")
    def test_a_later_one(self) -> None:
        self.go.set()
        assert self.done.wait(LONGEST_WAIT_SECONDS)
        keep()


class TestRecursionLimitLow(Fault):
    def test_it(self) -> None:
        frame, depth = sys._getframe(), 0
        while frame is not None:
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 40)
        try:
            keep()
        finally:
            sys.setrecursionlimit(limit)


class TestRecursionTooDeep(Fault):
    def test_it(self) -> None:
        def deeper() -> None:
            torch.zeros(1)
            deeper()

        with pytest.raises(RecursionError):
            deeper()
        keep()


class TestWarningsAreErrors(Fault):
    @pytest.mark.filterwarnings("error")
    def test_it(self) -> None:
        warnings.simplefilter("error")
        keep()


class TestFaulthandler(Fault):
    def test_it(self) -> None:
        was_enabled = faulthandler.is_enabled()
        faulthandler.enable()
        faulthandler.dump_traceback_later(10 * LONGEST_WAIT_SECONDS)
        keep()
        faulthandler.cancel_dump_traceback_later()
        if not was_enabled:
            faulthandler.disable()


class TestTraced(Fault):
    def test_it(self) -> None:
        tracer, profiler = sys.gettrace(), sys.getprofile()
        sys.settrace(lambda *_: None)
        sys.setprofile(lambda *_: None)
        keep()
        sys.settrace(tracer)
        sys.setprofile(profiler)


class TestInterruptedByAnAlarm(Fault):
    def test_it(self) -> None:
        def interrupt(*_: object) -> None:
            raise TimeoutError

        def compute_until_alarm() -> (
            None
        ):  # set here because a busy machine may reach this line late
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            compute_forever()

        before = signal.signal(signal.SIGALRM, interrupt)
        with pytest.raises(TimeoutError):
            compute_until_alarm()
        signal.signal(signal.SIGALRM, before)
        keep()


class TestFolderChanged(Fault):
    def test_it(self, tmp_path: "os.PathLike[str]") -> None:
        os.chdir(tmp_path)
        keep()


class TestFolderDeleted(Fault):
    def test_it(self, tmp_path: "os.PathLike[str]") -> None:
        os.chdir(tmp_path)
        shutil.rmtree(tmp_path)
        keep()


class TestNamedOddly(Fault):
    @pytest.mark.parametrize("name", ["ü", "日本", "\ud800", "a\x00b", "<b>&'\""])
    def test_it(self, name: str) -> None:
        keep()
