"""Memory of processes: readings of the system, and growth that survives steps."""

import ctypes
import itertools
import multiprocessing
import os
import platform
import re
import sys
from dataclasses import replace
from itertools import accumulate, pairwise

import forked_processes
import pytest
from torch.utils.data import DataLoader

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.retention import ProcessSample, steady_growth
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.holders import growing
from pytest_cka_memory.measure.loaders_and_steps import fetched_ahead
from pytest_cka_memory.meters import readings, torch_private
from pytest_cka_memory.testing import ScriptedMeter

MB = 2**20


def samples(levels: list[float], stride: int = 1) -> list[ProcessSample]:
    numbers = range(stride, stride * len(levels) + 1, stride)
    return [ProcessSample(n, int(level)) for n, level in zip(numbers, levels, strict=True)]


LEAK = [100 * MB + n * MB for n in range(18)]
SERIES = {
    "flat": ([100 * MB] * 18, 0),
    "one step": ([100 * MB] * 9 + [164 * MB] * 9, 0),
    "two steps": ([100 * MB] * 6 + [164 * MB] * 6 + [228 * MB] * 6, 0),
    "falls": ([100 * MB - n for n in range(18)], 0),
    "saw": ([(100 + 8 * (n % 3)) * MB for n in range(18)], 0),
    "copied once": ([100 * MB + min(n, 8) * MB for n in range(34)], 0),
    "spikes": ([(100 + 500 * (n % 7 == 3)) * MB for n in range(34)], 0),
    "leak": (LEAK, MB),
    "leak in steps of four": ([100 * MB + n // 4 * 4 * MB for n in range(34)], MB),
    "leak with noise": ([level + (n % 2) * 1000 for n, level in enumerate(LEAK)], MB),
}
"""Levels at batch boundaries -> their growth per batch."""


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("stride", [1, 4])
def test_growth_is_what_all_parts_of_the_loop_have_in_common(name, stride):
    """Steps, saws and spikes are not growth; a leak is, also in steps and with noise."""
    levels, growth = SERIES[name]
    found = steady_growth(samples(levels, stride))
    assert found is not None
    assert found == pytest.approx(growth / stride, rel=0.01)


def test_growth_needs_eight_batches_after_the_warm_up():
    """Fewer batches have no growth; the warm-up is left out."""
    assert steady_growth(samples(LEAK[:9])) is None
    assert steady_growth(samples(LEAK[:10])) == MB
    assert steady_growth(samples(LEAK[:10]), warmup=3) is None
    assert steady_growth(samples([0, *accumulate([MB] * 9)]), warmup=0) == MB


def test_batches_that_workers_had_fetched_before_are_left_out():
    """At the end of a loop, and of each epoch of several, workers have nothing left to do."""
    growing = samples(LEAK[:12])
    flat = [ProcessSample(13 + n, growing[-1].bytes) for n in range(4)]
    assert steady_growth([*growing, *flat]) == 0
    assert steady_growth([*growing, *(replace(it, workers_done=True) for it in flat)]) == MB
    assert steady_growth([replace(it, workers_done=it.batch > 9) for it in growing]) is None


class Loader(list):
    """A loader with workers; what they keep grows until they have fetched all batches."""

    num_workers, prefetch_factor = 2, 2


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in tqdm"])
def test_growth_of_workers_is_that_of_the_batches_that_they_fetched(monkeypatch, wrapped, epochs):
    """A leak of 1 MB per batch in workers is seen in a loop of 14 batches, of which they fetch four
    ahead.
    """
    pytest.importorskip("psutil")
    tqdm = pytest.importorskip("tqdm").tqdm
    fetched = 0

    def read(self):
        return [readings.ProcessReading(1, "DataLoader worker 0", 100 * MB + fetched * MB)]

    monkeypatch.setattr(readings.ProcessTree, "read", read)
    with MemoryProbe(meter=ScriptedMeter(), also=["process"]).measure() as region:
        for epoch in range(epochs):
            loader = Loader(range(14))
            batches = region.batches(tqdm(loader, disable=True) if wrapped else loader)
            for number in batches:
                fetched = 14 * epoch + min(14, number + 5)
    growth = region.process_growth_bytes_per_batch
    assert growth == MB if epochs == 1 else 0.5 * MB < growth <= MB  # a part with a gap has less
    assert region.record.processes[0].growth_bytes_per_batch == growth
    done = [sample.batch for sample in region.record.process_timeline if sample.workers_done]
    assert done == [14 * epoch + number for epoch in range(epochs) for number in range(11, 15)]


@pytest.mark.parametrize("by_hand", [True, False], ids=["batch_done", "iterator"])
@pytest.mark.parametrize(("batches", "growth"), [(14, MB), (13, None)])
def test_without_a_loader_two_batches_for_each_worker_are_left_out(
    monkeypatch, batches, growth, by_hand
):
    """A loop by hand or over an iterator does not say how many batches its workers fetch ahead."""
    pytest.importorskip("psutil")
    fetched = 0

    def read(self):
        workers = [readings.ProcessReading(pid, f"DataLoader worker {pid}", MB) for pid in (1, 2)]
        return [readings.ProcessReading(0, "this process", 100 * MB + fetched * MB), *workers]

    monkeypatch.setattr(readings.ProcessTree, "read", read)
    with MemoryProbe(meter=ScriptedMeter(), also=["process"]).measure() as region:
        numbers = iter(range(batches))
        for number in numbers if by_hand else region.batches(numbers):
            fetched = min(batches, number + 5)
            if by_hand:
                region.batch_done()
    assert region.process_growth_bytes_per_batch == growth


class Computing(list):
    """A loader whose attributes the user's code computes."""

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        (DataLoader([1], num_workers=3), 6),
        (DataLoader([1], num_workers=2, prefetch_factor=5), 10),
        (DataLoader([1]), 0),
        (enumerate([1]), None),
        ([1], None),
        (Computing(), None),
    ],
    ids=["by default", "with a factor", "without workers", "enumerated", "list", "computed"],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_are_fetched_ahead_are_those_of_the_loader(loader, batches):
    """Two for each worker by default; None where nothing is known."""
    assert fetched_ahead(loader) == batches


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not know shared pages")
def test_pages_that_processes_share_count_once():
    """A forked child that shares 64 MB with its parent adds far less than that to the sum."""
    pytest.importorskip("psutil")
    kept = os.urandom(64 * MB)
    tree = readings.ProcessTree()
    before = sum(reading.bytes for reading in tree.read())
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.recv)
    child.start()
    try:
        during = tree.read()
    finally:
        ours.send(None)
        child.join()
    assert before > len(kept)
    assert child.pid in {reading.pid for reading in during}
    assert sum(reading.bytes for reading in during) - before < 32 * MB


