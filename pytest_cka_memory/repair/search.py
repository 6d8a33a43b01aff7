"""Try changes, alone and in combinations, and find the cheapest that fit a budget."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from pytest_cka_memory.repair import search_seconds
from pytest_cka_memory.repair.changes import checkpointing, deletions, offered
from pytest_cka_memory.repair.observation import Observed, observing
from pytest_cka_memory.repair.report import LEAST_SHARE, Repairs
from pytest_cka_memory.repair.smaller import without_random_values
from pytest_cka_memory.repair.trials import (
    OUT_OF_MEMORY,
    Change,
    Figures,
    Runner,
    Trial,
    flops_of,
    keeps_numbers,
    limit_after,
    line_of,
    tried,
)

_MOST_COMBINED = 3
_MOST_ABOVE = 1.25
"""Fewer checkpoints than all need less only by what one module computes again."""
_LEAST_COUNTED = 2
"""So many operations are counted even if there is no time left."""


class Search:
    """Runs a step under changes, as long as there is time.

    Args:
        run: runs the step once and returns its figures.
        is_out_of_memory: whether an exception says that the device is full.
        progress: called with a line for each trial.
        budget_bytes: what the peak must not exceed; None to look for the lowest one.
        seconds: after so many seconds of processor time no new trial begins; by default
            :func:`.search_seconds`.
        has_values: whether the device computes values.
        cards: how many are emulated.
        goes_on: whether changes are tried if the step runs out of memory as it is. Then only that
            is known of it which it did before.
        also: names of trials to say how to write, too. Combinations of changes that were tried
            alone are tried if they were not.
    """

    def __init__(
        self,
        run: Runner,
        is_out_of_memory: Callable[[BaseException], bool],
        *,
        progress: Callable[[str], object] = lambda line: None,
        budget_bytes: int | None = None,
        seconds: float | None = None,
        has_values: bool = True,
        cards: int = 1,
        goes_on: bool = True,
        also: Collection[str] = (),
    ) -> None:
        self._given = run
        self._run = run if has_values else self._quick
        self._is_out_of_memory = is_out_of_memory
        self._progress = progress
        self._began_s, self._seconds, self._run_s = time.process_time(), seconds, 0.0
        self._has_values = has_values
        self._cards = cards
        self._goes_on = goes_on
        self._known: dict[frozenset[str], Trial] = {}
        self._limit_s = math.inf
        self._runs_counted = 0
        self._counted: dict[frozenset[str], int | None] = {}
        """Names of changes that compute something again -> the operations of a run under them."""
        self._again: dict[tuple[int, type], Counter[int] | None] = {}
        """Root and class -> number of a module -> what its checkpoint computes again, if known."""
        self._was_late = False
        self.repairs = Repairs(Trial((), None, "not run"), budget_bytes=budget_bytes, also=also)

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
        allowed = search_seconds(self._run_s) if self._seconds is None else self._seconds
        self._was_late = self._was_late or time.process_time() - self._began_s > allowed
        return self._was_late

    def _search(self) -> None:
        observed = self._observe()
        if len(set(observed.sizes)) == 1:
            self.repairs.sizes = observed.sizes[0]
        as_it_is = self._try(())
        if as_it_is.error and as_it_is.error != OUT_OF_MEMORY and self._run != self._given:
            self._run = self._given  # it reads values on the host
            del self._known[frozenset()]
            as_it_is = self._try(())
        self.repairs.as_it_is = replace(as_it_is, flops=None)
        if self.repairs.as_it_is.figures is None and not self._goes_on:
            return
        changes, self.repairs.refusals = offered(observed)
        for change in changes:
            if self._is_late:
                return
            self._try((change,))
        changes = self._without_idle_deletions(changes)
        best = self._narrowed(changes)
        changes += self._variants(changes)
        self._try_named(changes)
        self._fewest_checkpoints(changes)
        self._combine(changes, best)

    def _try_named(self, changes: Sequence[Change]) -> None:
        """Try the combinations that the user has named, in whichever order."""
        known = {change.name: change for change in changes}
        also = []
        for name in self.repairs.also:
            parts = name.split(" + ")
            is_known = known.keys() >= set(parts)
            also.append(self._try([known[part] for part in parts]).name if is_known else name)
        self.repairs.also = also

    def _without_idle_deletions(self, changes: Sequence[Change]) -> list[Change]:
        """Leave out the variables whose deletion adds nothing to that of the others."""
        under = self._runs_under()

        def peak_of(change: Change) -> int | None:
            trial = self._try((*under, change))
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
            began, began_s = time.monotonic(), time.process_time()
            trial = tried(changes, self._run, self._is_out_of_memory, limit_s=self._limit_s)
            self._known[key] = trial
            took = time.monotonic() - began
            if not changes:
                self._limit_s = limit_after(took)
                self._run_s = time.process_time() - began_s
            self._progress(line_of(len(self._known), trial, took))
            if changes:
                self.repairs.trials.append(trial)
        return self._known[key]

    def _fits(self, trial: Trial) -> bool:
        budget = self.repairs.budget_bytes
        return budget is not None and trial.figures is not None and trial.peak_bytes <= budget

    def _fewest_checkpoints(self, changes: Sequence[Change], beside: Sequence[Change] = ()) -> None:
        """Look for the fewest modules whose checkpoints fit the budget, beside other changes."""
        budget = self.repairs.budget_bytes
        if budget is None or self._fits(self.repairs.as_it_is):
            return
        for change in changes:
            selection = change.part
            if isinstance(selection, checkpointing.Selection) and selection.numbers is None:
                every = self._try((*beside, change))
                if every.figures and every.peak_bytes <= budget * _MOST_ABOVE:
                    fits = partial(self._fits_with, (*beside,), change.numbers)
                    checkpointing.fewest(selection, fits, lambda: self._is_late)

    def _fits_with(
        self, beside: tuple[Change, ...], numbers: str, chosen: checkpointing.Selection
    ) -> bool:
        return self._fits(self._try((*beside, checkpointing.change_for(chosen, numbers))))

    def _combine(self, changes: Sequence[Change], best: Sequence[Trial]) -> None:
        """Combine what saves something alone; then, if there is time, also what does not.

        Args:
            changes: that were tried alone.
            best: combinations that were found so far, to add more to.
        """
        useful = [change for change in changes if self._is_useful(change)]
        saving = [change for change in useful if self.repairs.lowers_much(self._try((change,)))]
        best = [*best, *self._narrowed(changes, keeps=False)]
        if self.repairs.as_it_is.figures is None:
            # Nothing is known of what runs out of memory alone, but where it is not alone.
            best = [
                self._grown(trial, _exact(useful) if keeps_numbers(trial) else useful)
                for trial in best
            ]
        for offers in (_exact(saving), saving):
            trials = [self._try((change,)) for change in self._best_of_groups(offers)]
            if trials:
                first = self.repairs.cheapest_of_lowest(trials)
                best.append(self._grown(first, [trial.changes[0] for trial in trials]))
        if self.repairs.budget_bytes is not None:
            self._combine_cheaply(saving)
        self._count_flops()
        # What saves nothing alone may do so where the peak is now. Most do not.
        idle = self._best_of_groups([change for change in useful if change not in saving])
        best = sorted(best, key=lambda trial: trial.peak_bytes)
        exact = [trial for trial in best if keeps_numbers(trial)]
        for trials, offers in ((exact, _exact(idle)), (best, idle)):
            if trials:
                self._lowest_with_one_more(trials[0], offers)
        if self.repairs.budget_bytes is not None:
            ran = [change for change in idle if self._try((change,)).figures is not None]
            self._combine_cheaply([*saving, *ran])
        self._count_flops()

    def _narrowed(self, changes: Sequence[Change], *, keeps: bool = True) -> list[Trial]:
        """Try the best change of each group together, then fewer that are as good or still fit.

        Also without those that copy to the host, which are slow, and these first. `keeps` says
        whether only changes that keep the numbers take part.
        """
        saving = [change for change in changes if self.repairs.lowers_much(self._try((change,)))]
        best = self._best_of_groups(_exact(saving) if keeps else saving)
        best = [change for change in best if change.cards == 1]
        here = [change for change in best if not self._try((change,)).host_bytes]
        found = (self._narrow(offers) for offers in (here, best) if offers)
        return [trial for trial in found if trial is not None]

    def _narrow(self, changes: Sequence[Change]) -> Trial | None:
        """Return the cheapest of the combinations with fewer changes that are nearly as low.

        If there is a budget, go on to those that fit it, to have tried them. None if the
        combination of all changes does not run.
        """
        every = None if self._is_late else self._try(changes)
        if every is None or every.figures is None:
            return None
        lowest = self._without_parts(every, round(every.peak_bytes * (1 + LEAST_SHARE)))
        if self._fits(lowest):
            self._without_parts(lowest, self.repairs.budget_bytes or 0)
        return lowest

    def _without_parts(self, trial: Trial, highest_bytes: int) -> Trial:
        """Leave out change after change, so that the cheapest remains, below a peak."""
        while len(trial.changes) > 1:
            fewer = [
                self._try([change for change in trial.changes if change is not left])
                for left in trial.changes
                if not self._is_late
            ]
            low = [each for each in fewer if each.figures and each.peak_bytes <= highest_bytes]
            if not low:
                break
            trial = min(low, key=self.repairs.cost)
        return trial

    def _best_of_groups(self, changes: Sequence[Change]) -> list[Change]:
        """Return the cheapest of the lowest of each group; all of it if none runs alone."""
        groups: dict[str, list[Trial]] = {}
        for change in changes:
            groups.setdefault(change.group, []).append(self._try((change,)))
        best: list[Trial] = []
        for trials in groups.values():
            ran = [trial for trial in trials if trial.figures is not None]
            best += [self.repairs.cheapest_of_lowest(ran)] if ran else trials
        return [change for trial in best for change in trial.changes]

    def _is_useful(self, change: Change) -> bool:
        """Whether a change alone lowers the peak, or cannot be judged alone."""
        trial = self._try((change,))
        if self.repairs.as_it_is.figures is None:
            return trial.figures is not None or trial.error == OUT_OF_MEMORY
        if trial.figures is None:
            return False
        return self.repairs.saved_bytes(trial) > -self.repairs.as_it_is.peak_bytes * 0.05

    def _grown(self, best: Trial, offers: Sequence[Change]) -> Trial:
        """Add change after change to the best so far; return the lowest."""
        for _ in range(_MOST_COMBINED - 1):
            lower = self._lowest_with_one_more(best, self._best_of_groups(offers))
            if lower is None:
                break
            best = lower
        return best

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

    def _combine_cheaply(self, offers: Sequence[Change]) -> None:
        """Look for a combination that fits and computes less again than those that do so far."""
        free = [change for change in offers if not self._works_again(change)]
        for count in (2, 3):
            for some in combinations(free, count):
                if self._is_late:
                    return
                if len({change.group for change in some}) == count and not any(
                    self._fits(trial) and set(trial.changes) <= set(some)
                    for trial in self.repairs.trials
                ):
                    self._try(some)
        checkpoints = [change for change in offers if change.group == checkpointing.GROUP]
        best_free = [trial for trial in self.repairs.ran if set(trial.changes) <= set(free)]
        if best_free and checkpoints and not self._is_late:
            self._fewest_checkpoints(checkpoints, best_free[0].changes)

    def _works_again(self, change: Change) -> bool:
        """Whether a change computes something again, or copies to the host and back."""
        return change.recomputes or self._try((change,)).host_bytes > 0

    def _runs_under(self) -> tuple[Change, ...]:
        """Return what makes a step run that does not as it is, and computes nothing again."""
        if self.repairs.as_it_is.figures is not None:
            return ()
        same = (t for t in self.repairs.ran if keeps_numbers(t) and not t.recomputes)
        return next((trial.changes for trial in same), ())

    def _count_flops(self) -> None:
        """Count what the trials that are shown compute, to say what they compute again."""
        repairs = self.repairs
        # Lowest peaks first, singles before combinations: the others are left out for lack of time.
        shown = [trial for trial in repairs.ran if repairs.lowers(trial)]
        shown.sort(key=lambda trial: (len(trial.changes) > 1, trial.peak_bytes))
        repairs.as_it_is = replace(repairs.as_it_is, flops=self._flops_under([]))
        if repairs.as_it_is.flops is None:
            return
        for trial in shown:
            again = [change for change in trial.changes if change.recomputes]
            if again:
                self._replace(trial, self._flops_under(again))
        for trial in list(repairs.trials):
            if not trial.recomputes:
                self._replace(trial, repairs.as_it_is.flops)

    def _may_count(self) -> bool:
        return self._runs_counted < _LEAST_COUNTED or not self._is_late

    def _flops_under(self, changes: Sequence[Change]) -> int | None:
        """Return the operations of a run under changes that compute something again, once counted.

        None if there is no time to count them, or the run fails.
        """
        key = frozenset(change.name for change in changes)
        if key not in self._counted:
            flops = self._flops_of_checkpoints(changes) if changes else None
            if flops is None:
                if changes and not self._may_count():
                    return None
                flops = self._count(", ".join(sorted(key)), changes)
            self._counted[key] = flops
        return self._counted[key]

    def _count(self, name: str, changes: Sequence[Change], **options: Any) -> int | None:
        """Count the operations of a run, whose peak is not used: counting needs memory, too."""
        if name:
            self._progress(f"floating-point operations of: {name}")
            self._runs_counted += 1
        groups = {change.group for change in changes}
        under = [change for change in self._runs_under() if change.group not in groups]
        return flops_of([*under, *changes], self._run, **options)

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
            total = self._count(name, (), beside=counting)
            self._again[key] = again if total == base + again.total() else None
        known = self._again[key]
        if known is None:
            return None
        numbers = known if selection.numbers is None else selection.numbers
        return base + sum(known[number] for number in numbers)

    def _replace(self, trial: Trial, flops: int | None) -> None:
        trials = self.repairs.trials
        trials[trials.index(trial)] = replace(trial, flops=flops)


def _exact(changes: Sequence[Change]) -> list[Change]:
    """Return the changes that keep the numbers, but perhaps for their last digits."""
    return [change for change in changes if keeps_numbers(Trial((change,), None))]
