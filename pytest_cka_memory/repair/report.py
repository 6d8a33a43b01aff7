"""What was tried, as text: the table, and what to write."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_cka_memory.repair import diff, in_one_text, without_helpers
from pytest_cka_memory.repair.changes import checkpointing
from pytest_cka_memory.repair.search import Repairs
from pytest_cka_memory.repair.trials import Trial, keeps_numbers
from pytest_cka_memory.units import MB, format_size, format_with_unit

_MOST_ROWS = 16
_MOST_COMBINATIONS = 4
_ALIGNMENT = {"change": "left", "results": "left"}
_NOT_COUNTED = "?"
_MOST_NEXT = 3


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
    if not repairs.is_complete:
        why = (
            "the search ran out of time; pass more seconds of processor time with --seconds (or "
            "seconds=)"
        )
        yield f"not everything was tried: {'interrupted' if repairs.was_interrupted else why}"
    for refusal in repairs.refusals:
        yield f"not tried: {refusal.name}, because {refusal.because}"
    for name in set(repairs.also) - {trial.name for trial in repairs.ran}:
        yield f"--also {name!r}: no change of this name ran; write a name as in the table"
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

    base = repairs.as_it_is
    head = ["change", "peak", "saved", "reserved", "FLOPs", "to host", "results"]
    rows = [_row(repairs, base)]
    singles = [trial for trial in repairs.ran if len(trial.changes) == 1]
    several = [trial for trial in repairs.ran if len(trial.changes) > 1]
    several = [trial for trial in several if not repairs.has_idle_part(trial)]
    wanted = {trial.name for trial in recommended(repairs)}
    kept = [trial for trial in singles if repairs.saved_bytes(trial) > 0 or trial.name in wanted]
    idle = [trial for trial in singles if trial not in kept]
    combined = [t for n, t in enumerate(several) if n < _MOST_COMBINATIONS or t.name in wanted]
    seen: set[tuple[str, ...]] = set()
    for trial in [*kept[:_MOST_ROWS], *combined]:
        row = _row(repairs, trial)
        # Checkpoints of every 2nd of 12 modules of a class and of 6 of 12 are the same change.
        key = (*row[1:], trial.changes[0].group, trial.name.rpartition(" ")[2])
        is_checkpoint = [change.group for change in trial.changes] == [checkpointing.GROUP]
        if trial.name in wanted or not is_checkpoint or key not in seen:
            rows.append(row)
        seen.add(key)
    filled = [at for at in range(len(head)) if any(row[at] for row in rows)]
    yield from tabulate(
        [[row[at] for at in filled] for row in [head, *rows]],
        tablefmt="plain",
        disable_numparse=True,
        colalign=[_ALIGNMENT.get(head[at], "right") for at in filled],
    ).splitlines()
    yield "Sizes are in MB (2**20 bytes) unless a unit is given"
    if any(row[head.index("FLOPs")] == _NOT_COUNTED for row in rows):
        yield f"{_NOT_COUNTED}: what is computed again was not counted; --seconds gives more time"
    if idle:
        yield f"saves nothing: {'; '.join(trial.name for trial in idle)}"
    for trial in repairs.trials:
        if trial.figures is None and len(trial.changes) == 1:
            yield f"does not run: {trial.name} ({trial.error[:160]})"


def _row(repairs: Repairs, trial: Trial) -> list[str]:
    if trial.figures is None:
        return [trial.name, trial.error, "", "", "", "", ""]
    saved = repairs.saved_bytes(trial)
    base = repairs.as_it_is
    again = _NOT_COUNTED if base.flops else ""
    if trial.flops is not None and base.flops:
        percent = 100 * (trial.flops - base.flops) / base.flops
        again = f"+{percent:.0f} %" if percent >= 0.5 else "+0 %"
    return [
        trial.name,
        format_size(trial.peak_bytes),
        format_size(saved) if trial.changes and base.figures is not None else "",
        format_size(trial.figures.reserved_bytes),
        again if trial.changes else "",
        format_size(trial.host_bytes) if trial.host_bytes else "",
        (trial.numbers or "the same") if trial.changes else "",
    ]


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
        return list({trial.name: trial for trial in found}.values())
    singles = [trial for trial in repairs.ran if len(trial.changes) == 1]
    exact = [trial for trial in singles if keeps_numbers(trial)]
    candidates = [*exact[:1], repairs.lowest_exact]
    found = [trial for trial in candidates if trial and repairs.saved_bytes(trial) > 0]
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
    return trial.figures is None or (trial.figures.reserved_bytes or 0) <= size


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
        if surely is not None and surely.figures is not None:
            reserved = format_with_unit(surely.figures.reserved_bytes or 0)
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
    if trial.figures is not None and not _reserves_at_most(trial, budget_bytes):
        yield (
            "  if the allocator can release enough memory; with more memory free, it reserved "
            f"{format_with_unit(trial.figures.reserved_bytes or 0)} here"
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
