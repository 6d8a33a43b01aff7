"""Hold a region to its committed baseline, and bring baselines up to date."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cka_memory.baseline_file import Entries, Figures, Fingerprint, Key
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.region import RegionRecord
from pytest_cka_memory.results import Result
from pytest_cka_memory.tolerance import (
    COMPARED,
    Difference,
    Tolerance,
    differences,
    parse_tolerance,
)
from pytest_cka_memory.units import format_exact, format_fraction

MARKER = "memory_baseline"
EXAMPLE = 'memory_baseline(tolerance="5%")'
DESCRIPTION = "Every figure may be above its committed baseline by at most `tolerance`."
_REMEDY = "write one with --cka-memory-update-baseline"


def fingerprint_of(facts: Mapping[str, Any]) -> Fingerprint:
    """What of a session's facts its figures depend on.

    Not the CPU's model: tensor storages are booked, and they have the same bytes on each.
    """
    on_cpu = facts["device"] == "cpu"
    return Fingerprint(
        device="cpu" if on_cpu else facts["device_name"],
        meter=facts["meter"],
        torch=_minor(facts["torch"]),
        cuda=_minor(facts["cuda"]),
    )


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def figures_of(record: RegionRecord) -> Figures:
    """What a baseline keeps of a record: whole bytes, growth rounded up and never below zero."""
    found = {name: getattr(record, name) for name in COMPARED}
    return {name: None if size is None else max(0, math.ceil(size)) for name, size in found.items()}


def tolerance_of(args: Sequence[Any], kwargs: Mapping[str, Any], default: Tolerance) -> Tolerance:
    """Return what a ``memory_baseline`` marker asks for; `default` where it says nothing.

    Raises:
        LimitError: for arguments it cannot have, with an example of what to write.
    """
    if not args and not kwargs:
        return default
    written = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not set(kwargs) <= {"tolerance"}:
        raise LimitError(f"{MARKER}({written}): wrong arguments; write e.g. @pytest.mark.{EXAMPLE}")
    try:
        return parse_tolerance(given[0])
    except LimitError as error:
        raise LimitError(f"{MARKER}({written}): {error}") from None


@dataclass(frozen=True)
class WithinBaseline(Limit):
    """No figure may be above that of the baseline by more than the tolerance."""

    tolerance: Tolerance
    known: Mapping[str, Figures]
    """Label -> figures: what the baseline has of this test on this device."""
    device: Fingerprint | None = None
    """On what the test runs, if the baseline has nothing of that."""
    required: bool = False
    """Whether a region without a baseline breaks this limit."""

    def judge(self, record: RegionRecord) -> Verdict:
        """The first of :meth:`verdicts`."""
        return next(iter(self.verdicts(record)), None)

    def verdicts(self, record: RegionRecord) -> list[Verdict]:
        """A breach for each figure that is too high, or what says why nothing was judged."""
        figures = self.known.get(record.label)
        if figures is None:
            return [self._without_baseline()]
        now = {name: getattr(record, name) for name in COMPARED}
        found = differences(figures, now, self.tolerance)
        return [self._breach(difference) for difference in found if difference.broken]

    def _without_baseline(self) -> Verdict:
        missing = "region" if self.device is None else f"device ({self.device})"
        reason = f"no baseline for this {missing}; {_REMEDY}"
        if not self.required:
            return Unjudged(self.text, reason)
        message = f"cannot be judged, and --cka-memory-require-baseline is given: {reason}"
        return Breach(self.text, 0, None, message, next(iter(COMPARED)))

    def _breach(self, difference: Difference) -> Breach:
        old, new, allowed = difference.old_bytes, difference.new_bytes, difference.allowed_bytes
        noun = COMPARED[difference.figure]
        if new is None:
            message = (
                f"cannot be judged, {noun} is {format_exact(old)} in the baseline and not known "
                "now: feed 5 full batches or more, or measure the baseline anew"
            )
        else:
            message = (
                f"{noun} {_written(new)}, allowed {format_exact(allowed)} ({self.tolerance.text} "
                f"above the baseline's {format_exact(old)}): {_written(new - allowed)} too much"
            )
        return Breach(self.text, allowed, new, message, difference.figure)


def _written(size: float) -> str:
    return format_exact(size) if isinstance(size, int) else f"{format_fraction(size)} bytes"


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
