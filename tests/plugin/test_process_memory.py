"""``max_process_mb`` and ``flat_process_per_batch``: memory of the process and its workers."""

import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("psutil")

PROGRAMS = """
import gc
import os
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

MB = 2**20
KEPT = []


class Names(Dataset):
    '''Half a million file names, of which each item reads fifty.'''

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        for number in range(index * 50, index * 50 + 50):
            name = self.names[number]
        return len(name)


class Caching(Dataset):
    '''Keeps what its items read, in the worker: without end, or eight of them.'''

    def __init__(self, most):
        self.cache, self.most = [], most

    def __len__(self):
        return 128

    def __getitem__(self, index):
        self.cache.append(os.urandom(MB // 2))
        del self.cache[: max(0, len(self.cache) - self.most)]
        return index


def names():
    return [f"images/train/file {number}.png" for number in range(500_000)]


def loop(cka_memory, loader, step=lambda batch: None):
    with cka_memory.measure("loop") as region:
        for batch in region.batches(loader):
            step(batch)


def workers(data, size, start=None):
    fork = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": start}
    return DataLoader(data, batch_size=size, **fork)


@pytest.mark.flat_process_per_batch("256 KiB")
def test_list_of_strings(cka_memory):
    loop(cka_memory, workers(Names(names()), 500))


@pytest.mark.flat_process_per_batch("256 KiB")
def test_array_of_strings(cka_memory):
    loop(cka_memory, workers(Names(np.array(names(), dtype="S32")), 500))


@pytest.mark.flat_process_per_batch("256 KiB")
def test_cache_in_workers(cka_memory):
    loop(cka_memory, workers(Caching(10**6), 4))


class Few(Caching):
    def __len__(self):
        return 56


@pytest.mark.flat_process_per_batch("256 KiB")
def test_cache_in_workers_of_a_short_loop(cka_memory):
    loop(cka_memory, workers(Few(10**6), 4))


class InCycles(Caching):
    '''Leaves what its items read to the collector, in a reference cycle.'''

    def __getitem__(self, index):
        cycle = [os.urandom(MB // 2)]
        cycle.append(cycle)
        return index


@pytest.mark.no_cycles
@pytest.mark.flat_process_per_batch("256 KiB")
def test_cycles_in_workers(cka_memory):
    loop(cka_memory, workers(InCycles(0), 4, lambda worker: gc.disable()))


@pytest.mark.flat_process_per_batch("256 KiB")
def test_bounded_cache_in_workers(cka_memory):
    loop(cka_memory, workers(Caching(8), 4))


@pytest.mark.flat_process_per_batch
def test_python_objects(cka_memory):
    loop(cka_memory, range(16), lambda batch: KEPT.append(os.urandom(2 * MB)))


@pytest.mark.flat_process_per_batch
def test_tensors_on_the_host(cka_memory):
    loop(cka_memory, range(16), lambda batch: KEPT.append(torch.ones(2 * MB, dtype=torch.uint8)))


@pytest.mark.max_process_mb(40)
def test_array_at_once(cka_memory):
    loop(cka_memory, range(2), lambda batch: KEPT.append(np.ones(40 * MB, dtype=np.uint8)))


@pytest.mark.max_process_mb(40)
def test_array_that_fits(cka_memory):
    loop(cka_memory, range(2), lambda batch: KEPT.append(np.ones(10 * MB, dtype=np.uint8)))


@pytest.mark.flat_process_per_batch
def test_one_step(cka_memory):
    def step(batch):
        if batch == 10:
            KEPT.append(os.urandom(64 * MB))

    loop(cka_memory, range(24), step)


@pytest.mark.flat_process_per_batch
def test_temporaries(cka_memory):
    def step(batch):
        os.urandom((batch % 5) * 4 * MB)
        torch.ones((1 + batch % 3) * MB, device=cka_memory.device).sum()

    loop(cka_memory, range(32), step)
"""
PLANTED = {
    "test_list_of_strings": (
        "copied shared pages",
        "came with the start of the children",
        "reference count",
    ),
    "test_cache_in_workers": (
        "DataLoader worker 0 (pid ",
        "the workers keep more memory with every item",
    ),
    "test_cache_in_workers_of_a_short_loop": (
        "over 14 batches",
        "the workers keep more memory with every item",
    ),
    "test_cycles_in_workers": ("DataLoader worker 0 (pid ", "no_cycles finds reference cycles too"),
    "test_python_objects": ("torch's CPU allocator took nothing of the rise", "tracemalloc"),
    "test_tensors_on_the_host": ("torch's CPU allocator took 32.0", "held by test_it.KEPT[16]"),
    "test_array_at_once": ("max_process_mb(40) broken: rise of the process's memory",),
}
"""Test -> what its message says."""
CLEAN = (
    "test_array_of_strings",
    "test_bounded_cache_in_workers",
    "test_array_that_fits",
    "test_one_step",
    "test_temporaries",
)
WITHOUT_TENSORS = (
    "test_cache_in_workers_of_a_short_loop",
    "test_list_of_strings",
    "test_array_of_strings",
    "test_cycles_in_workers",
    "test_bounded_cache_in_workers",
)
"""What is the same on every device, and so is run on one."""


def _on_devices(names):
    for name in names:
        yield pytest.param("cpu", name, id=f"cpu-{name}", marks=pytest.mark.native)
        if name not in WITHOUT_TENSORS:
            yield pytest.param(
                "emulate:cuda", name, id=f"emulated-{name}", marks=pytest.mark.emulates
            )