def test_long_loops_take_a_bounded_number_of_samples(monkeypatch):
    """A loop of 1,000 batches has 128 samples at most, at equal distances."""
    pytest.importorskip("psutil")
    # A reading goes through all processes of this machine.
    reading = readings.ProcessReading(os.getpid(), "this process", 100 * MB)
    monkeypatch.setattr(readings.ProcessTree, "read", lambda self: [reading])
    with MemoryProbe(meter=ScriptedMeter(), also=["process"]).measure() as region:
        for _ in range(1000):
            region.batch_done()
    batches = [sample.batch for sample in region.record.process_timeline]
    assert 64 <= len(batches) <= 128
    assert len({second - first for first, second in pairwise(batches)}) == 1


def test_region_that_an_exception_ends_is_not_judged():
    """The figures of a region that an exception ends are known up to its last boundary."""
    pytest.importorskip("psutil")
    probe = MemoryProbe(meter=ScriptedMeter(), also=["process"])
    with pytest.raises(ZeroDivisionError), probe.measure() as region:
        region.batch_done(1 // 0)
    assert region.record.completed is False
    assert region.process_increase_bytes == 0


def test_without_psutil_a_probe_says_what_to_install(monkeypatch):
    """A probe that is to measure the process needs psutil."""
    monkeypatch.setattr(readings, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match="needs psutil, which is not installed; run pip install"
    ):
        MemoryProbe("cpu", also=["process"])


LEAKS = """
import ctypes
import mmap
import torch
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.selection import meter_for

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
C.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
C.free.argtypes = [ctypes.c_void_p]


def allocated(kilobytes):
    addresses = [C.malloc(1000) for _ in range(kilobytes)]
    for address in addresses:
        C.memset(address, 1, 1000)
    return addresses


def mapped():  # never where memory was freed
    kept.append(mmap.mmap(-1, 300_000))
    kept[-1].write(bytes(300_000))


def freed(kilobytes):
    for address in allocated(kilobytes)[:-1]:  # the last one keeps the heap from becoming smaller
        C.free(address)


probe = MemoryProbe(meter=meter_for("cpu"), also=["process"])
weight, total, kept = torch.ones(2, requires_grad=True), 0.0, []
"""
HIDDEN = {
    "by memory that was freed before": """
freed(100_000)
with probe.measure() as region:
    for _ in region.batches(range(BATCHES)):
        allocated(300)
""",
    "at the end of the arena that follows a refusal": """
C.free(C.malloc(30 << 20))  # from now on glibc returns nothing by itself
assert not C.malloc(1 << 50)
for address in allocated(30_000):
    C.free(address)
with probe.measure() as region:
    for _ in region.batches(range(BATCHES)):
        allocated(300)
""",
    "at the end of a thread's arena": """
import threading

C.free(C.malloc(30 << 20))

def run():
    global region
    for address in allocated(30_000):
        C.free(address)
    with probe.measure() as region:
        for _ in region.batches(range(BATCHES)):
            allocated(300)

thread = threading.Thread(target=run)
thread.start()
thread.join()
""",
    "by the search for a graph": """
with probe.measure() as region:
    for _ in region.batches(range(BATCHES)):
        allocated(300)
        for _ in range(20):
            total = total + weight.sum()
assert "total" in region.record.growing_graph
""",
    "by an inner region": """
with probe.measure() as region:
    for batch in region.batches(range(BATCHES)):
        if batch == 0:
            freed(30_000)
        mapped()
        if batch == 8:
            with probe.measure():
                pass
""",
}
"""What would hide a leak of 300,000 bytes a batch -> a program that leaks so."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its memory")
@pytest.mark.parametrize("batches", [12, 18, 36])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_leak_is_not_hidden_by_free_memory(hidden, batches):
    """A C library serves small requests from what was freed, which raises no memory."""
    pytest.importorskip("psutil")
    code = HIDDEN[hidden].replace("BATCHES", str(batches))
    if "arena" in hidden and not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("glibc before 2.33 does not say how large its arenas are")
    growth = "print(region.process_growth_bytes_per_batch)"
    run = forked_processes.run(["python", "-c", f"{LEAKS}{code}{growth}"])
    assert run.returncode == 0, run.stderr
    assert 280_000 < float(run.stdout) < 450_000


GRAPHS = {
    "of a loop before another without a graph": """
with probe.measure() as region:
    for _ in region.batches(range(14)):
        step()
    for _ in region.batches(range(14)):
        allocated(300)
""",
    "of a function that has returned": """
def train():
    total = 0.0
    for _ in range(14):
        allocated(300)
        for _ in range(20):
            total = total + weight.sum()
        region.batch_done()

with probe.measure() as region:
    train()
""",
    "of a loop that is left by break": """
with probe.measure() as region:
    for number in region.batches(range(100)):
        step()
        if number == 12:
            break
""",
    "of epochs with one batch": """
with probe.measure() as region:
    for _ in range(14):
        for _ in region.batches([1]):
            step()
""",
}
STEP = """
def step():
    global total
    allocated(300)
    for _ in range(20):
        total = total + weight.sum()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux")
@pytest.mark.parametrize("graph", GRAPHS)
def test_growing_graph_is_found(graph):
    """However the loop ends, and whatever follows it."""
    pytest.importorskip("psutil")
    code = f"{LEAKS}{STEP}{GRAPHS[graph]}print(region.record.growing_graph)"
    run = forked_processes.run(["python", "-c", code])
    assert re.search(r"total`.* keeps nodes of every batch", run.stdout), run.stdout + run.stderr


@pytest.mark.parametrize("in_loader", [False, True], ids=["batch_done", "batches"])
@pytest.mark.parametrize(
    ("levels", "of_loader", "by_hand"),
    [
        pytest.param([5] * 30, [], [], id="flat"),
        pytest.param([9, 1, *range(1, 29)], [25], [12, 24, 25], id="first batch is the highest"),
        pytest.param(range(1, 9), [], [], id="too short to judge"),
    ],
)
def test_graph_is_looked_for_if_the_process_grows(
    monkeypatch, levels, of_loader, by_hand, in_loader
):
    """A search takes memory and time: it is made of the last 24 batches, when a loop has ended if
    that is seen, and what it leaves is no memory of the program.
    """
    pytest.importorskip("psutil")
    searches, own, level = [], os.getpid(), 1
    numbers = itertools.count()

    def read(self):
        return [readings.ProcessReading(own, "this process", self.own_bytes())]

    monkeypatch.setattr(growing, "growing_graph", lambda numbers: searches.append(len(numbers)))
    monkeypatch.setattr(torch_private, "sequence_number", lambda: next(numbers))
    monkeypatch.setattr(readings.ProcessTree, "own_bytes", lambda self: level + len(searches) * MB)
    monkeypatch.setattr(readings.ProcessTree, "read", read)
    with MemoryProbe(meter=ScriptedMeter(), also=["process"]).measure() as region:
        for level in region.batches(levels) if in_loader else levels:  # noqa: B007  # see above
            if not in_loader:
                region.batch_done()
    assert searches == (of_loader if in_loader else by_hand)
    assert region.process_end_bytes == levels[-1]
    assert region.process_peak_bytes == max(levels)


def test_systems_without_proportional_sizes_count_what_is_unique(monkeypatch):
    """Where the system has no proportional sizes, psutil's unique set size is used."""
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(readings.sys, "platform", "darwin")
    own, *_ = readings.ProcessTree().read()
    assert (own.pid, own.name) == (os.getpid(), "this process")
    assert 0 < own.bytes <= psutil.Process().memory_info().rss
