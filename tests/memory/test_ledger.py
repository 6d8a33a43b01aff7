"""The ledger of storages: allocations, growth, deaths and levels, without a region."""

import gc
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

from pytest_cka_memory.meters.ledger import ledger as ledger_module
from pytest_cka_memory.meters.ledger.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_a_storage_is_booked_once(ledger: Ledger) -> None:
    """However often, and through whatever view, it is met."""
    tensor = torch.zeros(10)
    for view in (tensor, tensor[:2], tensor.view(2, 5), tensor.detach()):
        ledger.book(view.untyped_storage())
    assert (ledger.level, ledger.peak) == (40, 40)


def test_a_death_is_told_by_the_storage_itself(ledger: Ledger) -> None:
    """Nothing here keeps it alive; the peak remembers it."""
    tensor = torch.zeros(10)
    ledger.book(tensor.untyped_storage())
    del tensor
    ledger.settle()
    assert (ledger.level, ledger.peak) == (0, 40)


def test_a_view_keeps_its_storage_alive(ledger: Ledger) -> None:
    """One element of ten: all ten stay."""
    tensor = torch.zeros(10)
    ledger.book(tensor.untyped_storage())
    view = tensor[:1]
    del tensor
    ledger.settle()
    assert ledger.level == 40
    del view
    ledger.settle()
    assert ledger.level == 0


def test_dead_bytes_are_gone_before_new_ones_count(ledger: Ledger) -> None:
    """The peak of one tensor after another is that of one."""
    for _ in range(5):
        ledger.book(torch.zeros(10).untyped_storage())
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
def test_a_storage_of_before_weighs_what_it_grew(
    ledger: Ledger, sizes: list[int], level: int, retained: int
) -> None:
    """Growth counts as born; regrowth to the size of before does not."""
    storage = torch.UntypedStorage(sizes[0])
    ledger.book(storage)
    mark = ledger.serial
    for size in sizes[1:]:
        storage.resize_(size)
        ledger.book(storage)
    assert (ledger.level, ledger.retained_since(mark)) == (level, retained)
    assert ledger.peak == max(sizes)


def test_each_mark_sees_its_own_births(ledger: Ledger) -> None:
    """Nested regions ask about nested times."""
    tensors, marks = [], []
    for size in (1, 2, 3):
        marks.append(ledger.serial)
        tensors.append(torch.zeros(size, dtype=torch.uint8))
        ledger.book(tensors[-1].untyped_storage())
    assert [ledger.retained_since(mark) for mark in marks] == [6, 5, 3]
    del tensors[1]
    assert [ledger.retained_since(mark) for mark in marks] == [4, 3, 3]


def test_an_escaped_storage_never_weighs_but_its_growth_does(ledger: Ledger) -> None:
    """What the ledger met too late to count is blamed on nobody."""
    storage = torch.UntypedStorage(100)
    ledger.book(storage, born=False)
    assert (ledger.level, ledger.retained_since(0)) == (0, 0)
    ledger.book(storage)
    assert ledger.level == 0
    storage.resize_(130)
    ledger.book(storage)
    assert (ledger.level, ledger.retained_since(0)) == (30, 30)
    storage.resize_(40)
    ledger.book(storage)
    assert (ledger.level, ledger.retained_since(0)) == (0, 0)
    del storage
    ledger.settle()
    assert ledger.level == 0


def test_an_address_used_again_is_a_new_storage(ledger: Ledger) -> None:
    """The allocator hands the same address out at once."""
    marks = []
    for _ in range(200):
        tensor = torch.zeros(10)
        marks.append(ledger.serial)
        ledger.book(tensor.untyped_storage())
        assert (ledger.level, ledger.retained_since(marks[-1])) == (40, 40)
        del tensor
    ledger.settle()
    assert (ledger.level, ledger.peak) == (0, 40)


def test_a_collection_inside_a_booking_is_harmless(ledger: Ledger) -> None:
    """A finaliser may compute, and so book, while the ledger is busy booking."""

    class Finaliser:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ledger.book(torch.zeros(10).untyped_storage())

    gc.collect()
    Finaliser()
    with ledger._lock:
        gc.collect()
    ledger.settle()
    assert ledger.level == 0


def test_what_a_collection_books_in_the_middle_of_a_booking_waits(ledger: Ledger) -> None:
    """Even the very storage that is being booked: nothing is counted twice."""
    kept = [torch.zeros(10).untyped_storage() for _ in range(200)]

    def book_all(phase: str, info: object) -> None:
        for storage in kept:
            ledger.book(storage)

    thresholds = gc.get_threshold()
    gc.callbacks.append(book_all)
    gc.set_threshold(1)
    try:
        for storage in kept:
            ledger.book(storage)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(book_all)
    assert ledger.level == ledger.retained_since(0) == 200 * 40
    assert sum(birth.bytes for birth in ledger.allocations_since(0)) == 200 * 40


def test_a_collection_may_come_at_any_line_of_a_booking(ledger: Ledger) -> None:
    """And book what is being booked. Python 3.12 runs them between lines, as a tracer is run."""
    storage = torch.zeros(10).untyped_storage()

    def book_again(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        if ledger._busy:
            ledger.book(storage)
        return book_again

    before = sys.gettrace()
    sys.settrace(book_again)
    try:
        ledger.book(storage)
    finally:
        sys.settrace(before)
    assert ledger.level == ledger.peak == ledger.retained_since(0) == 40


def test_threads_may_book_at_once(ledger: Ledger) -> None:
    """No byte is lost or counted twice."""
    kept: list[torch.Tensor] = []

    def work() -> None:
        for size in range(1, 200):
            tensor = torch.zeros(size, dtype=torch.uint8)
            ledger.book(tensor.untyped_storage())
            if size % 2:
                kept.append(tensor)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.settle()
    assert ledger.level == sum(tensor.numel() for tensor in kept) == 4 * 100 * 100