@pytest.fixture
def run(device, session, finished_sessions, monkeypatch):
    """Return the finished session of the programs, on one device."""
    if device not in finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        options = f"--cka-memory-device={device}", "-p", "no:randomly"
        options += ("--cka-memory-allow-no-allocations",)
        if device != "cpu":
            options += ("-k", f"not ({' or '.join(WITHOUT_TENSORS)})")
        finished_sessions[device] = session(PROGRAMS, *options, forked=True)
    return finished_sessions[device]


@pytest.mark.parametrize(("device", "name"), [*_on_devices(PLANTED)])
def test_growth_breaks_the_limit_and_the_message_says_whose_it_is(run, name):
    """What grows in the process or in a worker breaks its limit; the message names the process."""
    region = run.region_of(name)
    assert region["verdict"] == "BREACH", run.text
    text = " ".join(run.text.partition(f" {name} _")[2].partition("\n___")[0].split())
    for part in PLANTED[name]:
        assert part in text
    assert region["processes"][0]["name"] == "this process"


@pytest.mark.parametrize(("device", "name"), [*_on_devices(CLEAN)])
def test_memory_that_does_not_grow_keeps_the_limit(run, name):
    """Steps, temporaries, bounded caches and data sets in arrays keep the limit."""
    region = run.region_of(name)
    assert (region["verdict"], region["breaches"]) == ("ok", [])
    assert region["process_start_bytes"] > 0


@pytest.mark.native
@pytest.mark.parametrize("device", ["cpu"])
def test_workers_are_listed_by_name_and_pid(run):
    """A region lists this process, and each DataLoader worker by its number and pid."""
    processes = run.region_of("test_array_of_strings")["processes"]
    names = [process["name"] for process in processes]
    assert sorted(names) == ["DataLoader worker 0", "DataLoader worker 1", "this process"]
    assert len({process["pid"] for process in processes}) == 3
    assert all(process["peak_bytes"] >= process["start_bytes"] > 0 for process in processes)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory")
@pytest.mark.native
@pytest.mark.parametrize("device", ["cpu"])
def test_copied_pages_are_told_from_memory_that_a_worker_keeps(run):
    """Most of what workers need to read a list is copies; of what they keep, little is."""
    shares = {}
    for name in ("test_list_of_strings", "test_cache_in_workers"):
        processes = run.region_of(name)["processes"]
        workers = [each for each in processes if each["name"].startswith("DataLoader worker")]
        rise = sum(each["peak_bytes"] - each["start_bytes"] for each in workers)
        shares[name] = sum(each["copied_bytes"] for each in workers) / rise
    assert shares["test_cache_in_workers"] < 0.5 < shares["test_list_of_strings"]


@pytest.mark.parametrize(
    "marker", ["max_process_mb(1)", "flat_process_per_batch"], ids=["peak", "growth"]
)
def test_limit_without_psutil_is_a_usage_error(session, pytester, marker):
    """Without psutil the session stops and says what to install."""
    pytester.makeconftest(
        "from pytest_cka_memory import limits\nlimits.find_spec = lambda name: None"
    )
    run = session(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass", forked=True)
    run.assert_refused(
        "measuring the memory of the process needs psutil, which is not installed; run pip install "
        "'pytest-cka-memory[process]'"
    )


def test_too_few_batches_break_the_limit_and_say_how_many_are_missing(scripted):
    """A loop that is too short to be judged fails, as for ``flat_per_batch``."""
    run = scripted(
        """
        import pytest

        @pytest.mark.flat_process_per_batch
        def test_it(cka_memory):
            with cka_memory.measure() as region:
                for _ in range(9):
                    region.batch_done()
        """
    )
    run.assert_outcomes(failed=1)
    text = " ".join(run.text.split())
    assert "9 batches were seen and 10 are needed (2 to warm up, 8 to judge)" in text


def test_batches_that_the_workers_fetch_ahead_are_said_to_be_needed_too(scripted):
    """Where workers had nothing left to do in the last batches, these are no batches to judge."""
    run = scripted(
        """
        import pytest

        class Loader(list):
            num_workers, prefetch_factor = 2, 2

        @pytest.mark.flat_process_per_batch
        def test_it(cka_memory):
            with cka_memory.measure() as region:
                for _ in region.batches(Loader(range(12))):
                    pass
        """
    )
    run.assert_outcomes(failed=1)
    text = " ".join(run.text.split())
    needed = "14 are needed (2 to warm up, 8 to judge, 4 that the workers fetch ahead)"
    assert f"12 batches were seen and {needed}: use more batches, fewer workers" in text


def test_psutil_is_imported_only_if_it_is_asked_for(session, pytester):
    """A session that measures without these limits does not import psutil."""
    pytester.makeconftest(
        "import sys\ndef pytest_unconfigure(): print('psutil' in sys.modules, 'is loaded')"
    )
    source = "import pytest\n@pytest.mark.{}\ndef test_it(): pass"
    options = "--cka-memory-device=cpu", "-p", "no:xdist", "-p", "no:timeout"
    for marker, loaded in (("zero_retention", False), ("max_process_mb(9000)", True)):
        run = session(source.format(marker), *options, forked=True)
        run.assert_outcomes(passed=1)
        assert f"{loaded} is loaded" in run.text
