"""Faulty tests with tasks, threads, odd stacks and signals, or odd folders and names."""

import asyncio
import faulthandler
import os
import shutil
import signal
import sys
import threading
import warnings

import pytest
import torch
from faulty_base import KEPT, LONGEST_WAIT_SECONDS, Fault, _clear_kept, keep

from pytest_cka_memory import MemoryProbe

__all__ = ["_clear_kept"]  # a fixture


def compute_forever() -> None:
    while True:
        torch.zeros(10)


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
