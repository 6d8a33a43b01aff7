"""Update the entries of a baseline file with what a session measured."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pytest_cka_memory.baseline.changes import BaselineChange, changes
from pytest_cka_memory.baseline.file import BaselineKey, Entries, Figures
from pytest_cka_memory.core.figures import COMPARED, rounded_figures
from pytest_cka_memory.core.verdicts import Result


@dataclass(frozen=True)
class Update:
    """The new entries, and how many regions were added, changed, left or dropped."""

    entries: Entries
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    dropped: int = 0
    changes: tuple[BaselineChange, ...] = ()
    """Every figure of the changed regions that rose or fell."""


Measured = tuple[BaselineKey, Result]
"""A region, and what identifies its line."""


def updated(old: Mapping[BaselineKey, Figures], measured: Iterable[Measured]) -> Update:
    """Return `old` with the regions of every test that passed; everything else stays.

    A region that such a test no longer opens is dropped, for the same fingerprint only; so is a
    line that another machine has recorded of other code, and one that has no conditions. If a
    region was measured more than once, as with ``--dist=each``, the highest figures count.
    """
    results = list(measured)
    fresh = measured_entries(results)
    gone = gone_regions(old, seen_regions(results)) | _outdated(old, fresh)
    old = _with_conditions(old, fresh)
    return Update(
        {**{key: figures for key, figures in old.items() if key not in gone}, **fresh},
        added=len(fresh.keys() - old.keys()),
        changed=sum(key in old and old[key] != figures for key, figures in fresh.items()),
        unchanged=sum(old.get(key) == figures for key, figures in fresh.items()),
        dropped=len(gone),
        changes=changes(old, fresh),
    )


def _with_conditions(old: Mapping[BaselineKey, Figures], fresh: Iterable[BaselineKey]) -> Entries:
    """Return `old` with the conditions of the fresh lines in those that have none."""
    known = {key._replace(conditions=None): key for key in fresh}
    return {known.get(key, key): figures for key, figures in old.items()}


def _outdated(
    old: Mapping[BaselineKey, Figures], fresh: Mapping[BaselineKey, Figures]
) -> set[BaselineKey]:
    """Return lines of other machines whose figures differ where machines do not matter."""
    now = {key._replace(conditions=None): figures for key, figures in fresh.items()}
    return {
        key
        for key, figures in old.items()
        if key not in fresh and key.conditions is not None
        if (current := now.get(key._replace(conditions=None))) is not None
        if any(figures.get(name) != current.get(name) for name in _ON_EVERY_MACHINE)
    }


_ON_EVERY_MACHINE = [name for name, row in COMPARED.items() if "threads" not in row.depends_on]


def measured_entries(measured: Iterable[Measured]) -> Entries:
    """Return the figures of every region that ran to its end in a test that passed."""
    entries: Entries = {}
    for key, result in measured:
        if result.outcome == "passed" and result.record.completed:
            entries[key] = _highest(entries.get(key, {}), rounded_figures(result.record))
    return entries


def seen_regions(measured: Iterable[Measured]) -> list[BaselineKey]:
    """Return the regions of tests that passed, also those that an exception ended."""
    return [key for key, result in measured if result.outcome == "passed"]


def _highest(one: Figures, other: Figures) -> Figures:
    return {
        name: max((f for f in (one.get(name), other[name]) if f is not None), default=None)
        for name in other
    }


def gone_regions(entries: Iterable[BaselineKey], seen: Collection[BaselineKey]) -> set[BaselineKey]:
    """Return entries of tests in `seen` that did not open this region this time."""
    regions = {key._replace(conditions=None) for key in seen}
    tests = {(key.nodeid, key.fingerprint) for key in regions}
    return {
        key
        for key in entries
        if (key.nodeid, key.fingerprint) in tests and key._replace(conditions=None) not in regions
    }
