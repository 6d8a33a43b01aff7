"""Blocks that no tensor owns, and the allocator's history, which names the lines of code."""

import inspect
from contextlib import contextmanager

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.accelerator.meter import AllocatorHistory
from pytest_cka_memory.plugin.item_probes import SnapshotFiles
from pytest_cka_memory.units import MB

pytestmark = pytest.mark.gpu


class ExplainRetained:
    """Have a region's end explain what is retained, as a broken limit has it."""

    draws_paths = False

    def figures_to_explain(self, record):
        return {"retained_bytes"}

    def named_values(self):
        return {}


@pytest.fixture
def recording_probe(native, cuda):
    """Return a probe that records the allocator's history and explains what is retained."""
    probe = MemoryProbe(cuda, explainer=ExplainRetained())
    assert probe.meter.record_history()
    yield probe
    probe.meter.stop_history()
    assert not is_recorded()


@pytest.fixture
def users_recording(cuda):
    """Record the history as a user does."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.fixture
def history_recorded(request, probe):
    """Return a context that records what a measured test does, given its folder for snapshots."""

    @contextmanager
    def recorded(folder):
        files = SnapshotFiles(request.node, probe.meter, folder, may_refuse=True)
        files.begin()
        try:
            yield
        finally:
            files.close()

    return recorded


def is_recorded() -> bool:
    """Return whether the allocator's history is recorded."""
    return torch._C._cuda_isHistoryEnabled()


def figures(probe, allocate):
    """Return the figures of a region that allocates, frees and retains on the device."""
    old, square = [allocate(3 * MB)], torch.ones(64, 64, device=probe.device)
    kept = []
    with probe.measure() as region:
        old.clear()
        for batch in region.batches([torch.zeros(8)] * 8):
            allocate(12 * MB)
            kept.append((square @ square).sum() + batch.to(probe.device))
    return {
        "retained": region.retained_bytes,
        "net": region.net_bytes,
        "peak": region.peak_increase_bytes,
        "reserve": region.reserved_increase_bytes,
        "growth": region.growth_bytes_per_batch,
        "one-time": region.one_time_bytes,
    }


def test_figures_are_the_same_with_the_history(probe, cuda, allocate, history_recorded, tmp_path):
    """Recording the history of allocations allocates nothing on the device."""
    without = figures(probe, allocate)
    assert without["retained"] == 8 * 32
    with history_recorded(tmp_path):
        assert is_recorded()
        recorded = figures(probe, allocate)
        assert probe.meter.dump_history(tmp_path / "snapshot.pickle")
    assert not is_recorded()
    assert recorded == without
    assert figures(probe, allocate) == without
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def test_allocator_that_refuses_to_record_has_no_history(probe, cuda, monkeypatch, tmp_path):
    """``backend:cudaMallocAsync`` raises if it is to record; tests
    are measured without a history.
    """

    def refuse(**options):
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    monkeypatch.setattr(probe.meter, "_history", AllocatorHistory("cuda"))
    assert not probe.meter.record_history()
    assert not probe.meter.dump_history(tmp_path / "snapshot.pickle")
    assert list(tmp_path.iterdir()) == []


def test_block_that_no_tensor_owns_is_retained(probe, cuda):
    """A library allocates blocks in which there is no tensor; they are retained like any other."""
    with probe.measure() as region:
        address = torch.cuda.caching_allocator_alloc(1000, cuda)
    assert region.retained_bytes == 1000
    with probe.measure() as region:
        torch.cuda.caching_allocator_delete(address)
    assert (region.retained_bytes, region.net_bytes) == (0, -1024)


def test_old_tensor_that_is_freed_does_not_hide_a_block_that_no_tensor_owns(probe, cuda, allocate):
    """If an old tensor is freed, a new block without a tensor is found, although the level is the
    same.
    """
    old = [allocate(MB)]
    with probe.measure() as region:
        old.clear()
        address = torch.cuda.caching_allocator_alloc(MB, cuda)
    torch.cuda.caching_allocator_delete(address)
    assert (region.retained_bytes, region.net_bytes) == (MB, 0)


