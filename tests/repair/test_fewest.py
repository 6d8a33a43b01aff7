"""The fewest checkpoints for a budget are not more than those that trying all choices finds."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import small_models

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.changes import checkpointing
from pytest_cka_memory.repair.changes.checkpointing import Selection, change_for, fewest
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.trials import Figures, tried

pytestmark = pytest.mark.usefixtures("imports_excluded_from_search")

MODELS = [
    (8, 8, 8),
    (8, 8, 8, 8),
    (16, 8, 4, 2),
    (2, 4, 8, 16),
    (2, 16, 2, 16),
    (16, 2, 2, 16),
    (8, 1, 8, 1),
    (1, 1, 1, 16),
    (16, 1, 1, 1),
    (4, 4, 16, 4),
    (12, 3, 7, 5),
    (1, 16, 16, 1),
]
"""How wide the blocks of each model are."""
SHARES = (0.75, 0.4)
"""Budgets, as shares of what the best choice saves."""


def peaks_of(factors: tuple[int, ...]) -> tuple[Selection, Callable[[Selection], int]]:
    """Return the blocks of a model, and a function that measures its peak with some of them
    checkpointed.
    """
    step = partial(small_models.train, steps=1, batch=4, factors=factors)
    with observing() as observed:
        step()
    (root,) = observed.roots
    known: dict[tuple[int, ...] | None, int] = {}

    def run() -> Figures:
        gc.collect(0)
        region = MemoryProbe("cpu", is_thorough=lambda: False).run(step)
        return Figures(region.peak_bytes - region.start_bytes, None)

    def peak(selection: Selection) -> int:
        key = selection.numbers
        if key not in known:
            changes = () if key == () else (change_for(selection),)
            trial = tried(changes, run, lambda error: False)
            assert trial.figures is not None, trial.error
            known[key] = trial.figures.peak_bytes
        return known[key]

    return Selection(root, small_models.Block), peak


@pytest.mark.slow
@pytest.mark.parametrize("factors", MODELS, ids=str)
def test_not_more_checkpoints_than_brute_force(factors: tuple[int, ...]) -> None:
    """For each budget the search returns as few blocks as the best of all choices."""
    every, peak = peaks_of(factors)
    count = len(factors)

    def chosen(numbers: tuple[int, ...]) -> Selection:
        return Selection(every.root, every.kind, None if len(numbers) == count else numbers)

    sizes = range(1, count + 1)
    choices = [some for size in sizes for some in combinations(range(count), size)]
    lowest, highest = min(peak(chosen(some)) for some in choices), peak(chosen(()))
    for share in SHARES:
        budget = highest - round(share * (highest - lowest))
        found = fewest(every, lambda selection, budget=budget: peak(selection) <= budget)
        best = min(len(some) for some in choices if peak(chosen(some)) <= budget)
        assert found is not None
        assert peak(chosen(found)) <= budget
        assert len(found) == best


def test_nothing_if_all_checkpoints_are_too_few() -> None:
    """A budget that even all checkpoints exceed has no answer."""
    every, peak = peaks_of((8, 8, 8))
    assert fewest(every, lambda selection: peak(selection) < peak(every)) is None


def test_numbers_are_written_as_a_range_if_they_are_one() -> None:
    """The patch has the shortest code for the numbers of the modules."""
    written = [checkpointing._written(some) for some in ((0, 1, 2), (0, 2, 4), (3, 4), (0, 1, 3))]
    assert written == ["range(3)", "range(0, 5, 2)", "range(3, 5)", "(0, 1, 3,)"]
