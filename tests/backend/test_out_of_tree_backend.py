"""A backend from outside torch is found, measured and judged; ``conftest.py`` says what it adds."""

import pytest

pytestmark = pytest.mark.slow

# Tests for both kinds of the device: with and without counters in its allocator.
BOTH = """
import pytest
import torch

MB = 2**20
KEPT = []

def allocate(size):
    return torch.empty(size, dtype=torch.uint8, device="privateuseone")

@pytest.mark.zero_retention
def test_retained():
    KEPT.append(allocate(3))

@pytest.mark.flat_per_batch
def test_growth(cka_memory):
    with cka_memory.measure("loop") as region:
        for _ in region.batches([torch.ones(1)] * 8):
            KEPT.append(allocate(4))
"""

LIMITS = f"""{BOTH}
@pytest.mark.max_retained_mb("3 B")
def test_retained_at_the_limit():
    KEPT.append(allocate(3))

@pytest.mark.max_peak_mb(1)
def test_peak():
    allocate(MB + 1)

@pytest.mark.max_peak_mb(1)
def test_peak_at_the_limit():
    allocate(MB)

@pytest.mark.max_reserved_mb(2)
def test_reserved():
    allocate(MB)
    allocate(MB + 1)

@pytest.mark.max_reserved_mb(2)
def test_reserved_at_the_limit():
    allocate(MB)
    allocate(MB - 512)

@pytest.mark.zero_retention
def test_unowned():
    torch.privateuseone.hold(100)

@pytest.mark.zero_retention
def test_after_the_others():
    allocate(MB)
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
    """Return the session that runs ``LIMITS`` and asks for a history that the device lacks."""
    options = ("--cka-memory-device=privateuseone", "--cka-memory-report")
    return on_device(LIMITS, *options, "--cka-memory-snapshots=snapshots")


def test_report_names_the_device_and_its_allocator(broken):
    """The report has the name that the device gives itself, and says whose counters were read."""
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
        ("test_after_the_others", "ok"),
    ],
)
def test_every_marker_judges_the_allocators_figures(broken, test, verdict):
    """A figure equal to its limit passes, and a larger one fails
    the test, to the byte and block.
    """
    assert broken.of(test)["verdict"] == verdict, broken.text


def test_growth_is_shown_from_the_first_batch_on(broken):
    """From the first batch on, growth is shown in requested bytes; the start is known in blocks."""
    assert "grew by 4 bytes per batch over 8 batches" in broken.text
    assert "0 to 28 B above the first batch" in broken.text


def test_block_that_no_tensor_owns_is_reported_without_a_line(broken):
    """Without a history of allocations a block has no line; the report says that there is none."""
    (holding,) = broken.of("test_unowned")["retained"]
    assert (holding["bytes"], holding["count"]) == (100, 0)
    assert holding["created_at"] == []
    assert "no memory snapshot: privateuseone:0 records no allocation history" in broken.text


def test_backend_of_any_name_is_found(on_device):
    """A backend from outside torch names itself, so the plugin finds it without an option."""
    # Torch finds it when it is imported, so this is a new interpreter.
    run = on_device(SMALL, forked=False, HOSTDEVICE_NAME="abacus")
    assert run.code == pytest.ExitCode.OK, run.text
    assert run.report["session"]["device"] == "abacus:0"


def test_workers_measure_it(on_device):
    """Each worker process has its own allocator, and its figures are those of a serial session."""
    pytest.importorskip("xdist")
    run = on_device(SMALL, "-n2", HOSTDEVICE_NAME="abacus")
    assert run.code == pytest.ExitCode.OK, run.text
    assert [r["peak_increase_bytes"] for r in run.report["regions"]] == [512, 4096, 40448]
    assert {r["start_bytes"] for r in run.report["regions"]} == {0}


UNCOUNTED = f"""{BOTH}
@pytest.mark.zero_retention
def test_garbage(cka_memory):
    cycle = [allocate(MB)]
    cycle.append(cycle)

@pytest.mark.max_peak_mb(2)
def test_peak():
    allocate(MB) + allocate(MB)

@pytest.mark.max_peak_mb(3)
def test_peak_at_the_limit():
    allocate(MB) + allocate(MB)

@pytest.mark.max_reserved_mb(1)
def test_reserved():
    allocate(MB)

@pytest.mark.zero_retention
def test_training(cka_memory):
    model = torch.nn.Linear(8, 8).to(cka_memory.device)
    with cka_memory.measure():
        model(torch.ones(2, 8, device=cka_memory.device)).sum().backward()
"""


@pytest.fixture(scope="module")
def uncounted(on_device):
    """Return a session on the device, whose allocator counts nothing for torch."""
    options = ("--cka-memory-report", "--cka-memory-snapshots=snapshots")
    return on_device(UNCOUNTED, *options, HOSTDEVICE_COUNTERS="0")


def test_report_says_that_tensors_are_counted_if_the_allocator_has_no_counters(uncounted):
    """Without counters the peak counts tensors, so the report calls it a lower bound."""
    session = uncounted.report["session"]
    assert (session["device"], session["device_name"]) == ("privateuseone:0", "Host Device 0")
    assert session["meter"] == "tensors counted, allocator not seen"
    assert "meter: tensors counted, allocator not seen" in uncounted.text
    assert "privateuseone:0 has no memory counters in torch" in uncounted.text
    assert "(a lower bound)" in uncounted.text


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("test_retained", "BREACH"),
        ("test_garbage", "ok"),
        ("test_peak", "BREACH"),
        ("test_peak_at_the_limit", "ok"),
        ("test_reserved", "not judged"),
        ("test_growth", "BREACH"),
        ("test_training", "BREACH"),
    ],
)
def test_markers_judge_tensors_exactly_if_the_allocator_has_no_counters(uncounted, test, verdict):
    """If tensors are counted, limits are judged to the byte, except for a limit on the reserve."""
    assert uncounted.of(test)["verdict"] == verdict, uncounted.text


def test_tensors_are_described_if_the_allocator_has_no_counters(uncounted):
    """A counted tensor is described by its line and reference; gradients have 64 and 8 numbers."""
    (held,) = uncounted.of("test_retained")["retained"]
    assert (held["bytes"], held["held_by"]) == (3, "test_it.KEPT[0]")
    assert held["created_at"][0].endswith("test_it.py:9 in allocate")
    training = uncounted.of("test_training")
    assert training["retained_bytes"] == 72 * 4
    assert training["reserved_peak_bytes"] is training["host_retained_bytes"] is None


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


def test_process_that_ran_no_backward_pass_can_still_fork(on_device):
    """Torch refuses backward passes in children of a process that has backward threads."""
    run = on_device(FORKING)
    assert run.code == pytest.ExitCode.OK, run.text
