"""Compare two reports: which figures rose by more than a tolerance, which regions came or went."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cka_memory.core.figures import rounded_figures
from pytest_cka_memory.core.fingerprint import fingerprint_of
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.tolerance import Difference, Tolerance, differences
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
    """Device, meter, torch and CUDA versions that differ, as (old, new) pairs."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Figures above the old ones by more than the tolerance."""
        return tuple(change for change in self.changes if change.difference.broken)


def compare(old: Report, new: Report, tolerance: Tolerance) -> Comparison:
    """Compare every region of `new` with the one of the same key in `old`."""
    before, after = _keyed(old.results), _keyed(new.results)
    both = [key for key in after if key in before]
    judged = {
        key: None for key in both if before[key].record.completed and after[key].record.completed
    }
    changes = [
        Change(key, difference)
        for key in judged
        for difference in differences(
            rounded_figures(before[key].record), rounded_figures(after[key].record), tolerance
        )
    ]
    return Comparison(
        tolerance,
        compared=len(judged),
        changes=tuple(sorted(changes, key=lambda change: not change.difference.broken)),
        incomplete=tuple(key for key in both if key not in judged),
        appeared=tuple(key for key in after if key not in before),
        vanished=tuple(key for key in before if key not in after),
        devices=tuple(_differing(old.session, new.session)),
    )


def _keyed(results: Iterable[Result]) -> dict[RegionKey, Result]:
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed = {}
    for result in results:
        name = (result.nodeid, result.record.label, result.rank)
        seen[name] += 1
        keyed[RegionKey(*name, seen[name])] = result
    return keyed


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for before, after in zip(fingerprint_of(old), fingerprint_of(new), strict=True):
        if before != after:
            yield before or "unknown", after or "unknown"
