"""Threads started in a region are counted, whatever class starts them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter


class Overriding(threading.Thread):
    """Does its work in ``run``, as half the world's threads do."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work

    def run(self) -> None:
        self.work()


class Starting(Overriding):
    """Overrides ``start`` too."""

    def start(self) -> None:
        super().start()


def in_thread(kind: Callable[[Callable[[], object]], threading.Thread]) -> torch.Tensor:
    """A tensor born in a thread of that kind."""
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
def test_a_thread_started_inside_is_counted(
    born: Callable[[Callable[[], object]], int],
    kind: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    """The mode of the region's own thread does not reach others by itself."""
    assert born(lambda: in_thread(kind)) == 400


def test_a_thread_started_by_a_thread_is_counted(
    born: Callable[[Callable[[], object]], int],
) -> None:
    """At any depth."""

    def outer() -> torch.Tensor:
        found: list[torch.Tensor] = []
        plain = threading.Thread(target=lambda: found.append(in_thread(Overriding)))
        plain.start()
        plain.join()
        return found[0]

    assert born(outer) == 400


def test_a_pool_made_inside_is_counted(born: Callable[[Callable[[], object]], int]) -> None:
    """Its temporaries, its results, nothing else."""

    def pooled() -> list[torch.Tensor]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(torch.zeros, [10, 20, 30]))

    assert born(pooled) == 240


def test_the_peak_of_a_thread_is_counted(counting: Meter) -> None:
    """What lived and died in it was there."""
    counting.reset_peak()
    before = counting.read().allocated_bytes
    in_thread(Overriding)
    assert counting.read().peak_bytes - before == 400


def test_a_failing_thread_leaves_no_mode_behind(counting: Meter) -> None:
    """Its error goes where thread errors go."""
    depths: list[int] = []

    def work() -> None:
        depths.append(torch._C._len_torch_dispatch_stack())
        raise ValueError("no")

    caught: list[object] = []
    hook, threading.excepthook = threading.excepthook, lambda args: caught.append(args.exc_value)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = hook
    assert depths == [1]
    assert [repr(error) for error in caught] == ["ValueError('no')"]


def test_a_finished_thread_is_freed(counting: Meter) -> None:
    """The wrapper round ``run`` must not tie the thread to itself."""
    import weakref

    thread = Overriding(lambda: None)
    thread.start()
    thread.join()
    reference = weakref.ref(thread)
    del thread
    assert reference() is None


def test_a_thread_that_outlives_its_region_disturbs_nothing() -> None:
    """It goes on unseen, and is seen again in the next region."""
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

    probe = MemoryProbe("cpu")
    plain = threading.Thread.start
    with probe.measure() as first:
        thread = threading.Thread(target=work)
        thread.start()
        step()
    assert threading.Thread.start is plain
    step()
    with probe.measure() as second:
        step()
    go.set()
    thread.join()
    assert [region.retained_bytes for region in (first, second)] == [400, 400]
    assert second.start_bytes - first.end_bytes == 400


def test_a_thread_of_before_is_found_at_the_end() -> None:
    """No operator of its is seen; the walk over objects finds what it kept."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the worker exists
        region = MemoryProbe("cpu").run(lambda: pool.submit(torch.zeros, 100).result())
    assert region.retained_bytes == 400


def test_regions_of_two_threads_may_overlap() -> None:
    """Each thread leaves its own stack of modes as it was, whichever region ends first."""
    probe = MemoryProbe("cpu")
    opened, over = threading.Event(), threading.Event()
    figures: list[int] = []

    def work() -> None:
        with probe.measure("thread") as region:
            opened.set()
            assert over.wait(60)
            kept = torch.zeros(10)
        figures.append(region.retained_bytes)
        figures.append(torch._C._len_torch_dispatch_stack())
        del kept

    depth = torch._C._len_torch_dispatch_stack()
    with probe.measure("main"):
        thread = threading.Thread(target=work)
        thread.start()
        assert opened.wait(60)
    assert torch._C._len_torch_dispatch_stack() == depth
    over.set()
    thread.join()
    # The mode that the first region gave to its thread is still there, and goes with it.
    assert figures == [40, 1]
    assert probe.run(torch.zeros, 5).retained_bytes == 20
