"""Try changes, alone and in combinations, and find the cheapest that fit a budget."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

from pytest_cka_memory.repair.changes import checkpointing, deletions, offered
from pytest_cka_memory.repair.observation import Observed, observing
from pytest_cka_memory.repair.smaller import Sizes, without_random_values
from pytest_cka_memory.repair.trials import (
    Change,
    Figures,
    Refusal,
    Runner,
    Trial,
    flops_of,
    keeps_numbers,
    limit_after,
    line_of,
    tried,
)

LEAST_SHARE = 0.005
"""A change that saves less than this share of the peak adds nothing to a combination."""


@dataclass
class Repairs:
    """What was tried, and what it needed."""

    as_it_is: Trial
    trials: list[Trial] = field(default_factory=list)
    """Every change that ran, and every combination."""
    refusals: list[Refusal] = field(default_factory=list)
    budget_bytes: int | None = None
    sizes: Sizes = field(default_factory=Sizes)
    """How large the inputs of the step are."""
    is_complete: bool = False
    """False if it was interrupted, or ended for lack of time."""
    was_interrupted: bool = False
    also: Collection[str] = ()
    """Names of further trials to say how to write."""

    def saved_bytes(self, trial: Trial) -> int:
        """Return by how much the peak is lower than that of the step as it is; 0 if not known."""
        if self.as_it_is.figures is None or trial.figures is None:
            return 0
        return self.as_it_is.peak_bytes - trial.peak_bytes

    @property
    def ran(self) -> list[Trial]:
        """The trials that ended, lowest peak first."""
        done = [trial for trial in self.trials if trial.figures is not None]
        return sorted(done, key=lambda trial: (trial.peak_bytes, len(trial.changes)))

    @property
    def lowest(self) -> Trial | None:
        """The lowest peak, with any change; None if nothing lowers it."""
        return self._lowest_of(trial for trial in self.ran if not self.has_idle_part(trial))

    @property
    def lowest_exact(self) -> Trial | None:
        """The lowest peak whose numbers are the same but for the last digits; None if none."""
        exact = (trial for trial in self.ran if keeps_numbers(trial))
        return self._lowest_of(trial for trial in exact if not self.has_idle_part(trial))

    @property
    def fitting(self) -> list[Trial]:
        """The trials that fit the budget, cheapest first."""
        if self.budget_bytes is None:
            return []
        return sorted((t for t in self.ran if t.peak_bytes <= self.budget_bytes), key=self.cost)

    def has_idle_part(self, trial: Trial) -> bool:
        """Whether fewer of the same changes do nearly as well."""
        return any(
            set(other.changes) < set(trial.changes)
            and other.peak_bytes <= trial.peak_bytes * (1 + LEAST_SHARE)
            for other in self.ran
        )

    def _lowest_of(self, trials: Iterable[Trial]) -> Trial | None:
        """Return the lowest peak, or the cheapest of those that are hardly higher."""
        known = self.as_it_is.figures is None
        saving = [trial for trial in trials if known or self.saved_bytes(trial) > 0]
        return self.cheapest_of_lowest(saving) if saving else None

    def cheapest_of_lowest(self, trials: Sequence[Trial]) -> Trial:
        """Return the cheapest trial whose peak is the lowest or hardly higher."""
        highest = min(trial.peak_bytes for trial in trials) * (1 + LEAST_SHARE)
        return min((t for t in trials if t.peak_bytes <= highest), key=self.cost)

    def cost(self, trial: Trial) -> tuple[int, ...]:
        """Return what to compare trials by: the work that they add, then what numbers change."""
        flops = max(0, (trial.flops or 0) - (self.as_it_is.flops or 0))
        if trial.flops is None and any(change.recomputes for change in trial.changes):
            flops = sys.maxsize  # not counted for lack of time
        rounds_updates = any(change.rounds_updates for change in trial.changes)
        numbers = int(bool(trial.numbers)) if keeps_numbers(trial) else 2 + rounds_updates
        # The counter does not see all operations: what computes nothing again comes first.
        again = int(any(change.recomputes for change in trial.changes))
        work = (trial.cards, flops, trial.host_bytes, numbers, again, len(trial.changes))
        return (*work, trial.lines, trial.peak_bytes)


_MOST_COMBINED = 3
_LEAST_COUNTED = 2
"""So many operations are counted even if there is no time left."""


class Search:
    """Runs a step under changes, as long as there is time.

    Args:
        run: runs the step once and returns its figures.
        is_out_of_memory: whether an exception says that the device is full.
        progress: called with a line for each trial.
        budget_bytes: what the peak must not exceed; None to look for the lowest one.
        seconds: after so many seconds of processor time no new trial begins.
        has_values: whether the device computes values.
        cards: how many are emulated.
        goes_on: whether changes are tried if the step runs out of memory as it is. Then only that
            is known of it which it did before.
    """

    def __init__(
        self,
        run: Runner,
        is_out_of_memory: Callable[[BaseException], bool],
        *,
        progress: Callable[[str], object] = lambda line: None,
        budget_bytes: int | None = None,
        seconds: float = 20.0,
        has_values: bool = True,
        cards: int = 1,
        goes_on: bool = True,
    ) -> None:
        self._given = run
        self._run = run if has_values else self._quick
        self._is_out_of_memory = is_out_of_memory
        self._progress = progress
        self._deadline = time.process_time() + seconds
        self._has_values = has_values
        self._cards = cards
        self._goes_on = goes_on
        self._known: dict[frozenset[str], Trial] = {}
        self._limit_s = math.inf
        self._number = 0
        self._runs_counted = 0
        self._again: dict[tuple[int, type], Counter[int] | None] = {}
        """Root and class -> number of a module -> what its checkpoint computes again, if known."""
        self._was_late = False
        self.repairs = Repairs(Trial((), None, "not run"), budget_bytes=budget_bytes)

    def search(self) -> Repairs:
        """Return what was found, also if Ctrl-C has ended the search."""
        try:
            self._search()
            self.repairs.is_complete = not self._was_late
        except KeyboardInterrupt:
            self.repairs.was_interrupted = True
            self._progress("interrupted: this is what is known so far")
        return self.repairs

    @property
    def _is_late(self) -> bool:
        """Whether there is no time left; what was left out for it is missing in the result."""
        self._was_late = self._was_late or time.process_time() > self._deadline
        return self._was_late

    def _search(self) -> None:
        observed = self._observe()
        if len(set(observed.sizes)) == 1:
            self.repairs.sizes = observed.sizes[0]
        as_it_is = self._try(())
        if as_it_is.error and as_it_is.error != "out of memory" and self._run != self._given:
            self._run = self._given  # it reads values on the host
            del self._known[frozenset()]
            as_it_is = self._try(())
        self.repairs.as_it_is = replace(as_it_is, flops=None)
        if self.repairs.as_it_is.figures is None and not self._goes_on:
            return
        changes, refusals = offered(observed)
        self.repairs.refusals = refusals
        for change in changes:
            if self._is_late:
                return
            self._try((change,))
        changes = self._without_idle_deletions(changes)
        changes += self._variants(changes)
        self._fewest_checkpoints(changes)
        self._combine(changes)
        self._count_flops()

    def _without_idle_deletions(self, changes: Sequence[Change]) -> list[Change]:
        """Leave out the variables whose deletion adds nothing to that of the others."""

        def peak_of(change: Change) -> int | None:
            trial = self._try((change,))
            return None if trial.figures is None else trial.peak_bytes

        kept: dict[str, Change] = {}
        for change in changes:
            needed = change
            if change.group == deletions.GROUP and not self._is_late:
                needed = deletions.needed(change, changes, peak_of)
            kept.setdefault(needed.name, needed)
        tried_deletions = [
            trial for trial in self.repairs.trials if trial.changes[0].group == deletions.GROUP
        ]
        for trial in tried_deletions:
            if trial.name not in kept:
                self.repairs.trials.remove(trial)
        return list(kept.values())

    def _quick(self) -> Figures:
        """Run the step without values that nothing computes with."""
        with without_random_values():
            return self._given()

    def _variants(self, changes: Sequence[Change]) -> list[Change]:
        """Try the cheaper forms of the checkpoints that save most."""
        every = [change for change in changes if change.group == checkpointing.GROUP]
        ran = [change for change in every if self._try((change,)).figures is not None]
        if not ran:
            return []
        best = min(ran, key=lambda change: self._try((change,)).peak_bytes)
        tried = []
        for change in checkpointing.variants(best):
            if self._is_late:
                break
            self._try((change,))
            tried.append(change)
        return tried

    def _observe(self) -> Observed:
        self._progress("as it is, observed")
        try:
            with observing() as observed:
                observed.has_values, observed.cards = self._has_values, self._cards
                self._run()
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
        return observed

    def _try(self, changes: Sequence[Change]) -> Trial:
        key = frozenset(change.name for change in changes)
        if key not in self._known:
            began = time.monotonic()
            limit_s = self._limit_s
            trial = tried(changes, self._run, self._is_out_of_memory, limit_s=limit_s)
            self._known[key] = trial
            self._number += 1
            took = time.monotonic() - began
            if not changes:
                self._limit_s = limit_after(took)
            self._progress(line_of(self._number, trial, took))
            if changes:
                self.repairs.trials.append(trial)
        return self._known[key]

    def _fits(self, trial: Trial) -> bool:
        budget = self.repairs.budget_bytes
        return budget is not None and trial.figures is not None and trial.peak_bytes <= budget

    def _lowers(self, trial: Trial) -> bool:
        if trial.figures is None:
            return False
        if self.repairs.as_it_is.figures is None:
            return True
        return self.repairs.saved_bytes(trial) > 0

    def _fewest_checkpoints(self, changes: Sequence[Change], beside: Sequence[Change] = ()) -> None:
        """Look for the fewest modules whose checkpoints fit the budget, beside other changes."""
        if self.repairs.budget_bytes is None or self._fits(self.repairs.as_it_is):
            return
        for change in changes:
            selection = change.part
            if isinstance(selection, checkpointing.Selection) and selection.numbers is None:
                fits = partial(self._fits_with, (*beside,), change.numbers)
                checkpointing.fewest(selection, fits, lambda: self._is_late)

    def _fits_with(
        self, beside: tuple[Change, ...], numbers: str, chosen: checkpointing.Selection
    ) -> bool:
        return self._fits(self._try((*beside, checkpointing.change_for(chosen, numbers))))

    def _combine(self, changes: Sequence[Change]) -> None:
        """Add change after change to the best so far: first those that keep the numbers."""
        useful = [change for change in changes if self._is_useful(change)]
        exact = [change for change in useful if keeps_numbers(Trial((change,), None))]
        for offers in (exact, useful):
            self._grow(self._best_of_groups(offers))
        if self.repairs.budget_bytes is not None:
            self._combine_cheaply(useful)

    def _best_of_groups(self, changes: Sequence[Change]) -> list[Change]:
        groups: dict[str, list[Trial]] = {}
        for change in changes:
            groups.setdefault(change.group, []).append(self._try((change,)))
        best = (self.repairs.cheapest_of_lowest(trials) for trials in groups.values())
        return [change for trial in best for change in trial.changes]

    def _is_useful(self, change: Change) -> bool:
        """Whether a change alone lowers the peak, or cannot be judged alone."""
        trial = self._try((change,))
        if trial.figures is None:
            return False
        if self.repairs.as_it_is.figures is None:
            return True
        return self.repairs.saved_bytes(trial) > -self.repairs.as_it_is.peak_bytes * 0.05

    def _grow(self, offers: Sequence[Change]) -> None:
        ran = [self._try((change,)) for change in offers]
        if not ran:
            return
        best = self.repairs.cheapest_of_lowest(ran)
        saving = [change for change in offers if self._saves(self._try((change,)))]
        for _ in range(_MOST_COMBINED - 1):
            lower = self._lowest_with_one_more(best, saving)
            if lower is None:
                break
            best = lower
        # What saves nothing alone may do so where the peak is now.
        self._lowest_with_one_more(best, [change for change in offers if change not in saving])

    def _lowest_with_one_more(self, best: Trial, offers: Sequence[Change]) -> Trial | None:
        """Return the lowest of `best` with one change more; None if that is not much lower."""
        groups = {change.group for change in best.changes}
        grown = [
            self._try((*best.changes, change))
            for change in offers
            if change.group not in groups and not self._is_late
        ]
        limit = best.peak_bytes * (1 - LEAST_SHARE)
        better = [t for t in grown if t.figures is not None and t.peak_bytes < limit]
        return min(better, key=lambda trial: trial.peak_bytes, default=None)

    def _saves(self, trial: Trial) -> bool:
        base = self.repairs.as_it_is
        if base.figures is None:
            return True
        return self.repairs.saved_bytes(trial) > LEAST_SHARE * base.peak_bytes

    def _combine_cheaply(self, useful: Sequence[Change]) -> None:
        """Look for a combination that fits and computes less again than those that do so far."""
        free = [change for change in useful if not change.recomputes and change.group != "host"]
        for count in (2, 3):
            for some in combinations(free, count):
                if self._is_late:
                    return
                if len({change.group for change in some}) == count and not any(
                    set(trial.changes) <= set(some) for trial in self.repairs.fitting
                ):
                    self._try(some)
        checkpoints = [change for change in useful if change.group == checkpointing.GROUP]
        best_free = [trial for trial in self.repairs.ran if set(trial.changes) <= set(free)]
        if best_free and checkpoints and not self._is_late:
            self._fewest_checkpoints(checkpoints, best_free[0].changes)

    def _count_flops(self) -> None:
        """Count what the trials that are shown compute, to say what they compute again."""
        repairs = self.repairs
        repairs.as_it_is = replace(repairs.as_it_is, flops=flops_of((), self._run))
        if repairs.as_it_is.flops is None:
            return
        recomputing = [
            trial
            for trial in repairs.ran
            if any(change.recomputes for change in trial.changes) and self._lowers(trial)
        ]
        # Lowest peaks first, singles before combinations: the others are left out for lack of time.
        recomputing.sort(key=lambda trial: (len(trial.changes) > 1, trial.peak_bytes))
        counted: dict[frozenset[str], int | None] = {}
        for trial in recomputing:
            some = [change for change in trial.changes if change.recomputes]
            again = frozenset(change.name for change in some)
            if again not in counted:
                flops = self._flops_of_checkpoints(some)
                if flops is None and self._may_count():
                    flops = self._counted(", ".join(sorted(again)), some)
                counted[again] = flops
            self._replace(trial, counted[again])
        for trial in list(repairs.trials):
            if not any(change.recomputes for change in trial.changes):
                self._replace(trial, repairs.as_it_is.flops)

    def _may_count(self) -> bool:
        return self._runs_counted < _LEAST_COUNTED or not self._is_late

    def _counted(self, name: str, changes: Sequence[Change], **options: Any) -> int | None:
        """Count the operations of a run, whose peak is not used: counting needs memory, too."""
        self._progress(f"floating-point operations of: {name}")
        self._runs_counted += 1
        return flops_of(changes, self._run, **options)

    def _flops_of_checkpoints(self, changes: Sequence[Change]) -> int | None:
        """Return the operations of a run with checkpoints of some modules; None if not known.

        One run with all modules of a class shows what each of them computes again.
        """
        base = self.repairs.as_it_is.flops
        selection = changes[0].part
        if len(changes) > 1 or not isinstance(selection, checkpointing.Selection) or base is None:
            return None
        if selection.kind in selection.root.nested.get(selection.kind, ()):
            return None  # what is computed again depends on the checkpoints inside
        key = (id(selection.root), selection.kind)
        if key not in self._again:
            if not self._may_count():
                return None
            again: Counter[int] = Counter()
            name = f"checkpoint every {selection.kind.__name__}"
            counting = partial(checkpointing.counting, selection, again)
            total = self._counted(name, (), beside=counting)
            self._again[key] = again if total == base + again.total() else None
        known = self._again[key]
        if known is None:
            return None
        numbers = known if selection.numbers is None else selection.numbers
        return base + sum(known[number] for number in numbers)

    def _replace(self, trial: Trial, flops: int | None) -> None:
        trials = self.repairs.trials
        trials[trials.index(trial)] = replace(trial, flops=flops)
