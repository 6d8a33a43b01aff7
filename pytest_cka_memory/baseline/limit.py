"""The limit that a committed baseline sets, and which tests it is set for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_cka_memory.baseline import file as baseline_file
from pytest_cka_memory.baseline.file import Entries, Figures, Fingerprint, Key
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import example_of
from pytest_cka_memory.core.tolerance import (
    COMPARED,
    Difference,
    Tolerance,
    differences,
    parse_tolerance,
)
from pytest_cka_memory.errors import BaselineError, LimitError
from pytest_cka_memory.limits import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.units import format_exact, format_fraction

MARKER = "memory_baseline"
EXAMPLE = example_of(MARKER)
_REMEDY = "write one with --cka-memory-update-baseline"


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
class BaselinePlan:
    """What a session does with baselines."""

    path: Path
    """The file; it need not be there, unless it was named."""
    root: Path
    """What the paths in test names start from."""
    tolerance: Tolerance
    """For tests whose marker says nothing else."""
    named: bool = False
    """Whether the file was asked for: then all that is measured is held to it."""
    updating: bool = False
    """Whether this session writes baselines, and so holds nothing to them."""
    required: bool = False
    """Whether a region without a baseline fails."""

    @property
    def asked_for(self) -> bool:
        """Whether the session is about baselines, not a test's marker alone."""
        return self.named or self.updating

    @cached_property
    def entries(self) -> Entries:
        """The regions of the file, read when first asked for.

        Raises:
            BaselineError: for a file that cannot be used, or was named and is not there.
        """
        if self.path.exists():
            return baseline_file.read(self.path)
        if self.named and not self.updating:
            raise BaselineError(f"there is no {self.path}; {_REMEDY}")
        return {}

    def measures(self, nodeid: str) -> bool:
        """Whether a test is measured for being in the file; raises as :attr:`entries`."""
        return self.asked_for and nodeid in self._by_test

    def limit(
        self, text: str, nodeid: str, fingerprint: Fingerprint | None, tolerance: Tolerance
    ) -> Limit:
        """What the regions of a test are held to; raises as :attr:`entries`.

        Without a fingerprint, before a device is known, that is nothing yet.
        """
        known = {
            key.label: self.entries[key]
            for key in self._by_test.get(nodeid, ())
            if key.fingerprint == fingerprint
        }
        device = None if fingerprint in self._fingerprints else fingerprint
        return WithinBaseline(text, tolerance, known, device, self.required)

    @cached_property
    def _by_test(self) -> Mapping[str, Sequence[Key]]:
        found: dict[str, list[Key]] = {}
        for key in self.entries:
            found.setdefault(key.nodeid, []).append(key)
        return found

    @cached_property
    def _fingerprints(self) -> set[Fingerprint]:
        return {key.fingerprint for key in self.entries}
