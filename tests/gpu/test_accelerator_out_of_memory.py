"""Running out of memory: figures of that region, and of the regions before and after."""

import gc
import json

import pytest
import torch

from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


def run_out_of_memory(allocate):
    """Allocate two tensors, of which only the first has space."""
    return allocate(24 * MB), allocate(20 * MB)


def test_figures_are_right_if_memory_runs_out_in_the_region(
    probe, allocate, segments, limit_reserve
):
    """What was live when memory ran out counts in the peak; the refused tensor does not."""
    limit_reserve(41 * MB)
    with probe.measure() as region:
        with pytest.raises(torch.OutOfMemoryError):
            run_out_of_memory(allocate)
        gc.collect()
        kept = allocate(10)
    assert region.peak_increase_bytes == 24 * MB
    assert region.retained_bytes == kept.nbytes


def test_next_region_is_right_if_memory_runs_out_between_regions(
    probe, allocate, segments, limit_reserve
):
    """After memory ran out between regions, the next one starts at
    the same level, with no cache.
    """
    limit_reserve(41 * MB)
    with probe.measure() as before:
        allocate(MB)
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(allocate)
    with probe.measure() as after:
        allocate(MB)
    assert after.start_bytes == before.start_bytes
    assert after.reserved_start_bytes == before.reserved_start_bytes
    assert after.peak_increase_bytes == before.peak_increase_bytes == MB
    assert after.retained_bytes == 0


def test_region_that_the_error_ends_is_not_completed_and_the_next_starts_right(
    probe, allocate, segments, limit_reserve
):
    """A region that ends with an out-of-memory error keeps its peak, and the next starts right."""
    limit_reserve(41 * MB)
    with probe.measure() as before:
        pass
    with pytest.raises(torch.OutOfMemoryError), probe.measure() as ended:
        run_out_of_memory(allocate)
    assert not ended.record.completed
    assert ended.peak_increase_bytes == 24 * MB
    with probe.measure() as after:
        kept = allocate(1000)
    assert after.start_bytes == before.start_bytes
    assert (after.retained_bytes, after.peak_increase_bytes) == (kept.nbytes, 1024)


def test_outer_region_is_right_if_memory_runs_out_in_an_inner_region(
    probe, allocate, limit_reserve
):
    """If an inner region runs out of memory, both have that peak, and the outer one goes on."""
    limit_reserve(41 * MB)
    with probe.measure() as outer:
        with pytest.raises(torch.OutOfMemoryError), probe.measure() as inner:
            run_out_of_memory(allocate)
        kept = allocate(10)
    assert inner.peak_increase_bytes == outer.peak_increase_bytes == 24 * MB
    assert outer.record.completed
    assert outer.retained_bytes == kept.nbytes


def test_full_cache_is_emptied_before_memory_runs_out(probe, allocate, segments, limit_reserve):
    """The allocator empties its cache before it gives up, so the
    reserve never exceeds the limit.
    """
    limit_reserve(41 * MB)
    with probe.measure() as region:
        allocate(24 * MB)
        allocate(40 * MB)
    assert region.peak_increase_bytes == region.reserved_increase_bytes == 40 * MB


def test_graph_is_not_retained_if_memory_runs_out_in_a_backward_pass(probe, limit_reserve):
    """After an error in a backward pass only the gradients accumulated so far are retained."""
    length = 20 * MB // 4
    weights = [torch.ones(length, device=probe.device, requires_grad=True) for _ in range(3)]
    values = torch.ones(length, device=probe.device)
    with probe.measure() as region:
        for weight in weights:
            values = values * weight
        loss = values.sum()
        limit_reserve(41 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss, values
    gradients = [weight.grad.nbytes for weight in weights if weight.grad is not None]
    assert gradients == [20 * MB]
    assert region.retained_bytes == 20 * MB


def test_other_device_is_not_affected(probe, second_device, allocate, limit_reserve):
    """If memory runs out on one device, the figures of the other one are not affected."""
    limit_reserve(41 * MB)
    with probe.measure() as region:
        with pytest.raises(torch.OutOfMemoryError):
            run_out_of_memory(allocate)
        kept = allocate(100 * MB, second_device)
    assert kept.device == second_device
    assert region.peak_increase_bytes == 24 * MB
    assert region.retained_bytes == 0


SESSION = """
import pytest
import torch

MB = 2**20

def allocate(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

@pytest.mark.zero_retention
def test_before():
    pass

def test_out_of_memory(cka_memory):
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 41 * MB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    with cka_memory.measure("has space"):
        allocate(20 * MB)
    with cka_memory.measure("has none"):
        held = allocate(30 * MB)
        allocate(20 * MB)

@pytest.mark.zero_retention
def test_after():
    torch.cuda.set_per_process_memory_fraction(1.0)
    allocate(MB)
"""


def test_failed_test_is_reported_and_the_next_test_starts_right(
    tmp_path, monkeypatch, capsys, pytestconfig, cuda
):
    """Pytest's traceback holds tensors until the report is made; then they are freed."""
    # Not with pytester: it records the arguments of hooks, and with them the traceback.
    file, json_file = tmp_path / "test_out_of_memory_session.py", tmp_path / "report.json"
    file.write_text(SESSION, encoding="utf-8")
    # rerunfailures keeps the last failure too.
    without = ("asyncio", "cacheprovider", "cov", "randomly", "rerunfailures")
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-pno:{name}" for name in without))
    device = pytestconfig.getoption("cka_memory_device") or "cuda"
    options = (f"--rootdir={tmp_path}", f"--cka-memory-device={device}")
    code = pytest.main([str(file), f"--cka-memory-json={json_file}", *options])
    torch.cuda.set_per_process_memory_fraction(1.0)
    output = capsys.readouterr().out
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "CUDA out of memory. Tried to allocate 20.00 MiB" in output
    before, complete, ended, after = json.loads(json_file.read_text("utf-8"))["regions"]
    assert (complete["label"], complete["completed"]) == ("has space", True)
    assert complete["peak_increase_bytes"] == 20 * MB
    assert (ended["completed"], ended["verdict"]) == (False, "not judged")
    assert (ended["outcome"], ended["peak_increase_bytes"]) == ("failed", 30 * MB)
    assert after["start_bytes"] == before["start_bytes"]
    assert after["reserved_start_bytes"] == before["reserved_start_bytes"]
    assert (after["peak_increase_bytes"], after["retained_bytes"]) == (MB, 0)
