"""``flat_per_batch(of="reserved")``: a reserve that grows while what is in use does not."""

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = """
import collections
import ctypes
from importlib.util import find_spec
import pytest
import torch

MB = 2**20
reserve = pytest.mark.flat_per_batch(of="reserved")


def empty(mb, cka_memory):
    return torch.empty(int(mb * MB), dtype=torch.uint8, device=cka_memory.device)


def fenced(cka_memory, batches, settings):
    '''Free blocks lie between small ones: joined they are above the size that may be split.'''
    torch.cuda.memory._set_allocator_settings(settings)
    try:
        fences = collections.deque(maxlen=4)
        with cka_memory.measure() as region:
            for _ in region.batches(range(batches)):
                blocks = [empty(34, cka_memory) for _ in range(4)]
                fences.append(empty(2, cka_memory))
                del blocks
    finally:
        fences.clear()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False,max_split_size_mb:-1")
    return region


@reserve
@pytest.mark.flat_per_batch
def test_fenced(cka_memory):
    fenced(cka_memory, 40, "max_split_size_mb:128,expandable_segments:True")


@pytest.mark.flat_per_batch
def test_fenced_without_a_limit_on_it(cka_memory):
    fenced(cka_memory, 40, "max_split_size_mb:128,expandable_segments:True")


def test_fenced_without_a_limit(cka_memory):
    fenced(cka_memory, 40, "max_split_size_mb:128,expandable_segments:True")


@reserve
def test_fenced_with_what_is_advised(cka_memory):
    fenced(cka_memory, 40, "expandable_segments:True")


@reserve
def test_each_a_little_larger(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(1, 18)):
            empty(20 + 2 * batch, cka_memory)


@reserve
def test_too_few(cka_memory):
    fenced(cka_memory, 4, "expandable_segments:True")


@pytest.mark.flat_per_batch(tolerance_mb=200, of="reserved")
def test_tolerated(cka_memory):
    fenced(cka_memory, 40, "max_split_size_mb:128,expandable_segments:True")


@reserve
def test_same_sizes(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(20)):
            empty(30, cka_memory)


@reserve
def test_emptied_now_and_then(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(32)):
            empty(20 + 2 * (batch % 4), cka_memory)
            if batch % 4 == 3:
                torch.cuda.empty_cache()


@reserve
def test_sizes_in_turns(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(24)):
            empty((24, 60, 12, 36)[batch % 4], cka_memory)


@reserve
def test_warmup_alone(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(20)):
            empty(100 if batch else 30, cka_memory)


@pytest.mark.flat_per_batch
def test_one_late_small_segment(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(20)):
            empty(200, cka_memory)
            if batch == 15:
                empty(1, cka_memory)


@pytest.mark.flat_per_batch(of="outside")
@pytest.mark.flat_per_batch
def test_outside(cka_memory):
    runtime = ctypes.CDLL(find_spec("emulated_cuda._cuda").origin)
    blocks = []
    with cka_memory.measure() as region:
        for batch in region.batches(range(9)):
            empty(8, cka_memory)
            blocks.append(ctypes.c_void_p())
            assert runtime.cudaMalloc(ctypes.byref(blocks[-1]), ctypes.c_size_t(16 * MB)) == 0
    for block in blocks:
        assert runtime.cudaFree(block) == 0
"""
MB = 2**20
CLEAN = [
    *("test_fenced_with_what_is_advised", "test_tolerated", "test_same_sizes"),
    *("test_emptied_now_and_then", "test_sizes_in_turns", "test_warmup_alone"),
    "test_one_late_small_segment",
]


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    """Return the finished session of all programs on the emulated card."""
    if not finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        options = "--cka-memory-device=emulate:cuda:h100,values=off", "--cka-memory-report"
        finished_sessions["run"] = session(PROGRAMS, *options, "-p", "no:randomly", forked=True)
    return finished_sessions["run"]


def growth_of(levels):
    """Return the growth after one batch: between the maxima of the two halves that are compared."""
    judged = levels[1:]
    half = len(judged) // 4 * 2
    return (max(judged[-half:]) - max(judged[-2 * half : -half])) / half


@pytest.mark.emulates
def test_reserve_that_fences_keep_from_use_breaks_the_limit(run):
    """What is in use is flat, so only the limit on the reserve is broken, by the exact growth."""
    region = run.region_of("test_fenced")
    reserved = [sample["reserved_bytes"] for sample in region["timeline"]]
    assert reserved[-1] - reserved[0] > 39 * 136 * MB
    (breach,) = region["breaches"]
    assert breach["limit"] == "flat_per_batch(of='reserved')"
    assert region["unjudged"] == []
    assert breach["measured_bytes"] == growth_of(reserved) > 130 * MB
    assert region["reserved_growth_bytes_per_batch"] == growth_of(reserved)
    assert region["growth_bytes_per_batch"] == 0
    text = " ".join(run.text.split())
    assert "(of='reserved') broken: the reserve grew by" in text
    assert "the memory in use grew by 0 per batch" in text


@pytest.mark.emulates
def test_reserve_stops_growing_as_advised(run):
    """The hint names the settings with which the same program keeps its limit."""
    text = " ".join(run.text.split())
    assert "what to do: leave max_split_size_mb out of PYTORCH" in text
    followed = run.region_of("test_fenced_with_what_is_advised")
    assert (followed["verdict"], followed["reserved_growth_bytes_per_batch"]) == ("ok", 0)


@pytest.mark.emulates
def test_each_segment_a_little_larger_than_the_last(run):
    """Blocks that never fit a cached one: each batch reserves another segment."""
    region = run.region_of("test_each_a_little_larger")
    reserved = [sample["reserved_bytes"] for sample in region["timeline"]]
    (breach,) = region["breaches"]
    assert breach["measured_bytes"] == growth_of(reserved) > 0


@pytest.mark.emulates
@pytest.mark.parametrize("name", CLEAN)
def test_reserve_that_does_not_grow_is_not_accused(run, name):
    """Nor one that rises and falls, that grows in the warm-up only, or within the tolerance."""
    region = run.region_of(name)
    assert (region["verdict"], region["breaches"], region["unjudged"]) == ("ok", [], [])


@pytest.mark.emulates
def test_too_few_batches_fail(run):
    """As for what is in use: a limit that cannot be judged fails."""
    (breach,) = run.region_of("test_too_few")["breaches"]
    assert "4 full batches were seen and 5 are needed" in breach["message"]


@pytest.mark.emulates
def test_rise_that_no_limit_judges_is_said(run):
    """As not judged beside a limit on what is in use, otherwise in a line under the table."""
    (unjudged,) = run.region_of("test_fenced_without_a_limit_on_it")["unjudged"]
    assert unjudged["limit"] == "flat_per_batch of the reserve"
    assert "while the memory in use does not rise" in unjudged["reason"]
    assert run.region_of("test_fenced_without_a_limit")["verdict"] == "no limit"
    (line,) = [line for line in run.text.splitlines() if line.startswith("reserve: ")]
    assert "test_fenced_without_a_limit region, the allocator's reserve rises by" in line


@pytest.mark.emulates
def test_growth_outside_the_allocator(run):
    """The driver is asked because the limit needs it; both growths are judged, one is broken."""
    region = run.region_of("test_outside")
    assert region["outside_growth_bytes_per_batch"] == 16 * MB
    (breach,) = region["breaches"]
    assert breach["limit"] == "flat_per_batch(of='outside')"
    assert breach["measured_bytes"] == 16 * MB
