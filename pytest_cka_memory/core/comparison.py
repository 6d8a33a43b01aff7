"""Two reports side by side: what rose by more than a tolerance, what is new, what is gone."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cka_memory.baseline.update import figures_of, fingerprint_of
from pytest_cka_memory.core.tolerance import Difference, Tolerance, differences
from pytest_cka_memory.core.verdicts import Report, Result


class Key(NamedTuple):
    """Which region: the same in both reports, whatever worker ran it."""

    nodeid: str
    label: str
    rank: str
    """``rank 1``, or empty outside torchrun."""
    occurrence: int
    """A test may open several regions of one label: from 1, in their order."""

    @property
    def name(self) -> str:
        """As people would say it."""
        again = f"#{self.occurrence}" if self.occurrence > 1 else ""
        return " ".join(filter(None, (self.nodeid, self.label, self.rank, again)))


@dataclass(frozen=True)
class Change:
    """A figure of a region that is not what it was."""

    key: Key
    difference: Difference


@dataclass(frozen=True)
class Comparison:
    """All that differs between two reports."""

    tolerance: Tolerance
    compared: int
    """Regions that are in both and ran to their end in both."""
    changes: tuple[Change, ...]
    """Every figure that rose or fell, regressions first."""
    incomplete: tuple[Key, ...]
    """Regions in both that an exception left in either: their figures say nothing."""
    appeared: tuple[Key, ...]
    vanished: tuple[Key, ...]
    devices: tuple[tuple[str, str], ...]
    """What figures depend on, old and new, where that differs: device, torch, CUDA, meter."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Figures above the old ones by more than the tolerance."""
        return tuple(change for change in self.changes if change.difference.broken)


def compare(old: Report, new: Report, tolerance: Tolerance) -> Comparison:
    """Hold every region of `new` against the one of the same name in `old`."""
    before, after = _keyed(old.results), _keyed(new.results)
    both = [key for key in after if key in before]
    judged = {
        key: None for key in both if before[key].record.completed and after[key].record.completed
    }
    changes = [
        Change(key, difference)
        for key in judged
        for difference in differences(
            figures_of(before[key].record), figures_of(after[key].record), tolerance
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


def _keyed(results: Iterable[Result]) -> dict[Key, Result]:
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed = {}
    for result in results:
        name = (result.nodeid, result.record.label, result.rank)
        seen[name] += 1
        keyed[Key(*name, seen[name])] = result
    return keyed


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for before, after in zip(fingerprint_of(old), fingerprint_of(new), strict=True):
        if before != after:
            yield before or "unknown", after or "unknown"
