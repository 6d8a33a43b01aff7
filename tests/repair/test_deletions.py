"""``del`` of local variables: which are found, and that the patched copy has the trial's peak."""

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair import diff, patched
from pytest_cka_memory.repair.changes import deletions
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.report import RepairReport
from pytest_cka_memory.repair.trials import EXACT, Change, Figures, tried


def changes_of(step: Callable[[], Any]) -> dict[str, Change]:
    """Return the deletions that are offered for a step, by their names."""
    with observing() as observed:
        step()
    return {change.name: change for change in deletions.offers(observed)}


def peak_of(step: Callable[[], Any]) -> Figures:
    """Return what a second run needs, because a first one may allocate more."""
    for _ in range(2):
        region = MemoryProbe("cpu").run(step)
        del region.result
    return Figures(region.peak_bytes - region.start_bytes, None)


def test_a_variable_is_deleted_once_in_one_place() -> None:
    """Two blocks that end in the same line may delete it; to do both would be an error."""
    assert list(changes_of(loops.assigned_in_the_last_line_of_a_block)) == ["del out"]


def test_result_of_the_last_iteration_is_deleted(tmp_path: Path) -> None:
    """``del`` frees it before the next forward pass; the copy has the peak of the trial."""
    step = loops.last_iteration
    change = changes_of(step)["del out"]
    before = step.__code__
    trial = tried([change], lambda: peak_of(step), lambda error: False)
    assert trial.error == ""
    assert step.__code__ is before
    assert peak_of(step).peak_bytes - trial.peak_bytes == 4 * loops.SIZE
    assert trial.numbers == EXACT

    assert trial.edits is not None
    assert [line for line in diff(trial.edits) if line.startswith("+ ")] == ["+        del out"]
    path = tmp_path / "patched_loops.py"
    (text,) = patched(trial.edits).values()
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("patched_loops", path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert peak_of(copy.last_iteration).peak_bytes == trial.peak_bytes


def test_function_is_found_although_the_collector_ignores_it() -> None:
    """A program may have called ``gc.freeze()``; then no collector's list has its functions."""
    step = loops.last_iteration
    change = changes_of(step)["del out"]
    gc.freeze()
    try:
        trial = tried([change], lambda: peak_of(step), lambda error: False)
    finally:
        gc.unfreeze()
    assert trial.error == ""
    assert peak_of(step).peak_bytes - trial.peak_bytes == 4 * loops.SIZE


def test_tensor_that_is_not_used_before_the_peak() -> None:
    """A tensor is deleted after the last statement that uses it."""
    change = changes_of(loops.before_the_peak)["del first"]
    trial = tried([change], lambda: peak_of(loops.before_the_peak), lambda error: False)
    assert peak_of(loops.before_the_peak).peak_bytes - trial.peak_bytes == 16 * loops.SIZE


def test_variables_of_one_name_in_two_functions_are_two_changes() -> None:
    """Their places tell them apart, so each is tried, and both together save both."""
    step = loops.same_name_twice
    changes = changes_of(step)
    before = peak_of(step).peak_bytes
    saved = [
        before - tried([change], lambda: peak_of(step), lambda error: False).peak_bytes
        for change in changes.values()
    ]
    assert saved == [16 * loops.SIZE, 16 * loops.SIZE, 32 * loops.SIZE]
    assert all(name.count("first after loops.py:") in (1, 2) for name in changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "names"),
    [
        (
            loops.three_before_the_peak,
            {"del first", "del second", "del third", "del first, second"},
        ),
        (loops.before_the_peak, {"del first"}),
    ],
    ids=["two-of-three", "one"],
)
def test_combined_deletion_has_no_name_that_saves_nothing(
    repairs_of: Callable[..., RepairReport], step: Callable[[], Any], names: set[str]
) -> None:
    """What is deleted beside others has to lower the peak further."""
    deleting = {name for name in repairs_of(step).peaks_mb if name.startswith("del ")}
    assert {name for name in deleting if "+" not in name} == names


def test_fewest_variables_are_found_by_their_peaks() -> None:
    """A variable stays if the peak without its deletion is higher."""
    everything = changes_of(loops.three_before_the_peak)
    singles = [change for change in everything.values() if len(change.part) == 1]
    (every,) = (change for change in everything.values() if len(change.part) == 3)

    def peak(saving: dict[str, int]) -> Callable[[Change], int]:
        return lambda change: 100 - sum(saving.get(each.name, 0) for each in change.part)

    def names(saving: dict[str, int]) -> set[str]:
        change = deletions.needed(every, singles, peak(saving))
        return {each.name for each in change.part}

    assert names({"first": 1, "second": 2, "third": 4}) == {"first", "second", "third"}
    assert names({"first": 1, "third": 4}) == {"first", "third"}
    assert names({"second": 1}) == {"second"}
    assert deletions.needed(every, singles, lambda change: None) is every


@pytest.mark.parametrize(
    "step",
    [loops.used_later, loops.used_in_the_next_iteration, loops.captured, loops.read_by_locals],
    ids=lambda step: step.__name__,
)
def test_variables_that_are_still_needed(step: Callable[[], Any]) -> None:
    """What may be read later is not offered for deletion."""
    assert changes_of(step) == {}
