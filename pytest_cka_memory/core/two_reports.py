"""Compare two reports: which figures rose by more than a tolerance, which regions came or went."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cka_memory.core.conditions import Changed, changed, conditions_of
from pytest_cka_memory.core.figures import COMPARED, rounded_figures
from pytest_cka_memory.core.fingerprint import Fingerprint, fingerprint_of
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.tolerance import Difference, Tolerance, differences, not_comparable
from pytest_cka_memory.core.verdicts import Result


class RegionKey(NamedTuple):
    """Identifies a region in both reports, whichever worker ran it."""

    nodeid: str
    label: str
    rank: str
    """``rank 1``, or empty outside torchrun."""
    occurrence: int
    """Number of this region among those of the same test and label, from 1."""

    @property
    def name(self) -> str:
        """All of it in one text."""
        again = f"#{self.occurrence}" if self.occurrence > 1 else ""
        return " ".join(filter(None, (self.nodeid, self.label, self.rank, again)))


@dataclass(frozen=True)
class Change:
    """A figure of a region that has changed."""

    key: RegionKey
    difference: Difference


@dataclass(frozen=True)
class Comparison:
    """The differences between two reports."""

    tolerance: Tolerance
    compared: int
    """Number of regions that are in both reports and completed in both."""
    changes: tuple[Change, ...]
    """Every figure that rose or fell, regressions first."""
    incomplete: tuple[RegionKey, ...]
    """Regions that an exception aborted in either report; they are not compared."""
    appeared: tuple[RegionKey, ...]
    vanished: tuple[RegionKey, ...]
    devices: tuple[tuple[str, str], ...]
    """Device, meter, torch and CUDA versions that differ, with their names, as (old, new) pairs."""
    changed: tuple[Changed, ...] = ()
    """Facts that figures depend on and that differ: what depends on them is not compared."""
    undecided: tuple[str, ...] = ()
    """Figures that are not compared, because they depend on those facts."""
    not_on_both: tuple[str, ...] = ()
    """Figures that no region of one report has, because its device has no such memory."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Figures above the old ones by more than the tolerance."""
        return tuple(change for change in self.changes if change.difference.broken)


def compare(old: Report, new: Report, tolerance: Tolerance) -> Comparison:
    """Compare every region of `new` with the one of the same key in `old`."""
    before, after = keyed(old.results), keyed(new.results)
    both = [key for key in after if key in before]
    judged = {
        key: None for key in both if before[key].record.completed and after[key].record.completed
    }
    figures = [
        (key, rounded_figures(before[key].record), rounded_figures(after[key].record))
        for key in judged
    ]
    not_on_both = _figures_of_one(old, new)
    facts = _changed(old.session, new.session)
    changes = [
        Change(key, difference)
        for key, former, latter in figures
        for difference in differences(former, latter, tolerance, facts)
        if difference.figure not in not_on_both
    ]
    return Comparison(
        tolerance,
        compared=len(judged),
        changes=tuple(sorted(changes, key=lambda change: not change.difference.broken)),
        incomplete=tuple(key for key in both if key not in judged),
        appeared=tuple(key for key in after if key not in before),
        vanished=tuple(key for key in before if key not in after),
        devices=tuple(_differing(old.session, new.session)),
        changed=facts,
        undecided=tuple(
            dict.fromkeys(name for _, old, _ in figures for name, *_ in not_comparable(old, facts))
        ),
        not_on_both=not_on_both,
    )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Changed, ...]:
    """Return the facts that have changed; none on another device, which has others."""
    one, other = fingerprint_of(old), fingerprint_of(new)
    if (one.device, one.meter) != (other.device, other.meter):
        return ()
    return changed(conditions_of(old), conditions_of(new))


def _figures_of_one(old: Report, new: Report) -> tuple[str, ...]:
    """Return figures that one report has and no region of the other, measured on another device.

    A CPU has no reserve, for example. On the same device a figure that is missing may hide a rise.
    """
    one, other = fingerprint_of(old.session), fingerprint_of(new.session)
    if (one.device, one.meter) == (other.device, other.meter):
        return ()
    known = [
        {
            figure
            for result in report.results
            for figure, value in rounded_figures(result.record).items()
            if value is not None
        }
        for report in (old, new)
    ]
    return tuple(figure for figure in COMPARED if figure in known[0] ^ known[1])


def keyed(results: Iterable[Result]) -> dict[RegionKey, Result]:
    """Return results by what identifies their region in two reports."""
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed = {}
    for result in results:
        name = (result.nodeid, result.record.label, result.rank)
        seen[name] += 1
        keyed[RegionKey(*name, seen[name])] = result
    return keyed


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    one, other = fingerprint_of(old), fingerprint_of(new)
    for name, before, after in zip(Fingerprint._fields, one, other, strict=True):
        if before != after:
            yield _named(name, before), _named(name, after)


def _named(name: str, value: str | None) -> str:
    """Return a device or meter as it is, and a version with the name of what has it."""
    versioned = {"torch": "torch", "cuda": "CUDA"}
    if name not in versioned:
        return value or "unknown"
    return f"{versioned[name]} {value}" if value else f"no {versioned[name]}"
