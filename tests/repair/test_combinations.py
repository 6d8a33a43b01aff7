"""Which combinations are tried, and in which order; and what is said of a step that never fits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from pytest_cka_memory.repair import search as searches
from pytest_cka_memory.repair import search_seconds
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.report import RepairReport, recommended
from pytest_cka_memory.repair.search import Search
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Figures, Refusal

MB = 2**20
NO_GRAD, BLOCKS, LOSS, HOST = "no_grad in validate", "every Block", "loss in parts", "on the host"
IDLE = ("del k", "foreach=False", "attention by flash")
TEXTBOOK = {NO_GRAD, BLOCKS, LOSS}


class Training:
    """A training step and a validation that keeps its graphs: the peak is one of either.

    Args:
        card_mb: the memory of the card.
    """

    def __init__(self, card_mb: int) -> None:
        self._card_mb = card_mb
        self._made: set[str] = set()

    def run(self) -> Figures:
        """Compute something, and return the peak that it is to have.

        Raises:
            MemoryError: if the card is too small for it.
        """
        kept = 1 if HOST in self._made else 10 if BLOCKS in self._made else 60
        logits = 5 if LOSS in self._made else 20
        validation = 0 if NO_GRAD in self._made else 4 * kept + 3 * logits
        peak_mb = 10 + max(kept, validation) + logits
        if peak_mb > self._card_mb:
            raise MemoryError(f"{peak_mb} MB")
        matrix = torch.ones(8, 8)
        for _ in range(3 + (BLOCKS in self._made)):
            matrix = matrix @ matrix
        return Figures(peak_mb * MB, peak_mb * MB)

    def change(self, name: str, numbers: str = "") -> Change:
        """Return a change that makes `run` need less."""
        again = name in (BLOCKS, LOSS)
        trying = partial(self._trying, name)
        return Change(name, name, trying, numbers, advice=f"write {name}", recomputes=again)

    @contextmanager
    def _trying(self, name: str, copied: Copied) -> Iterator[None]:
        copied.bytes += 30 * MB if name == HOST else 0
        self._made.add(name)
        yield
        self._made.remove(name)


def searched(
    monkeypatch: pytest.MonkeyPatch,
    *,
    card_mb: int,
    budget_mb: int | None = None,
    also: Sequence[str] = (),
    seconds: float | None = None,
    run_s: float = 0.0,
) -> RepairReport:
    """Search for what lowers the peak of the training on a card, each run of which takes `run_s`
    seconds of processor time.
    """
    training = Training(card_mb)
    passed = [0.0]

    def run() -> Figures:
        passed[0] += run_s
        return training.run()

    monkeypatch.setattr(searches.time, "process_time", lambda: passed[0])
    changes = [training.change(name) for name in (*IDLE, NO_GRAD, BLOCKS, HOST)]
    changes.append(training.change(LOSS, LAST_DIGITS))

    def offered(observed: Observed) -> tuple[Sequence[Change], Sequence[Refusal]]:
        return changes, []

    monkeypatch.setattr(searches, "offered", offered)
    search = Search(
        run,
        lambda error: isinstance(error, MemoryError),
        budget_bytes=None if budget_mb is None else budget_mb * MB,
        also=also,
        seconds=seconds,
    )
    return RepairReport(search.search(), "emulate:cuda:h100-nvl")


@pytest.mark.parametrize("card_mb", [1000, 300], ids=["fits-a-card", "fits-none"])
@pytest.mark.parametrize("budget_mb", [None, 30, 75, 5], ids=["none", "low", "high", "too-low"])
def test_what_saves_most_is_combined_before_what_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, card_mb: int, budget_mb: int | None
) -> None:
    """The best of all groups is the first combination, without copies to the host; changes that
    saved nothing alone come last.
    """
    repairs = searched(monkeypatch, card_mb=card_mb, budget_mb=budget_mb).repairs
    combined = [{change.name for change in trial.changes} for trial in repairs.trials]
    combined = [names for names in combined if len(names) > 1]
    assert combined[0] == TEXTBOOK
    are_idle = [bool(names & {*IDLE}) for names in combined]
    if card_mb == 1000:
        assert are_idle == sorted(are_idle)
    assert {HOST, LOSS} in combined
    assert repairs.is_complete


def test_step_that_fits_no_card_is_ranked_by_peaks(
    monkeypatch: pytest.MonkeyPatch, table_of: Callable[[str], dict[str, str]]
) -> None:
    """Nothing that runs is said to save nothing, operations are counted under a change that
    computes nothing again, and the report says where the step as it is ran out of memory.
    """
    report = searched(monkeypatch, card_mb=300)
    text = str(report)
    assert report.repairs.as_it_is.figures is None
    assert "saves nothing" not in text
    rows = table_of(text)
    assert [name for name in rows if name in {NO_GRAD, BLOCKS, HOST}] == [NO_GRAD, HOST, BLOCKS]
    assert "+0 %" in rows[NO_GRAD]
    assert "+33 %" in rows[BLOCKS]
    assert f"runs out of memory alone: {'; '.join(IDLE)}" in text
    where = "as it is, it fits no card that can be emulated; the largest is full, at "
    assert where + "test_combinations.py:" in text
    assert ": 330 MB" in text


def test_time_of_a_search_is_that_of_a_hundred_runs_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 20 seconds, a search over a large model would end among the single changes."""
    assert [search_seconds(run_s) for run_s in (0, 0.2, 1.5, 3, 60)] == [20, 20, 150, 300, 300]
    by_default = searched(monkeypatch, card_mb=1000, run_s=3)
    assert by_default.repairs.is_complete
    assert len(by_default.repairs.trials) > 7
    strict = searched(monkeypatch, card_mb=1000, run_s=3, seconds=20)
    assert not strict.repairs.is_complete
    assert len(strict.repairs.trials) < 7
    assert "the search ran out of time" in str(strict)


