"""What a search has found."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_cka_memory.repair.smaller import Sizes
from pytest_cka_memory.repair.trials import Refusal, Trial

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
        return self._first(trial for trial in self.ran if not self.has_idle_part(trial))

    @property
    def lowest_exact(self) -> Trial | None:
        """The lowest peak whose numbers are the same but for the last digits; None if none."""
        exact = (trial for trial in self.ran if keeps_numbers(trial))
        return self._first(trial for trial in exact if not self.has_idle_part(trial))

    @property
    def fitting(self) -> list[Trial]:
        """The trials that fit the budget, cheapest first."""
        if self.budget_bytes is None:
            return []
        found = [trial for trial in self.ran if trial.peak_bytes <= self.budget_bytes]
        return sorted(found, key=self._cost)

    def has_idle_part(self, trial: Trial) -> bool:
        """Whether fewer of the same changes do nearly as well."""
        return any(
            set(other.changes) < set(trial.changes)
            and other.peak_bytes <= trial.peak_bytes * (1 + LEAST_SHARE)
            for other in self.ran
        )

    def _first(self, trials: Iterable[Trial]) -> Trial | None:
        known = self.as_it_is.figures is None
        return next((trial for trial in trials if known or self.saved_bytes(trial) > 0), None)

    def _cost(self, trial: Trial) -> tuple[int, ...]:
        flops = max(0, (trial.flops or 0) - (self.as_it_is.flops or 0))
        if trial.flops is None and any(change.recomputes for change in trial.changes):
            flops = sys.maxsize  # not counted for lack of time
        changes_numbers = int(not keeps_numbers(trial))
        work = (flops, trial.host_bytes, changes_numbers, len(trial.changes))
        return (*work, trial.lines, trial.peak_bytes)


def keeps_numbers(trial: Trial) -> bool:
    """Whether the numbers stay the same, but perhaps for their last digits."""
    return not any("change" in change.numbers for change in trial.changes)
