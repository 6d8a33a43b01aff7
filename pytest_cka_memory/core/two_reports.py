"""Two reports compared: which figures differ, and which lines of code explain a higher peak."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cka_memory.core.conditions import (
    Changed,
    Fingerprint,
    changed,
    conditions_of,
    fingerprint_of,
)
from pytest_cka_memory.core.figures import COMPARED, RegionRecord, rounded_figures
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import (
    Difference,
    Result,
    Tolerance,
    differences,
    not_comparable,
)


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
    of_old, of_new = fingerprint_of(old), fingerprint_of(new)
    if (of_old.device, of_old.meter) != (of_new.device, of_new.meter):
        return ()
    return changed(conditions_of(old), conditions_of(new))


def _figures_of_one(old: Report, new: Report) -> tuple[str, ...]:
    """Return figures that one report has and no region of the other, measured on another device.

    A CPU has no reserve, for example. On the same device a figure that is missing may hide a rise.
    """
    of_old, of_new = fingerprint_of(old.session), fingerprint_of(new.session)
    if (of_old.device, of_old.meter) == (of_new.device, of_new.meter):
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
    of_old, of_new = fingerprint_of(old), fingerprint_of(new)
    for name, before, after in zip(Fingerprint._fields, of_old, of_new, strict=True):
        if before != after:
            yield _named(name, before), _named(name, after)


def _named(name: str, value: str | None) -> str:
    """Return a device or meter as it is, and a version with the name of what has it."""
    versioned = {"torch": "torch", "cuda": "CUDA"}
    if name not in versioned:
        return value or "unknown"
    return f"{versioned[name]} {value}" if value else f"no {versioned[name]}"


_LINE = re.compile(r":\d+(?= in )")


@dataclass(frozen=True)
class Origin:
    """What is equal for memory of one line in both reports, though lines may have moved."""

    place: str
    """File and function, as in ``net.py in Block.forward``; a few words if there is no line."""
    code: str | None
    module: str | None
    kind: str | None


@dataclass(frozen=True)
class PeakChange:
    """Memory of one origin at the peaks, in bytes."""

    origin: Origin
    line: str
    """Of the new report, or of the old one if the new one has none of it: ``net.py:11 in f``."""
    old_bytes: int
    new_bytes: int

    @property
    def rise_bytes(self) -> int:
        """By how much there is more of it now."""
        return self.new_bytes - self.old_bytes


@dataclass(frozen=True)
class PeakDifference:
    """The peaks of one region in two reports, in bytes."""

    key: RegionKey
    old_bytes: int
    new_bytes: int
    changes: tuple[PeakChange, ...]
    """What there is more or less of, the largest rise first."""


def peak_differences(
    old: Report, new: Report, comparison: Comparison
) -> tuple[tuple[PeakDifference, ...], int]:
    """Return the differences of the peaks, the largest rise first, and how many are not known.

    Args:
        old: a report.
        new: another report of the same tests.
        comparison: of both. A region counts as not known if a report does not list what was live
            at its peak.
    """
    before, after = keyed(old.results), keyed(new.results)
    differences, unknown = [], 0
    for key in after:
        if key not in before or key in comparison.incomplete:
            continue
        former, latter = before[key].record, after[key].record
        if not (former.at_peak and latter.at_peak):
            unknown += 1
            continue
        changes = _changes(former, latter)
        if changes:
            sizes = former.peak_bytes, latter.peak_bytes
            differences.append(PeakDifference(key, *sizes, changes))
    differences.sort(key=lambda it: it.old_bytes - it.new_bytes)
    return tuple(differences), unknown


def _changes(old: RegionRecord, new: RegionRecord) -> tuple[PeakChange, ...]:
    (before, old_lines), (after, new_lines) = _by_origin(old), _by_origin(new)
    lines = {**old_lines, **new_lines}
    changes = (
        PeakChange(origin, line, before[origin], after[origin]) for origin, line in lines.items()
    )
    changed = [change for change in changes if change.rise_bytes]
    return tuple(sorted(changed, key=lambda change: -change.rise_bytes))


def _by_origin(record: RegionRecord) -> tuple[Counter[Origin], Mapping[Origin, str]]:
    sizes: Counter[Origin] = Counter()
    lines: dict[Origin, str] = {}
    for holding in record.at_peak:
        origin = _origin_of(holding)
        sizes[origin] += holding.bytes
        lines.setdefault(origin, holding.created_at[0] if holding.created_at else origin.place)
    return sizes, lines


def _origin_of(holding: Holding) -> Origin:
    if holding.before_region:
        place = "live before the region"
    elif holding.created_at:
        place = _LINE.sub("", holding.created_at[0])
    else:
        place = holding.inside or "by unknown code"
    return Origin(place, holding.code, holding.module, holding.kind)
