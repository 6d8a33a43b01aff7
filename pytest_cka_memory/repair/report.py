"""What was tried, which of it is recommended, and both as text: the table, and what to write."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import fill

from emulated_cuda.cards import LARGEST_CARD
from pytest_cka_memory.meters import EMULATED
from pytest_cka_memory.repair import diff, in_one_text, without_helpers
from pytest_cka_memory.repair.changes import checkpointing
from pytest_cka_memory.repair.changes.activations import FLOPS_PER_HOST_BYTE
from pytest_cka_memory.repair.smaller import Sizes
from pytest_cka_memory.repair.trials import OUT_OF_MEMORY, Refusal, Trial, keeps_numbers
from pytest_cka_memory.units import MB, format_size, format_with_unit

_MOST_ROWS = 16
_MOST_COMBINATIONS = 4
_NAME_WIDTH = 34  # characters of a line, after the figures: a table has about 80
_NOT_COUNTED = "?"
_NOTHING_AGAIN = "+0 %"
_MOST_NEXT = 3


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

    def lowers(self, trial: Trial) -> bool:
        """Whether the peak is lower than as it is, which has none if it ran out of memory."""
        is_known = self.as_it_is.figures is not None
        return trial.figures is not None and (not is_known or self.saved_bytes(trial) > 0)

    def lowers_much(self, trial: Trial) -> bool:
        """Whether it lowers the peak so much that it is worth its place in a combination."""
        base = self.as_it_is.figures
        least = LEAST_SHARE * base.peak_bytes if base is not None else 0
        return self.lowers(trial) and self.saved_bytes(trial) >= least

    @property
    def ran(self) -> list[Trial]:
        """The trials that ended, lowest peak first."""
        done = [trial for trial in self.trials if trial.figures is not None]
        return sorted(done, key=lambda trial: (trial.peak_bytes, len(trial.changes)))

    @property
    def lowest(self) -> Trial | None:
        """The lowest peak, with any change; None if nothing lowers it."""
        return self._lowest_of(self.ran)

    @property
    def lowest_exact(self) -> Trial | None:
        """The lowest peak whose numbers are the same but for the last digits; None if none."""
        return self._lowest_of(trial for trial in self.ran if keeps_numbers(trial))

    @property
    def lowest_on_card(self) -> Trial | None:
        """The same of those that copy nothing to the host; None if none saves much."""
        exact = (trial for trial in self.ran if keeps_numbers(trial))
        found = self._lowest_of(trial for trial in exact if not trial.host_bytes)
        return found if found is not None and self.lowers_much(found) else None

    @property
    def fitting(self) -> list[Trial]:
        """The trials that fit the budget, cheapest first, without those that have an idle part."""
        if self.budget_bytes is None:
            return []
        fit = [trial for trial in self.ran if trial.peak_bytes <= self.budget_bytes]
        return sorted((t for t in fit if not self.has_idle_part(t, fit)), key=self.cost)

    def has_idle_part(self, trial: Trial, among: Sequence[Trial] = ()) -> bool:
        """Whether fewer of the same changes do nearly as well, in less than twice the time.

        What halves the time is not idle, such as what leaves less to copy to the host.
        """
        return any(
            set(other.changes) < set(trial.changes)
            and other.peak_bytes <= trial.peak_bytes * (1 + LEAST_SHARE)
            and other.reserved_bytes <= trial.reserved_bytes * (1 + LEAST_SHARE)
            and self.added_flops(other) <= 2 * self.added_flops(trial)
            for other in among or self.ran
        )

    def _lowest_of(self, trials: Iterable[Trial]) -> Trial | None:
        """Return the lowest peak, or the cheapest of those that are hardly higher."""
        saving = [each for each in trials if self.lowers(each) and not self.has_idle_part(each)]
        return self.cheapest_of_lowest(saving) if saving else None

    def cheapest_of_lowest(self, trials: Sequence[Trial]) -> Trial:
        """Return the cheapest trial whose peak is the lowest or hardly higher."""
        highest = min(trial.peak_bytes for trial in trials) * (1 + LEAST_SHARE)
        return min((t for t in trials if t.peak_bytes <= highest), key=self.cost)

    def cost(self, trial: Trial) -> tuple[int, ...]:
        """Return what to compare trials by: the time that they add, then what numbers change."""
        rounds_updates = any(change.rounds_updates for change in trial.changes)
        numbers = int(bool(trial.numbers)) if keeps_numbers(trial) else 2 + rounds_updates
        # The counter does not see all operations: what computes nothing again comes first.
        again = int(trial.recomputes)
        work = (trial.cards, self.added_flops(trial), numbers, again, len(trial.changes))
        return (*work, trial.lines, trial.peak_bytes)

    def added_flops(self, trial: Trial) -> int:
        """Return the time that a trial adds, in floating-point operations, with that of copies.

        What was not counted is taken for as much as the whole step as it is.
        """
        as_it_is = self.as_it_is.flops or 0
        again = as_it_is if trial.recomputes else 0
        if trial.flops is not None:
            again = max(0, trial.flops - as_it_is)
        return again + FLOPS_PER_HOST_BYTE * trial.host_bytes


@dataclass(frozen=True)
class RepairReport:
    """What would lower the peak of a step. ``print(report)`` shows the table and the patches."""

    repairs: Repairs
    """Everything that was tried."""
    device: str
    """The measured device, as reports name it."""
    label: str = ""
    """What was run: a function or a test."""

    @property
    def recommended(self) -> list[Trial]:
        """What the report says how to write: first what keeps the results."""
        return recommended(self.repairs)

    @property
    def peaks_mb(self) -> dict[str, float]:
        """Name of a change or a combination -> the peak under it in MB, the lowest first."""
        return {trial.name: trial.peak_bytes / MB for trial in self.repairs.ran}

    def __str__(self) -> str:
        return as_text(self.repairs, device=self.device, label=self.label).rstrip("\n")

    def __repr__(self) -> str:
        return f"<RepairReport of {self.label or 'a step'}: {len(self.repairs.trials)} tried>"


def as_text(repairs: Repairs, *, device: str, label: str = "") -> str:
    """Return the table, what fits, and what to write for what is recommended."""
    return "\n".join(_lines(repairs, device, label)) + "\n"


def _lines(repairs: Repairs, device: str, label: str) -> Iterator[str]:
    yield f"{f'{label}: ' if label else ''}what lowers the peak, measured on {device}"
    yield ""
    yield from _table(repairs)
    yield from _without_peak(repairs, device)
    if not repairs.is_complete:
        why = (
            "the search ran out of time; pass more seconds of processor time with --seconds (or "
            "seconds=)"
        )
        yield f"not everything was tried: {'interrupted' if repairs.was_interrupted else why}"
    for refusal in repairs.refusals:
        yield f"not tried: {refusal.name}, because {refusal.because}"
    for name in sorted(set(repairs.also) - {trial.name for trial in repairs.ran}):
        yield f"--also {name!r}: no change of this name ran; write it as in the table, no brackets"
    yield ""
    yield from _answer(repairs)
    helpers: dict[str, None] = {}
    for trial in recommended(repairs):
        yield from _to_write(repairs, trial)
        edits = (edit for change in trial.changes for edit in change.edits or ())
        helpers |= dict.fromkeys(helper for edit in edits for helper in edit.helpers)
    yield from _code(helpers)


def _code(helpers: Iterable[str]) -> Iterator[str]:
    """Yield the functions that edits need."""
    helpers = list(helpers)
    if helpers:
        yield ""
        yield "put this code above its first use:"
        for helper in in_one_text(helpers):
            yield from _indented(["", *helper.splitlines()])


def _table(repairs: Repairs) -> Iterator[str]:
    from tabulate import tabulate

    head = ["peak", "saved", "reserved", "FLOPs", "to host", "change"]
    rows = [_row(repairs, repairs.as_it_is)]
    singles = [trial for trial in repairs.ran if len(trial.changes) == 1]
    several = [trial for trial in repairs.ran if len(trial.changes) > 1]
    several = [trial for trial in several if not repairs.has_idle_part(trial)]
    wanted = {trial.name for trial in _named(repairs)}
    kept = [trial for trial in singles if repairs.lowers(trial) or trial.name in wanted]
    idle = [trial for trial in singles if trial not in kept]
    kept = [trial for n, trial in enumerate(kept) if n < _MOST_ROWS or trial.name in wanted]
    shown = wanted | {trial.name for trial in several[:_MOST_COMBINATIONS]}
    combined = [t for t in repairs.ran if len(t.changes) > 1 and t.name in shown]
    seen: set[tuple[str, ...]] = set()
    for trial in [*kept, *combined]:
        row = _row(repairs, trial)
        # Checkpoints of every 2nd of 12 modules of a class and of 6 of 12 are the same change.
        key = (*row[:-1], trial.numbers, trial.changes[0].group, trial.name.rpartition(" ")[2])
        is_checkpoint = [change.group for change in trial.changes] == [checkpointing.GROUP]
        if trial.name in wanted or not is_checkpoint or key not in seen:
            rows.append(row)
        seen.add(key)
    filled = [at for at in range(len(head)) if any(row[at] for row in rows)]
    yield from tabulate(
        [[row[at] for at in filled] for row in [head, *rows]],
        tablefmt="plain",
        disable_numparse=True,
        colalign=[*["right" for _ in filled[1:]], "left"],
    ).splitlines()
    yield "Sizes are in MB (2**20 bytes) unless a unit is given"
    if any(trial.numbers for trial in [*kept, *combined]):
        yield "In brackets: what differs in the results; without brackets, they are the same"
    if any(row[head.index("FLOPs")] == _NOT_COUNTED for row in rows):
        more_time = "" if repairs.is_complete else "; --seconds gives more time"
        yield f"{_NOT_COUNTED}: what is computed again was not counted{more_time}"
    if idle:
        yield f"saves nothing: {'; '.join(trial.name for trial in idle)}"
    failed = [trial for trial in repairs.trials if not trial.figures and len(trial.changes) == 1]
    full = [trial.name for trial in failed if trial.error == OUT_OF_MEMORY]
    if full:
        yield f"runs out of memory alone: {'; '.join(full)}"
    for trial in failed:
        if trial.error != OUT_OF_MEMORY:
            yield f"does not run: {trial.name} ({trial.error[:160]})"


def _without_peak(repairs: Repairs, device: str) -> Iterator[str]:
    """Say why nothing is compared with the step as it is, if that ran out of memory."""
    trial = repairs.as_it_is
    if trial.error == OUT_OF_MEMORY:
        is_largest = device.split(",")[0] == f"{EMULATED}:{LARGEST_CARD}"
        none = "no card that can be emulated; the largest is full" if is_largest else device
        yield f"as it is, it fits {none}{f', at {trial.place}' if trial.place else ''}"


def _row(repairs: Repairs, trial: Trial) -> list[str]:
    if trial.figures is None:
        return ["", "", "", "", "", fill(f"{trial.name}: {trial.error}", _NAME_WIDTH)]
    saved = repairs.saved_bytes(trial)
    base = repairs.as_it_is
    return [
        format_size(trial.peak_bytes),
        format_size(saved) if trial.changes and base.figures is not None else "",
        format_size(trial.figures.reserved_bytes),
        _computed_again(repairs, trial),
        format_size(trial.host_bytes) if trial.host_bytes else "",
        fill(f"{trial.name} [{trial.numbers}]" if trial.numbers else trial.name, _NAME_WIDTH),
    ]


def _computed_again(repairs: Repairs, trial: Trial) -> str:
    """Return how much more than as it is a trial computes; empty if nothing is counted there."""
    base = repairs.as_it_is.flops
    if base == 0 or not trial.changes:
        return ""
    if base is None or trial.flops is None:
        return _NOT_COUNTED if trial.recomputes else _NOTHING_AGAIN
    percent = 100 * (trial.flops - base) / base
    return f"+{percent:.0f} %" if percent >= 0.5 else _NOTHING_AGAIN


def _named(repairs: Repairs) -> list[Trial]:
    """Return the trials that need a row: those below the table, and one that copies nothing."""
    named = recommended(repairs)
    nothing_fits = repairs.budget_bytes is not None and not repairs.fitting
    others = [repairs.lowest if nothing_fits else None]
    if any(trial and trial.host_bytes for trial in [*named, *others]):
        others.append(repairs.lowest_on_card)
    return [*named, *(trial for trial in others if trial is not None)]


def recommended(repairs: Repairs) -> list[Trial]:
    """Return the trials for which the report says what to write."""
    every = [*best(repairs), *asked_for(repairs)]
    return list({trial.name: trial for trial in every}.values())


def asked_for(repairs: Repairs) -> list[Trial]:
    """Return the trials that the user has named."""
    return [trial for trial in repairs.ran if trial.name in repairs.also]


def best(repairs: Repairs) -> list[Trial]:
    """Return the trials that are recommended; none if the step fits as it is."""
    if repairs.budget_bytes is not None:
        if fits_as_it_is(repairs):
            return []
        fitting = repairs.fitting
        exact = [trial for trial in fitting if keeps_numbers(trial)]
        surely = surely_fitting(repairs)
        found = [*exact[:1], *fitting[:1], *([surely] if surely is not None else [])]
        if surely is not None and surely.host_bytes:
            fitting = [t for t in fitting if _reserves_at_most(t, repairs.budget_bytes)]
        if any(trial.host_bytes for trial in found):
            found += [trial for trial in fitting if not trial.host_bytes][:1]
        return list({trial.name: trial for trial in found}.values())
    singles = [trial for trial in repairs.ran if len(trial.changes) == 1]
    exact = [trial for trial in singles if keeps_numbers(trial)]
    candidates = [*exact[:1], repairs.lowest_exact]
    if any(trial and trial.host_bytes for trial in candidates):
        candidates.append(repairs.lowest_on_card)
    found = [trial for trial in candidates if trial and repairs.lowers(trial)]
    if not found and repairs.lowest is not None:
        found = [repairs.lowest]
    # What was asked for by giving several cards.
    found += [trial for trial in singles if trial.cards > 1 and trial not in found]
    return list({trial.name: trial for trial in found}.values())


def next_fitting(repairs: Repairs) -> list[Trial]:
    """Return what to prove if nothing that is recommended holds: what fits, cheapest first.

    Those whose edits are known, and first those that keep the results.
    """
    known = {trial.name for trial in best(repairs)}
    others = [trial for trial in repairs.fitting if trial.edits and trial.name not in known]
    return sorted(others, key=lambda trial: not keeps_numbers(trial))[:_MOST_NEXT] if known else []


def text_to_write(repairs: Repairs, trial: Trial) -> str:
    """Return what to write for a trial, with the code that it needs."""
    helpers = dict.fromkeys(helper for edit in trial.edits or () for helper in edit.helpers)
    return "\n".join([*_to_write(repairs, trial), *_code(helpers)]).strip()


def fits_as_it_is(repairs: Repairs) -> bool:
    """Whether the step fits the budget without a change."""
    figures, budget = repairs.as_it_is.figures, repairs.budget_bytes
    return budget is not None and figures is not None and figures.peak_bytes <= budget


def surely_fitting(repairs: Repairs) -> Trial | None:
    """Return the cheapest change that fits even if the allocator releases nothing that it reserved.

    If possible, one that keeps the results. None if the cheapest that fits is such a change, or
    there is none.
    """
    budget, fitting = repairs.budget_bytes, repairs.fitting
    if budget is None or not fitting or _reserves_at_most(fitting[0], budget):
        return None
    surely = [trial for trial in fitting if _reserves_at_most(trial, budget)]
    exact = [trial for trial in surely if keeps_numbers(trial)]
    return next(iter([*exact, *surely]), None)


def _reserves_at_most(trial: Trial, size: int) -> bool:
    return trial.reserved_bytes <= size


def _answer(repairs: Repairs) -> Iterator[str]:
    if repairs.budget_bytes is None:
        if repairs.lowest is None:
            yield "no change that was tried lowers the peak"
        return
    budget = format_with_unit(repairs.budget_bytes)
    if fits_as_it_is(repairs):
        yield f"the step fits {budget} without a change"
    elif repairs.fitting:
        cheapest = repairs.fitting[0]
        yield f"cheapest change that fits {budget}: {cheapest.name} ({_sizes(cheapest)})"
        yield from _condition(cheapest, repairs.budget_bytes)
        exact = [trial for trial in repairs.fitting if keeps_numbers(trial)]
        if not keeps_numbers(cheapest):
            yield (
                f"cheapest change that fits and keeps the results: {exact[0].name} "
                f"({_sizes(exact[0])})"
                if exact
                else "no change that keeps the results fits"
            )
        surely = surely_fitting(repairs)
        if surely is not None:
            reserved = format_with_unit(surely.reserved_bytes)
            yield (
                f"cheapest change whose reserved memory fits, too: {surely.name} "
                f"({_sizes(surely)}, {reserved} reserved)"
            )
    else:
        lowest = repairs.lowest
        everything = (
            "" if lowest is None else f"; the lowest peak is {_sizes(lowest)} with {lowest.name}"
        )
        yield (
            f"the step does not fit {budget} with any change{everything}"
            if repairs.is_complete
            else f"no change that was tried fits {budget}{everything}"
        )


def _condition(trial: Trial, budget_bytes: int) -> Iterator[str]:
    """Say on what it depends that a trial fits, if it was run where there was more memory."""
    if not _reserves_at_most(trial, budget_bytes):
        yield (
            "  if the allocator can release enough memory; with more memory free, it reserved "
            f"{format_with_unit(trial.reserved_bytes)} here"
        )


def _sizes(trial: Trial) -> str:
    return format_with_unit(trial.peak_bytes)


def _to_write(repairs: Repairs, trial: Trial) -> Iterator[str]:
    yield ""
    saved = repairs.saved_bytes(trial)
    less = f", {format_with_unit(saved)} less" if saved > 0 else ""
    yield f"{trial.name}: peak {_sizes(trial)}{less}"
    names_them = "the results" in trial.numbers
    yield f"  {trial.numbers}" if names_them else f"  results: {trial.numbers or 'the same'}"
    if trial.host_bytes:
        yield f"  copies {format_with_unit(trial.host_bytes)} to the host in one run, and back"
    for condition in trial.conditions:
        yield f"  if {condition}"
    edits = trial.edits
    if edits:
        yield from _indented(diff(without_helpers(edits)))
        return
    for change in trial.changes:
        yield f"  {change.name}: {change.advice}"
        if change.edits:
            yield from _indented(diff(without_helpers(change.edits)))


def _indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}".rstrip()
