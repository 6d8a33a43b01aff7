"""Faulty tests: errors, skips, forks, and a garbage collector that is turned off."""

import gc
import multiprocessing
import os

import pytest
import torch
from faulty_base import LONGEST_WAIT_SECONDS, Fault, _clear_kept, keep

from pytest_cka_memory import MemoryProbe

__all__ = ["_clear_kept"]  # a fixture

TOO_LARGE = 2**62


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
