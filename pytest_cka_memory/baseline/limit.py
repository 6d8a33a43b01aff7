"""The limit that a committed baseline sets."""

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_cka_memory.baseline.file import Figures
from pytest_cka_memory.core.figures import COMPARED, RegionRecord
from pytest_cka_memory.core.fingerprint import Fingerprint
from pytest_cka_memory.core.tolerance import Difference, Tolerance, differences, parse_tolerance
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.units import format_exact

REMEDY = "write one with --cka-memory-update-baseline"
_NOT_GIVEN = object()


def tolerance_of_marker(
    tolerance: object = _NOT_GIVEN, *, relative_to: object = None
) -> Tolerance | None:
    """Return the tolerance of a ``memory_baseline`` marker; None if it gives none.

    Raises:
        LimitError: if `tolerance` is not a valid tolerance, or `relative_to` is not a text.
    """
    if relative_to is not None and not isinstance(relative_to, str):
        raise LimitError(f"relative_to={relative_to!r}: write the id of a parameter, e.g. 'eager'")
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
    reference: str = ""
    """The test whose figures are the baseline; empty if they are those of the file."""

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
        reason = f"no baseline for this {missing}; {REMEDY}"
        if self.reference:
            reason = (
                f"{self.reference} has no completed region of this name that ran before in this "
                "process; run both in this order, with pytest-xdist in one group (xdist_group)"
            )
        if not self.required:
            return Unjudged(self.text, reason)
        message = f"cannot be judged although --cka-memory-require-baseline is given: {reason}"
        return Breach(self.text, 0, None, message, next(iter(COMPARED)))

    @property
    def _whose(self) -> str:
        return f"{self.reference}'s" if self.reference else "the baseline's"

    def _breach(self, difference: Difference) -> Breach:
        old, new, allowed = difference.old_bytes, difference.new_bytes, difference.allowed_bytes
        noun = COMPARED[difference.figure].noun
        if new is None:
            message = (
                f"cannot be judged: {noun} is {format_exact(old)} in the baseline and not known "
                "now; run 5 full batches or more, or update the baseline"
            )
        else:
            excess = f"{format_exact(new - allowed)} too much"
            message = (
                f"{noun} {format_exact(new)}, allowed {format_exact(allowed)} "
                f"({self.tolerance.text} above {self._whose} {format_exact(old)}): {excess}"
            )
        return Breach(self.text, allowed, new, message, difference.figure)
