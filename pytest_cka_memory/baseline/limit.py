"""The limit that a committed baseline sets, and which tests it applies to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytest_cka_memory.baseline import file as baseline_file
from pytest_cka_memory.baseline.file import BaselineKey, Entries, Figures
from pytest_cka_memory.core.figures import COMPARED, RegionRecord
from pytest_cka_memory.core.fingerprint import Fingerprint
from pytest_cka_memory.core.tolerance import Difference, Tolerance, differences, parse_tolerance
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import BaselineError
from pytest_cka_memory.units import format_exact, format_fraction

MARKER = "memory_baseline"
_REMEDY = "write one with --cka-memory-update-baseline"
_NOT_GIVEN = object()


def tolerance_of_marker(tolerance: object = _NOT_GIVEN) -> Tolerance | None:
    """Return the tolerance of a ``memory_baseline`` marker; None if it gives none.

    Raises:
        LimitError: if `tolerance` is not a valid tolerance.
    """
    return None if tolerance is _NOT_GIVEN else parse_tolerance(tolerance)


@dataclass(frozen=True)
class WithinBaseline(Limit):
    """No figure may be more than the tolerance above the baseline."""

    tolerance: Tolerance
    known: Mapping[str, Figures]
    """Label -> figures: the baseline of this test on this device."""
    device: Fingerprint | None = None
    """What the test runs on, if the baseline has no entry for it."""
    required: bool = False
    """Whether a region without a baseline breaks this limit."""

    def judge(self, record: RegionRecord) -> Verdict:
        """Return the first of :meth:`verdicts`."""
        return next(iter(self.verdicts(record)), None)

    def verdicts(self, record: RegionRecord) -> list[Verdict]:
        """Return a breach per figure that is too high, or the reason why nothing was judged."""
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
        message = f"cannot be judged although --cka-memory-require-baseline is given: {reason}"
        return Breach(self.text, 0, None, message, next(iter(COMPARED)))

    def _breach(self, difference: Difference) -> Breach:
        old, new, allowed = difference.old_bytes, difference.new_bytes, difference.allowed_bytes
        noun = COMPARED[difference.figure].noun
        if new is None:
            message = (
                f"cannot be judged: {noun} is {format_exact(old)} in the baseline and not known "
                "now; run 5 full batches or more, or update the baseline"
            )
        else:
            message = (
                f"{noun} {_exact(new)}, allowed {format_exact(allowed)} ({self.tolerance.text} "
                f"above the baseline's {format_exact(old)}): {_exact(new - allowed)} too much"
            )
        return Breach(self.text, allowed, new, message, difference.figure)


def _exact(size: float) -> str:
    return format_exact(size) if isinstance(size, int) else f"{format_fraction(size)} bytes"


@dataclass(frozen=True)
class BaselinePlan:
    """How a session uses baselines."""

    path: Path
    """The file; it must exist only if the user named it."""
    root: Path
    """Folder that the paths in test names are relative to."""
    tolerance: Tolerance
    """For tests whose marker gives none."""
    named: bool = False
    """Whether the user named the file: then every measured test is compared with it."""
    updating: bool = False
    """Whether this session writes baselines; then it compares no test with them."""
    pruning: bool = False
    """Whether this session removes the lines of tests that no longer exist."""
    required: bool = False
    """Whether a region without a baseline fails."""

    @property
    def asked_for(self) -> bool:
        """Whether an option, not only a marker, asks for baselines."""
        return self.named or self.updating or self.pruning

    @cached_property
    def entries(self) -> Entries:
        """Regions of the file, read on first use.

        Raises:
            BaselineError: if the file cannot be used, or does not exist and an option needs it.
        """
        if self.path.exists():
            return baseline_file.read(self.path)
        if (self.named or self.pruning) and not self.updating:
            raise BaselineError(f"{self.path} does not exist; {_REMEDY}")
        return {}

    def measures(self, nodeid: str) -> bool:
        """Whether a test is measured because the file has it; raises like :attr:`entries`."""
        return self.asked_for and nodeid in self._by_test

    def limit(
        self, text: str, nodeid: str, fingerprint: Fingerprint | None, tolerance: Tolerance
    ) -> Limit:
        """Return the limit on the regions of a test; raises like :attr:`entries`.

        Before the device is known, `fingerprint` is None and the limit has no figures.
        """
        known = {
            key.label: self.entries[key]
            for key in self._by_test.get(nodeid, ())
            if key.fingerprint == fingerprint
        }
        device = None if fingerprint in self._fingerprints else fingerprint
        return WithinBaseline(text, tolerance, known, device, self.required)

    @cached_property
    def _by_test(self) -> Mapping[str, Sequence[BaselineKey]]:
        found: dict[str, list[BaselineKey]] = {}
        for key in self.entries:
            found.setdefault(key.nodeid, []).append(key)
        return found

    @cached_property
    def _fingerprints(self) -> set[Fingerprint]:
        return {key.fingerprint for key in self.entries}
