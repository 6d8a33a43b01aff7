"""``del`` of local variables: which are found, and that the patched copy has the trial's peak."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.changes import deletions
from pytest_cka_memory.repair.edits import diff, patched
from pytest_cka_memory.repair.observation import observing
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


def test_tensor_that_is_not_used_before_the_peak() -> None:
    """A tensor is deleted after the last statement that uses it."""
    change = changes_of(loops.before_the_peak)["del first"]
    trial = tried([change], lambda: peak_of(loops.before_the_peak), lambda error: False)
    assert peak_of(loops.before_the_peak).peak_bytes - trial.peak_bytes == 16 * loops.SIZE


@pytest.mark.parametrize(
    "step",
    [loops.used_later, loops.used_in_the_next_iteration, loops.captured, loops.read_by_locals],
    ids=lambda step: step.__name__,
)
def test_variables_that_are_still_needed(step: Callable[[], Any]) -> None:
    """What may be read later is not offered for deletion."""
    assert changes_of(step) == {}
