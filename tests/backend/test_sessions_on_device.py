"""Sessions on an accelerator with memory counters show the expected output if limits break."""

import pytest

from pytest_cka_memory.units import MB

BREAKING = """
import pytest
import torch

MB = 2**20
KEPT = []

def make(size):
    return torch.empty(size, dtype=torch.uint8, device="privateuseone")

@pytest.mark.zero_retention
def test_retained(): KEPT.append(make(3))

@pytest.mark.max_retained_mb("3 B")
def test_retained_at_the_limit(): KEPT.append(make(3))

@pytest.mark.max_peak_mb(1)
def test_peak(): make(MB + 1)

@pytest.mark.max_peak_mb(1)
def test_peak_at_the_limit(): make(MB)

@pytest.mark.max_reserved_mb(2)
def test_reserved():
    make(MB)
    make(MB + 1)

@pytest.mark.max_reserved_mb(2)
def test_reserved_at_the_limit():
    make(MB)
    make(MB - 512)

@pytest.mark.flat_per_batch
def test_growth(cka_memory):
    with cka_memory.measure("loop") as region:
        for _ in region.batches([torch.ones(1)] * 8):
            KEPT.append(make(4))

@pytest.mark.zero_retention
def test_unowned():
    torch.privateuseone.hold(100)

@pytest.mark.zero_retention
def test_before_the_end(): pass

def test_out_of_memory(cka_memory):
    torch.privateuseone.set_capacity(torch.accelerator.memory_reserved() + 4 * MB)
    with cka_memory.measure("fits"):
        make(2 * MB)
    with cka_memory.measure("does not"):
        held = make(3 * MB)
        make(2 * MB)

@pytest.mark.zero_retention
def test_after_the_end():
    torch.privateuseone.set_capacity(64 * MB)
    make(MB)
"""

SMALL = """
import pytest
import torch

@pytest.mark.zero_retention
@pytest.mark.parametrize("size", [1, 1000, 10_000])
def test_it(cka_memory, size):
    torch.ones(size, device=cka_memory.device)
"""


@pytest.fixture(scope="module")
def broken(on_device):
    """The session over ``BREAKING``, with the allocator's history."""
    return on_device(
        BREAKING, "--cka-memory-device=privateuseone", "--cka-memory-report",
        "--cka-memory-snapshots=snapshots",
    )  # fmt: skip


def test_the_report_names_device_and_allocator(broken):
    """As those say themselves."""
    session = broken.report["session"]
    assert (session["device"], session["device_name"]) == ("privateuseone:0", "Host Device 0")
    assert session["meter"] == "PyTorch's caching allocator"


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("test_retained", "BREACH"),
        ("test_retained_at_the_limit", "ok"),
        ("test_peak", "BREACH"),
        ("test_peak_at_the_limit", "ok"),
        ("test_reserved", "BREACH"),
        ("test_reserved_at_the_limit", "ok"),
        ("test_growth", "BREACH"),
        ("test_unowned", "BREACH"),
        ("test_before_the_end", "ok"),
        ("test_after_the_end", "ok"),
    ],
)
def test_every_marker_judges_the_allocators_figures(broken, test, verdict):
    """On the exact boundary: three bytes, a block, and the reserve of two tensors in turn."""
    assert broken.of(test)["verdict"] == verdict, broken.text


def test_a_rise_is_drawn_from_the_first_batch_on(broken):
    """In bytes asked for: the start is known in blocks, from which they cannot be subtracted."""
    assert "grew by 4.0 bytes per batch over 8 batches" in broken.text
    assert "0 to 28 B above the first batch" in broken.text


def test_a_block_that_no_tensor_owns_is_named_by_the_line_that_allocated_it(broken):
    """From the allocator's history."""
    (holding,) = broken.of("test_unowned")["retained"]
    assert holding["bytes"] == 100
    assert any(frame.endswith("in test_unowned") for frame in holding["created_at"])


def test_running_out_of_memory_is_told_and_not_judged(broken):
    """The region that it ended has its peak; the one before is complete."""
    fits, ended = (r for r in broken.report["regions"] if r["nodeid"].endswith("_of_memory"))
    assert (fits["label"], fits["completed"], fits["peak_increase_bytes"]) == ("fits", True, 2 * MB)
    assert (ended["completed"], ended["verdict"]) == (False, "not judged")
    assert (ended["outcome"], ended["peak_increase_bytes"]) == ("failed", 3 * MB)
    assert "hostdevice out of memory. Tried to allocate 2097152 bytes" in broken.text


def test_a_test_after_running_out_of_memory_starts_where_those_before_did(broken):
    """What the traceback held is gone, the cache too, and its own figures are exact."""
    before, after = broken.of("test_before_the_end"), broken.of("test_after_the_end")
    assert after["start_bytes"] == before["start_bytes"]
    assert after["reserved_start_bytes"] == before["reserved_start_bytes"]
    assert (after["peak_increase_bytes"], after["retained_bytes"]) == (MB, 0)


def test_workers_measure_it_too(on_device):
    """Each process has an allocator of its own; the figures are those of a serial session."""
    pytest.importorskip("xdist")
    run = on_device(SMALL, "-n2", "--cka-memory-device=privateuseone")
    assert run.code == pytest.ExitCode.OK, run.text
    assert [r["peak_increase_bytes"] for r in run.report["regions"]] == [512, 4096, 40448]
    assert {r["start_bytes"] for r in run.report["regions"]} == {0}


def test_an_accelerator_of_any_name_is_found(on_device):
    """Out-of-tree backends name themselves."""
    run = on_device(SMALL, HOSTDEVICE_NAME="abacus")
    assert run.code == pytest.ExitCode.OK, run.text
    assert run.report["session"]["device"] == "abacus:0"


FORKING = """
import os
import torch

def test_forks(cka_memory):
    with cka_memory.measure():
        torch.ones(1, device=cka_memory.device)
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_ran_no_backward_pass_may_still_fork(on_device):
    """Torch refuses them in the children of a process that has its threads for them."""
    run = on_device(FORKING)
    assert run.code == pytest.ExitCode.OK, run.text
