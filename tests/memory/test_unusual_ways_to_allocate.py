"""Code that allocates in unusual places is counted to the byte, by either meter."""

import _thread
import asyncio
import contextvars
import gc
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter

SIZE = 2**16
BYTES = 4 * SIZE
KEPT: list[Any] = []
VALUES = torch.ones(SIZE)
OLDER_POOL = ThreadPool(1)
OLDER_POOL.apply(int)
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=None)


@pytest.fixture(autouse=True, scope="module")
def _old_values(imports_excluded_from_search: None) -> None:
    global VALUES
    VALUES = torch.ones(SIZE)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    KEPT.clear()
    VARIABLE.set(None)


def make() -> torch.Tensor:
    return torch.ones(SIZE)


def keep() -> None:
    KEPT.append(make())


def in_a_thread_of_the_lowest_level() -> None:
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(lambda: (keep(), done.release()), ())
    done.acquire()


def generate() -> Iterator[None]:
    kept = make()
    yield
    del kept
    yield


def in_a_suspended_generator() -> None:
    KEPT.append(generate())
    next(KEPT[0])


def in_a_signal_handler() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: keep())
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while not KEPT:
        time.sleep(0.001)
    signal.signal(signal.SIGALRM, before)


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def in_a_finalizer() -> None:
    weakref.finalize(Cycle(), keep)
    gc.collect()


def in_traced_code() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    keep()
    sys.settrace(before)


def in_a_task_of_torchscript() -> None:
    KEPT.append(torch.jit.wait(torch.jit.fork(lambda values: values * 2, VALUES)))


def in_a_future() -> None:
    KEPT.append(torch.futures.Future())
    KEPT[0].set_result(make())


def in_a_storage_that_shrinks() -> None:
    values = torch.ones(2 * SIZE)
    values.untyped_storage().resize_(BYTES)
    KEPT.append(values)


def with_forward_mode() -> None:
    KEPT.append(torch.func.jvp(lambda values: values * 2, (VALUES,), (VALUES,))[1])


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: OLDER_POOL.apply(keep),
        in_a_thread_of_the_lowest_level,
        in_a_suspended_generator,
        pytest.param(
            in_a_signal_handler,
            marks=pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="requires SIGALRM"),
        ),
        in_a_finalizer,
        in_traced_code,
        in_a_task_of_torchscript,
        in_a_future,
        in_a_storage_that_shrinks,
        with_forward_mode,
        lambda: VARIABLE.set(make()),
        lambda: KEPT.append(torch.func.grad(lambda values: (values * values).sum())(VALUES)),
        lambda: KEPT.append(torch.func.vmap(lambda row: row * 2)(VALUES.view(-1, 4))),
    ],
    ids=[
        *("older-pool", "_thread", "generator", "signal", "finalizer", "trace-function", "fork"),
        *("future", "shrunk-storage", "jvp", "context-variable", "func-grad", "func-vmap"),
    ],
)
def test_what_is_kept_is_retained_to_the_byte(
    cpu: MemoryProbe, allocate: Callable[[], object]
) -> None:
    """However memory was allocated, what is kept is retained to the byte, and not again later."""
    with cpu.measure() as region:
        allocate()
    with cpu.measure() as later:
        pass
    assert region.retained_bytes == BYTES
    assert region.peak_increase_bytes >= BYTES
    assert (later.retained_bytes, later.peak_increase_bytes) == (0, 0)


def by_executor() -> Iterator[Callable[..., object]]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result()


def by_executor_map() -> Iterator[Callable[..., object]]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: list(pool.map(lambda _: work(), [0]))


def by_to_thread() -> Iterator[Callable[..., object]]:
    loop = asyncio.new_event_loop()
    yield lambda work: loop.run_until_complete(asyncio.to_thread(work))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def by_thread_pool() -> Iterator[Callable[..., object]]:
    with ThreadPool(1) as pool:
        yield pool.apply


def by_thread_pool_map() -> Iterator[Callable[..., object]]:
    with ThreadPool(1) as pool:
        yield lambda work: pool.map(func=lambda _: work(), iterable=[0])


def by_lazy_thread_pool() -> Iterator[Callable[..., object]]:
    with ThreadPool(1) as pool:
        yield lambda work: next(pool.imap(lambda _: work(), [0]))


@pytest.mark.parametrize(
    "pools",
    [
        by_executor,
        by_executor_map,
        by_to_thread,
        by_thread_pool,
        by_thread_pool_map,
        by_lazy_thread_pool,
    ],
)
def test_function_given_to_an_older_thread_pool_is_in_the_peak(
    native_meter: Meter, pools: Callable[[], Iterator[Callable[..., object]]]
) -> None:
    """A function in an older thread pool counts in the peak of the native meter."""
    cpu = MemoryProbe(meter=native_meter)
    for run in pools():
        run(int)  # the thread exists
        with cpu.measure() as region:
            run(lambda: make()[:1].sum().item())  # one element: several would use threads
    assert BYTES <= region.peak_increase_bytes <= BYTES + 8
    assert region.retained_bytes == 0


def test_older_thread_is_in_the_peak_or_the_notes_say_that_it_is_not(
    cpu: MemoryProbe, is_native: bool
) -> None:
    """Storages allocated in older threads are in the peak, or the notes say that they are not."""
    work, done = queue.SimpleQueue[Callable[[], object] | None](), threading.Event()

    def run() -> None:
        while (function := work.get()) is not None:
            function()
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    with cpu.measure() as region:
        work.put(lambda: make().sum().item())
        assert done.wait(60)
    work.put(None)
    thread.join()
    notes = [
        note for note in cpu.meter.facts()["notes"] if "memory that other threads allocate" in note
    ]
    if is_native:
        assert region.peak_increase_bytes >= BYTES
        assert notes == []
    else:
        assert region.peak_increase_bytes == 0
        assert len(notes) == 1


def test_finalizer_of_garbage_in_a_loop_is_in_the_peaks_of_samples(cpu: MemoryProbe) -> None:
    """Garbage may have a finalizer that allocates; the highest
    sample is still the region's peak.
    """
    ran = []

    class Allocating(Cycle):
        def __del__(self) -> None:
            ran.append(make().numel())

    with cpu.measure() as region:
        for _ in range(8):
            Allocating().values = torch.ones(10)  # type: ignore[attr-defined]
            gc.collect()
            region.batch_done(1)
        in_the_loop = len(ran)
    assert in_the_loop
    peak = max(sample.peak_bytes for sample in region.timeline) - region.start_bytes
    assert peak == region.peak_increase_bytes >= BYTES


def test_finalizer_that_runs_in_an_outer_region_is_in_its_peak(cpu: MemoryProbe) -> None:
    """A finalizer in an outer region counts in its peak, whether or not an inner one opens."""
    ran_at = []

    class Allocating(Cycle):
        def __del__(self) -> None:
            make()
            ran_at.append(is_open)

    is_open = True
    with cpu.measure() as outer:
        Allocating()
        KEPT.append(torch.ones(10))
        with cpu.measure():
            KEPT.append(torch.ones(10))
        gc.collect()
        with cpu.measure() as inner:
            pass
        is_open = False
    assert ran_at == [True]
    assert outer.peak_increase_bytes >= BYTES
    assert inner.peak_increase_bytes == 0
