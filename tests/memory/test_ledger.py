"""The ledger of storages: what it counts as allocated, grown and freed, without a region."""

import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

from pytest_cka_memory.meters import ledger as ledger_module
from pytest_cka_memory.meters.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_a_storage_is_counted_once_however_often_it_is_recorded(ledger: Ledger) -> None:
    """Recording a storage again, or through a view, adds no bytes to the ledger."""
    tensor = torch.zeros(10)
    for view in (tensor, tensor[:2], tensor.view(2, 5), tensor.detach()):
        ledger.record(view.untyped_storage())
    assert (ledger.level, ledger.peak) == (40, 40)


def test_a_freed_storage_lowers_the_level_but_not_the_peak(ledger: Ledger) -> None:
    """The ledger does not keep a storage alive; freeing it lowers the level, not the peak."""
    tensor = torch.zeros(10)
    ledger.record(tensor.untyped_storage())
    del tensor
    ledger.settle()
    assert (ledger.level, ledger.peak) == (0, 40)


def test_a_view_keeps_its_whole_storage_counted(ledger: Ledger) -> None:
    """A view of one element keeps its whole storage of ten elements counted."""
    tensor = torch.zeros(10)
    ledger.record(tensor.untyped_storage())
    view = tensor[:1]
    del tensor
    ledger.settle()
    assert ledger.level == 40
    del view
    ledger.settle()
    assert ledger.level == 0


def test_freed_bytes_are_subtracted_before_new_ones_are_added(ledger: Ledger) -> None:
    """Tensors that are allocated one after another have the peak of one of them."""
    for _ in range(5):
        ledger.record(torch.zeros(10).untyped_storage())
    assert ledger.peak == 40


@pytest.mark.parametrize(
    ("sizes", "level", "retained"),
    [
        pytest.param([100], 100, 0, id="unchanged"),
        pytest.param([100, 150], 150, 50, id="grown"),
        pytest.param([100, 60], 60, 0, id="shrunk"),
        pytest.param([100, 0, 100], 100, 0, id="shrunk-and-regrown"),
        pytest.param([100, 0, 101], 101, 1, id="regrown-by-one-byte-more"),
        pytest.param([100, 150, 100], 100, 0, id="grown-and-shrunk"),
        pytest.param([0, 100], 100, 100, id="from-nothing"),
    ],
)
def test_retained_counts_only_the_growth_of_an_older_storage(
    ledger: Ledger, sizes: list[int], level: int, retained: int
) -> None:
    """An older storage that grows counts only its growth, not growing back to an earlier size."""
    storage = torch.UntypedStorage(sizes[0])
    ledger.record(storage)
    mark = ledger.mark()
    for size in sizes[1:]:
        storage.resize_(size)
        ledger.record(storage)
    assert (ledger.level, ledger.retained_since(mark)) == (level, retained)
    assert ledger.peak == max(sizes)


def test_each_mark_counts_what_was_allocated_after_it(ledger: Ledger) -> None:
    """Each of several marks, as nested regions take them, counts what was allocated after it."""
    tensors, marks = [], []
    for size in (1, 2, 3):
        marks.append(ledger.mark())
        tensors.append(torch.zeros(size, dtype=torch.uint8))
        ledger.record(tensors[-1].untyped_storage())
    assert [ledger.retained_since(mark) for mark in marks] == [6, 5, 3]
    del tensors[1]
    assert [ledger.retained_since(mark) for mark in marks] == [4, 3, 3]


def test_a_storage_found_too_late_counts_only_its_growth(ledger: Ledger) -> None:
    """A storage that is found late adds only its later growth to a region."""
    storage = torch.UntypedStorage(100)
    ledger.record(storage, counted=False)
    assert (ledger.level, ledger.retained_since(0)) == (0, 0)
    ledger.record(storage)
    assert ledger.level == 0
    storage.resize_(130)
    ledger.record(storage)
    assert (ledger.level, ledger.retained_since(0)) == (30, 30)
    storage.resize_(40)
    ledger.record(storage)
    assert (ledger.level, ledger.retained_since(0)) == (0, 0)
    del storage
    ledger.settle()
    assert ledger.level == 0


