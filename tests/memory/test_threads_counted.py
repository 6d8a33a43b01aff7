"""Threads that are started in a region are counted, whatever class starts them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.meters.storage_meter import StorageMeter


@pytest.fixture(scope="module")
def both_meters(native_meter: Meter) -> Meter:
    """The native meter alone: for the ledger, figures of other threads are lower bounds."""
    return native_meter


class Overriding(threading.Thread):
    """A thread that does its work in ``run``."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work

    def run(self) -> None:
        self.work()


class Starting(Overriding):
    """A thread that overrides ``start`` too."""

    def start(self) -> None:
        super().start()


def in_thread(kind: Callable[[Callable[[], object]], threading.Thread]) -> torch.Tensor:
    """Return a tensor that was allocated in a thread of the given kind."""
    found: list[torch.Tensor] = []
    thread = kind(lambda: found.append(torch.zeros(100)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda work: threading.Thread(target=work), id="target"),
        pytest.param(Overriding, id="run-overridden"),
        pytest.param(Starting, id="start-overridden"),
        pytest.param(lambda work: threading.Timer(0, work), id="timer"),
        pytest.param(lambda work: threading.Thread(target=work, daemon=True), id="daemon"),
    ],
)
def test_a_thread_started_in_a_region_is_counted(
    retained_by: Callable[[Callable[[], object]], int],
    kind: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    """A thread that a region has started is counted, whatever class starts it."""
    assert retained_by(lambda: in_thread(kind)) == 400


def test_a_thread_started_by_a_thread_is_counted(
    retained_by: Callable[[Callable[[], object]], int],
) -> None:
    """A thread that another thread starts is counted, at any depth of nesting."""

    def outer() -> torch.Tensor:
        found: list[torch.Tensor] = []
        plain = threading.Thread(target=lambda: found.append(in_thread(Overriding)))
        plain.start()
        plain.join()
        return found[0]

    assert retained_by(outer) == 400


def test_a_thread_pool_created_in_a_region_is_counted(
    retained_by: Callable[[Callable[[], object]], int],
) -> None:
    """A thread pool that is created in a region retains its results and nothing else."""

    def pooled() -> list[torch.Tensor]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(torch.zeros, [10, 20, 30]))

    assert retained_by(pooled) == 240


def test_a_temporary_in_a_thread_counts_in_the_peak(counting: Meter) -> None:
    """A temporary that a thread allocates and frees counts in the peak."""
    counting.reset_peak()
    before = counting.read().allocated_bytes
    in_thread(Overriding)
    assert counting.read().peak_bytes - before == 400


def test_a_thread_that_outlives_its_region_is_counted_in_the_next_one(cpu: MemoryProbe) -> None:
    """A thread that outlives its region counts in the next one, and not between them."""
    go, done = threading.Event(), threading.Event()
    kept: list[torch.Tensor] = []

    def work() -> None:
        while go.wait():
            go.clear()
            if len(kept) == 3:
                return
            kept.append(torch.zeros(100))
            done.set()

    def step() -> None:
        done.clear()
        go.set()
        assert done.wait(60)

    plain = threading.Thread.start
    with cpu.measure() as first:
        thread = threading.Thread(target=work)
        thread.start()
        step()
    assert threading.Thread.start is plain
    step()
    with cpu.measure() as second:
        step()
    go.set()
    thread.join()
    assert [region.retained_bytes for region in (first, second)] == [400, 400]
    assert second.start_bytes - first.end_bytes == 400


def test_a_thread_started_before_a_region_is_counted_at_its_end(cpu: MemoryProbe) -> None:
    """What a thread keeps counts, although the thread is older than the region."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the worker exists
        region = cpu.run(lambda: pool.submit(torch.zeros, 100).result())
    assert region.retained_bytes == 400


@pytest.fixture(params=["native", "ledger"])
def either(request: pytest.FixtureRequest) -> MemoryProbe:
    """A probe with each meter."""
    is_ledger = request.param == "ledger"
    return MemoryProbe(
        meter=StorageMeter() if is_ledger else request.getfixturevalue("native_meter")
    )


def test_regions_of_two_threads_may_overlap(either: MemoryProbe) -> None:
    """Regions of two threads may overlap, and each thread's mode stack is restored."""
    opened, over = threading.Event(), threading.Event()
    figures: list[int] = []

    def work() -> None:
        with either.measure("thread") as region:
            opened.set()
            assert over.wait(60)
            kept = torch.zeros(10)
        figures.append(region.retained_bytes)
        figures.append(torch._C._len_torch_dispatch_stack())
        del kept

    depth = torch._C._len_torch_dispatch_stack()
    with either.measure("main"):
        thread = threading.Thread(target=work)
        thread.start()
        assert opened.wait(60)
    assert torch._C._len_torch_dispatch_stack() == depth
    over.set()
    thread.join()
    assert figures == [40, 0]
    assert either.run(torch.zeros, 5).retained_bytes == 20