def test_block_that_no_tensor_owns_is_named_by_the_line_that_allocated_it(recording_probe, cuda):
    """A block without a tensor has its line from the allocator's history; a tensor, a reference."""
    with recording_probe.measure() as region:
        kept = torch.zeros(10, device=cuda)
        address, line = torch.cuda.caching_allocator_alloc(1000, cuda), line_number()
    unowned, owned = sorted(region.retained, key=lambda holding: -holding.bytes)
    torch.cuda.caching_allocator_delete(address)
    assert (unowned.bytes, unowned.count, unowned.held_by) == (1000, 0, None)
    place = f"test_accelerator_history.py:{line} in {inspect.currentframe().f_code.co_name}"
    assert any(frame.endswith(place) for frame in unowned.created_at)
    assert (owned.bytes, owned.count) == (kept.nbytes, 1)


def line_number() -> int:
    """Return the caller's line."""
    return inspect.currentframe().f_back.f_lineno


def test_blocks_from_before_the_region_are_not_reported(recording_probe, cuda):
    """A block from before the region is not reported, whether a tensor owns it or not."""
    before = torch.cuda.caching_allocator_alloc(1000, cuda), torch.zeros(10, device=cuda)
    with recording_probe.measure() as region:
        pass
    assert region.retained_bytes == 0
    assert region.retained == ()
    torch.cuda.caching_allocator_delete(before[0])


def test_history_is_not_recorded_for_frames_alone(probe, cuda, allocate):
    """Lines of tensors are known without the allocator's history,
    so it is not recorded for them.
    """
    with probe.measure() as region:
        kept = allocate(1000)
        assert not is_recorded()
    assert not is_recorded()
    assert region.retained[0].bytes == kept.nbytes


@pytest.mark.usefixtures("users_recording")
def test_recording_of_the_user_goes_on_after_a_failed_test(probe, history_recorded, tmp_path):
    """After a failed test the user's own recording goes on, and the snapshot contains it."""
    with history_recorded(tmp_path):
        assert probe.meter.dump_history(tmp_path / "snapshot.pickle")
    assert is_recorded()
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


@pytest.mark.usefixtures("users_recording")
def test_recording_that_the_user_ends_is_not_started_again(probe, history_recorded, tmp_path):
    """If the user ends the recording, it is not started again, and no snapshot is written."""
    with history_recorded(tmp_path):
        torch.cuda.memory._record_memory_history(enabled=None)
        assert not probe.meter.dump_history(tmp_path / "snapshot.pickle")
    assert not is_recorded()


@pytest.mark.parametrize("legacy", [False, True], ids=["by-name", "legacy"])
def test_recording_that_the_user_starts_in_a_test_goes_on_after_it(
    cuda, history_recorded, tmp_path, legacy
):
    """A recording that the user starts goes on after the test, also if the plugin was recording."""
    with history_recorded(tmp_path):
        if legacy:
            torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=10)
        else:
            torch.cuda.memory._record_memory_history(max_entries=10)
    assert is_recorded()
    torch.cuda.memory._record_memory_history(enabled=None)


def test_recording_leaves_no_patch(cuda, history_recorded, tmp_path):
    """After a recording, the functions that start and stop it are torch's own again."""
    names = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
    before = [getattr(torch._C, name) for name in names]
    with history_recorded(tmp_path):
        assert [getattr(torch._C, name) for name in names] != before
    assert [getattr(torch._C, name) for name in names] == before


def test_nothing_is_recorded_without_a_folder_for_snapshots(cuda, history_recorded):
    """Without a folder for snapshots, the plugin records no history of allocations."""
    with history_recorded(None):
        assert not is_recorded()
