"""Threads that allocate, that open regions, and that have nothing to do with torch."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.cpu import BlockMeter

MB_4 = 4 * 2**20
REGIONS = 100
LONGEST_WAIT_SECONDS = 60


def test_an_executor_that_is_older_than_the_region_is_counted(probe: MemoryProbe) -> None:
    """The threads of an executor count in a region, also if they were started before it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        region = probe.run(lambda: pool.submit(lambda: float(torch.ones(2**20).sum())).result())
    assert region.result == 2**20
    assert region.peak_increase_bytes >= MB_4
    assert region.retained_bytes == 0


def test_threads_of_asyncio_are_counted(probe: MemoryProbe) -> None:
    """The threads of asyncio count in a region, also if one of them is older than it."""

    async def main() -> float:
        await asyncio.to_thread(int)
        with probe.measure() as region:
            found: float = await asyncio.to_thread(lambda: float(torch.ones(2**20).sum()))
        assert region.peak_increase_bytes >= MB_4
        assert region.retained_bytes == 0
        return found

    assert asyncio.run(main()) == 2**20


@contextmanager
def running(*works: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Repeat each function in a thread; yield the list of the errors that end them."""
    end, errors = threading.Event(), list[BaseException]()

    def repeat(work: Callable[[], None]) -> None:
        try:
            while not end.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        end.set()
        for thread in threads:
            thread.join()


def build_tuples() -> None:
    """Code that walks all objects sees tuples half built, which breaks ``tuple(generator)``."""
    for _ in range(100):
        assert len(tuple(number for number in range(50))) == 50


def allocate() -> None:
    assert float((torch.ones(100) + 1).sum()) == 200.0


def test_regions_of_two_threads_disturb_neither_each_other_nor_anything_else(
    meter: BlockMeter, open_regions: Callable[[], int]
) -> None:
    """Regions of two threads keep their own peaks: each has its thread's temporary, and its leak is
    retained. Other threads only add to both.
    """
    functions = torch.from_numpy, torch.UntypedStorage.resize_
    counts = [0, 0]
    level = MemoryProbe(meter=meter).snapshot().allocated_bytes

    def measure(number: int, size: int) -> None:
        with MemoryProbe(meter=meter).measure() as region:
            torch.UntypedStorage(10 * size)
            kept = torch.UntypedStorage(size)
        # Not above its start level, which may include what another thread has freed since.
        assert region.peak_bytes - level >= 10 * size
        assert size <= region.retained_bytes < 10**8  # the other threads' blocks too
        counts[number] += 1
        del kept

    works = [lambda: measure(0, 10**5), lambda: measure(1, 10**6), build_tuples, allocate]
    end = time.monotonic() + LONGEST_WAIT_SECONDS
    with running(*works) as errors:
        while min(counts) < REGIONS and not errors and time.monotonic() < end:
            time.sleep(0.001)
    assert errors == []
    assert min(counts) >= REGIONS
    assert open_regions() == 0
    assert (torch.from_numpy, torch.UntypedStorage.resize_) == functions
    assert MemoryProbe(meter=meter).snapshot().allocated_bytes == level


def test_blocks_of_many_threads_are_counted_to_the_byte(probe: MemoryProbe) -> None:
    """If many threads allocate and free each other's blocks, every byte is counted exactly once."""
    kept: list[torch.UntypedStorage] = []

    def work() -> None:
        for size in range(1, 500):
            kept.append(torch.UntypedStorage(size))
            if size % 2:
                kept.pop()

    with probe.measure() as region:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert region.retained_bytes == region.net_bytes == sum(map(len, kept))
    assert region.retained_bytes > 0
