"""Caches do not grow with the number of resizes or files, and do not change figures."""

import random
from collections.abc import Callable

import pytest
import torch

from pytest_cka_memory.core import places
from pytest_cka_memory.meters.ledger import Ledger


def entries_of(ledger: Ledger) -> list[int]:
    """Return for each live storage how many changes of its size are remembered."""
    return [len(entry.history) for entry in ledger._live.values()]


@pytest.mark.parametrize(
    "size_at",
    [lambda n: 10 + n % 2, lambda n: 10 + n, lambda n: 20_000 - n],
    ids=["alternating", "growing", "shrinking"],
)
def test_storage_that_is_resized_often_takes_little_memory(size_at: Callable[[int], int]) -> None:
    """Of a storage that is resized often, only sizes at marks and at the peak are remembered."""
    ledger = Ledger()
    storage = torch.UntypedStorage(10)
    ledger.record(storage)
    mark = ledger.mark()
    for number in range(10_000):
        storage.resize_(size_at(number))
        ledger.record(storage)
    assert entries_of(ledger)[0] <= 4
    assert ledger.level == size_at(9_999)
    assert ledger.retained_since(mark) == size_at(9_999) - 10
    assert ledger.serial == 10_001 - (size_at(0) == 10)


def figures_of(ledger: Ledger, marks: list[int]) -> tuple[object, ...]:
    retained = [ledger.retained_since(mark) for mark in marks]
    at_peak = sorted(group.bytes for group in ledger.alive_at_peak())
    return ledger.level, ledger.peak, ledger.serial, retained, at_peak


class RememberingEverything(Ledger):
    """A ledger that keeps every change, because every moment counts as marked."""

    def _resize(self, entry, size):  # type: ignore[no-untyped-def]
        self._last_mark = self.serial + 1
        super()._resize(entry, size)


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_a_ledger_that_remembers_every_change(seed: int) -> None:
    """Random allocations, resizes, frees and marks give the figures of a complete ledger."""
    chance = random.Random(seed)
    ledgers = [Ledger(), RememberingEverything()]
    storages: list[torch.UntypedStorage] = []
    marks: list[int] = [0]
    remembered = [0, 0]
    for _ in range(400):
        step = chance.choice(["allocate", "resize", "resize", "resize", "free", "mark", "reset"])
        if step == "allocate":
            storages.append(torch.UntypedStorage(chance.randrange(100)))
        elif step == "resize" and storages:
            chance.choice(storages).resize_(chance.randrange(200))
        elif step == "free" and storages:
            storages.pop(chance.randrange(len(storages)))
        elif step == "mark":
            (mark,) = {ledger.mark() for ledger in ledgers}
            marks.append(mark)
        elif step == "reset" and chance.random() < 0.3:
            for ledger in ledgers:
                ledger.reset_peak()
        for ledger in ledgers:
            for storage in storages:
                ledger.record(storage)
            ledger.settle()
        bounded, complete = (figures_of(ledger, marks) for ledger in ledgers)
        assert bounded == complete
        remembered = [
            sum(entries_of(one), so_far) for one, so_far in zip(ledgers, remembered, strict=True)
        ]
    assert remembered[0] < remembered[1]


def test_cache_of_file_names_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated code may have new file names each time, so their
    cache is emptied when it is full.
    """
    monkeypatch.setattr(places, "_MOST_FILES", 10)
    monkeypatch.setattr(places, "is_foreign_file", type(places.is_foreign_file)())
    own = [places.is_foreign(f"/home/me/generated_{number}.py") for number in range(25)]
    assert len(places.is_foreign_file) <= 10
    assert own == [False] * 25
    assert places.is_foreign(torch.__file__)