def test_a_storage_at_a_reused_address_is_counted_as_new(ledger: Ledger) -> None:
    """The allocator often returns a freed address; a storage there counts as new."""
    marks = []
    for _ in range(200):
        tensor = torch.zeros(10)
        marks.append(ledger.mark())
        ledger.record(tensor.untyped_storage())
        assert (ledger.level, ledger.retained_since(marks[-1])) == (40, 40)
        del tensor
    ledger.settle()
    assert (ledger.level, ledger.peak) == (0, 40)


def test_a_finalizer_may_record_while_the_ledger_is_locked(ledger: Ledger) -> None:
    """A finalizer that a collection runs may allocate in the middle of another call to record."""

    class Finaliser:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ledger.record(torch.zeros(10).untyped_storage())

    gc.collect()
    Finaliser()
    with ledger._lock:
        gc.collect()
    ledger.settle()
    assert ledger.level == 0


def test_storages_recorded_during_another_call_are_counted_once(ledger: Ledger) -> None:
    """A storage counts once, even if a collection records it during the same call."""
    kept = [torch.zeros(10).untyped_storage() for _ in range(200)]

    def book_all(phase: str, info: object) -> None:
        for storage in kept:
            ledger.record(storage)

    thresholds = gc.get_threshold()
    gc.callbacks.append(book_all)
    gc.set_threshold(1)
    try:
        for storage in kept:
            ledger.record(storage)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(book_all)
    assert ledger.level == ledger.retained_since(0) == 200 * 40
    assert sum(one.bytes for one in ledger.allocations_since(0)) == 200 * 40


def test_recording_a_storage_again_at_any_line_counts_it_once(ledger: Ledger) -> None:
    """A storage counts once, also if a collection, simulated by a
    tracer, records it at any line.
    """
    storage = torch.zeros(10).untyped_storage()

    def book_again(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        if ledger._is_changing:
            ledger.record(storage)
        return book_again

    before = sys.gettrace()
    sys.settrace(book_again)
    try:
        ledger.record(storage)
    finally:
        sys.settrace(before)
    assert ledger.level == ledger.peak == ledger.retained_since(0) == 40


def test_concurrent_threads_lose_no_bytes(ledger: Ledger) -> None:
    """Threads that record at once lose no byte, and count none twice."""
    kept: list[torch.Tensor] = []

    def work() -> None:
        for size in range(1, 200):
            tensor = torch.zeros(size, dtype=torch.uint8)
            ledger.record(tensor.untyped_storage())
            if size % 2:
                kept.append(tensor)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.settle()
    assert ledger.level == sum(tensor.numel() for tensor in kept) == 4 * 100 * 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_record_although_another_thread_held_the_lock(ledger: Ledger) -> None:
    """A child forked while another thread held the lock has no such thread, and can record."""
    is_locked, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger._lock:
            is_locked.set()
            may_release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_locked.wait(60)
    storage = torch.UntypedStorage(10)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        ledger.record(storage)
        os._exit(0 if ledger.level == 10 else 1)
    _, status = os.waitpid(child, 0)
    may_release.set()
    thread.join()
    assert status == 0


@pytest.mark.parametrize(("is_shared", "collected_bytes"), [(True, 4000), (False, 0)])
def test_batch_of_a_worker_is_no_storage_whose_object_was_freed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, is_shared: bool, collected_bytes: int
) -> None:
    """In torch 2.9 a collection may free only the Python object of a storage, which then gets
    another. A storage in shared memory at that address, and of that size, is another storage.
    """
    monkeypatch.setattr(ledger_module, "FREES_ONLY_OBJECTS", True)
    monkeypatch.setattr(ledger_module, "storage_key", lambda storage: 1)
    collected = ledger.count_collected(ledger.mark())
    freed = torch.ones(1000)
    ledger.record(freed.untyped_storage())
    ledger.note_collection(begins=True)
    del freed
    ledger.note_collection(begins=False)
    assert collected() == 4000
    other = torch.ones(1000)
    if is_shared:
        other.share_memory_()
    ledger.record(other.untyped_storage())
    assert collected() == collected_bytes
    assert ledger.level == 4000
