"""An OutOfMemoryError that ends a test: whether memory was missing, in pieces, or in pools."""

import pytest

pytestmark = pytest.mark.emulates
MB = 2**20
PROGRAMS = """
import pytest
import torch

MB = 2**20
KEPT = []


@pytest.fixture(autouse=True)
def nothing_left():
    KEPT.clear()
    torch.cuda.empty_cache()


def empty(mb):
    return torch.empty(int(mb * MB), dtype=torch.uint8, device="cuda")


def test_all_in_use(cka_memory):
    with cka_memory.measure("fill"):
        while True:
            KEPT.append(empty(4000))  # all of it


def test_in_pieces(cka_memory):
    with cka_memory.measure("fill"):
        others = []
        for number in range(3400):
            (others if number % 5 else KEPT).append(empty(4))  # kept
        del others
        empty(8000)


def test_in_pools(cka_memory):
    with cka_memory.measure("fill"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            empty(12000)
        empty(8000)


def test_without_a_region(cka_memory):
    empty(20000)


def test_that_handles_it(cka_memory):
    with cka_memory.measure("search"):
        with pytest.raises(torch.OutOfMemoryError):
            empty(20000)
        empty(10)


def test_that_fails_later(cka_memory):
    with cka_memory.measure("search"):
        with pytest.raises(torch.OutOfMemoryError):
            empty(20000)
        raise ValueError("for another reason")
"""


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    """Return the finished session of all programs on an emulated card of 16 GB."""
    if not finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        options = "--cka-memory-device=emulate:cuda:t4,values=off", "-p", "no:randomly"
        finished_sessions["run"] = session(PROGRAMS, *options, forked=True)
    return finished_sessions["run"]


def section_of(run, test):
    """Return what the plugin has added to a failure, as one line."""
    failures = run.text.partition("= FAILURES =")[2].partition("short test summary info")[0]
    (text,) = [text for text in failures.split("\n___") if text.strip("_ ").startswith(f"{test} ")]
    return " ".join(text.partition(" cka-memory ---")[2].partition("--- Captured")[0].split())


def test_memory_that_is_in_use(run):
    region = run.region_of("test_all_in_use")
    refusal, (part,) = region["refusal"], region["reserve"]
    assert refusal["requested_bytes"] == 4000 * MB > refusal["free_bytes"]
    assert part["in_use_bytes"] == 3 * 4000 * MB
    section = section_of(run, "test_all_in_use")
    missing = 4000 * MB - refusal["free_bytes"]
    assert "3 allocations, 12,582,912,000 bytes (12000.00 MB)" in section
    assert f"12000.0 MB are in use, so at least {missing / MB:.2f} MB more are needed" in section
    assert "`empty(4000)`" in section or "test_it.py:21" in section
    assert "what to do: the allocator" not in section


def test_memory_that_is_free_in_pieces(run):
    region = run.region_of("test_in_pieces")
    (part,) = region["reserve"]
    assert part["free_part_bytes"] > 8000 * MB > part["largest_free_bytes"]
    section = section_of(run, "test_in_pieces")
    assert "10880.0 MB are free in the reserve, in blocks of at most 16.00 MB: this is" in section
    assert "held by test_it.KEPT[0]" in section
    assert "inputs" not in section  # what was live at the peak is not the cause
    assert "what to do: allocate the tensors that stay before those" in section


def test_memory_that_is_free_in_a_pool(run):
    section = section_of(run, "test_in_pools")
    assert "12000.0 MB are free in private pools, which serve only their graphs" in section
    assert "the pool of the graph captured at test_it.py:36 in test_in_pools" in section


def test_whole_test_without_a_region(run):
    section = section_of(run, "test_without_a_region")
    assert "out of memory: 20000.0 MB were requested, but the card has" in section
    assert "nothing is in use, so at least" in section
    assert "in the whole test, emulated as emulate:cuda:t4" in section


def test_error_that_the_test_handles_is_not_reported(run):
    for name in ("test_that_handles_it", "test_that_fails_later"):
        region = run.region_of(name)
        assert (region["refusal"], region["reserve"]) == (None, [])
    assert section_of(run, "test_that_fails_later") == ""


def test_command_that_makes_it_fit_is_named(run):
    """A test that runs out of memory names the command for it, also one without a region."""
    for name in ("test_all_in_use", "test_without_a_region"):
        failures = run.text.partition("= FAILURES =")[2].partition("short test summary info")[0]
        (text,) = [each for each in failures.split("\n___") if each.strip("_ ").startswith(name)]
        section = text.partition(" cka-memory: repair ---")[2].partition("\n---")[0]
        lines = [line.strip() for line in section.splitlines()[1:3]]
        assert lines == [
            "this command tries changes that may make this test fit, and prints the edits:",
            f"python -m pytest_cka_memory repair test_it.py::{name} --card t4",
        ]


def test_error_that_the_test_handles_names_no_command(run):
    """A test that fails for another reason is not one for the command."""
    assert run.text.count("python -m pytest_cka_memory repair") == 4