@pytest.mark.parametrize("card_mb", [1000, 300], ids=["fits-a-card", "fits-none"])
@pytest.mark.parametrize("budget_mb", [None, 16, 26, 30, 75])
def test_recommended_trials_have_rows_and_no_idle_part(
    monkeypatch: pytest.MonkeyPatch,
    table_of: Callable[[str], dict[str, str]],
    card_mb: int,
    budget_mb: int | None,
) -> None:
    """What is recommended can be compared with the other rows, and named by ``--also``."""
    report = searched(monkeypatch, card_mb=card_mb, budget_mb=budget_mb)
    rows = table_of(str(report))
    assert report.recommended
    for trial in report.recommended:
        assert trial.name in rows
        assert not report.repairs.has_idle_part(trial)
        assert not {*IDLE} & {change.name for change in trial.changes}


@pytest.mark.parametrize(
    ("budget_mb", "cheapest"),
    [(75, {NO_GRAD, LOSS}), (30, TEXTBOOK), (16, {NO_GRAD, HOST, LOSS})],
)
def test_copies_to_the_host_are_not_free(
    monkeypatch: pytest.MonkeyPatch, budget_mb: int, cheapest: set[str]
) -> None:
    """They are recommended where nothing else fits, and the report says how much is copied."""
    report = searched(monkeypatch, card_mb=300, budget_mb=budget_mb)
    first = report.repairs.fitting[0]
    assert {change.name for change in first.changes} == cheapest
    assert bool(first.host_bytes) == (HOST in cheapest)
    assert ("copies 30.00 MB to the host in one run, and back" in str(report)) == (HOST in cheapest)


def test_lowest_peak_without_copies_is_beside_that_with_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a budget both are written out."""
    found = recommended(searched(monkeypatch, card_mb=1000).repairs)
    assert {change.name for change in found[-1].changes} == TEXTBOOK
    assert any(trial.host_bytes for trial in found)


@pytest.mark.parametrize("also", [f"{BLOCKS} + {NO_GRAD}", f"{IDLE[0]} + {IDLE[1]} + {BLOCKS}"])
def test_combination_that_is_asked_for_is_tried(monkeypatch: pytest.MonkeyPatch, also: str) -> None:
    """``--also`` may name any changes of the table, in any order."""
    report = searched(monkeypatch, card_mb=1000, also=[also])
    found = [{change.name for change in trial.changes} for trial in report.recommended]
    assert set(also.split(" + ")) in found
    assert "no change of this name" not in str(report)
