"""What a baseline keeps of a region, on what it depends, and how it is brought up to date."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pytest_cka_memory.baseline.file import Entries, Figures, Fingerprint, Key
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.tolerance import COMPARED
from pytest_cka_memory.core.verdicts import Result


def fingerprint_of(facts: Mapping[str, Any]) -> Fingerprint:
    """What of a session's facts its figures depend on.

    Not the CPU's model: tensor storages are booked, and they have the same bytes on each.
    """
    on_cpu = facts["device"] == "cpu"
    return Fingerprint(
        device="cpu" if on_cpu else facts["device_name"],
        meter=facts["meter"],
        torch=_minor(facts["torch"] or _installed_torch()),
        cuda=_minor(facts["cuda"]),
    )


@cache
def _installed_torch() -> str | None:
    """For a meter that imports none: a test may or may not have, and that must not matter."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _minor(number: str | None) -> str | None:
    return None if number is None else ".".join(number.split("+")[0].split(".")[:2])


def figures_of(record: RegionRecord) -> Figures:
    """What a baseline keeps of a record: whole bytes, growth rounded up and never below zero."""
    found = {name: getattr(record, name) for name in COMPARED}
    return {name: None if size is None else max(0, math.ceil(size)) for name, size in found.items()}


@dataclass(frozen=True)
class Update:
    """A baseline brought up to date, and what that changed, in regions."""

    entries: Entries
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    dropped: int = 0


def updated(old: Mapping[Key, Figures], measured: Iterable[tuple[Fingerprint, Result]]) -> Update:
    """Put in the regions of every test that passed; all else stays as it is in `old`.

    Of such a test, a region that is gone is dropped, for its own fingerprint. Where it was
    measured more than once, as with ``--dist=each``, the highest figures count.
    """
    passed = [(key, result) for key, result in _keyed(measured) if result.outcome == "passed"]
    fresh: Entries = {}
    for key, result in passed:
        if result.record.completed:
            fresh[key] = _highest(fresh.get(key, {}), figures_of(result.record))
    gone = gone_regions(old, [key for key, _ in passed])
    return Update(
        {**{key: figures for key, figures in old.items() if key not in gone}, **fresh},
        added=len(fresh.keys() - old.keys()),
        changed=sum(key in old and old[key] != figures for key, figures in fresh.items()),
        unchanged=sum(old.get(key) == figures for key, figures in fresh.items()),
        dropped=len(gone),
    )


def _keyed(measured: Iterable[tuple[Fingerprint, Result]]) -> list[tuple[Key, Result]]:
    return [
        (Key(result.nodeid, result.record.label, fingerprint), result)
        for fingerprint, result in measured
    ]


def _highest(one: Figures, other: Figures) -> Figures:
    return {
        name: max((f for f in (one.get(name), other[name]) if f is not None), default=None)
        for name in other
    }


def gone_regions(entries: Iterable[Key], seen: Collection[Key]) -> set[Key]:
    """Entries of tests in `seen`, which opened no such region this time."""
    keys = set(seen)
    tests = {(key.nodeid, key.fingerprint) for key in keys}
    return {key for key in entries if (key.nodeid, key.fingerprint) in tests and key not in keys}
