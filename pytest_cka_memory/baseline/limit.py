"""The limit that a committed baseline sets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_cka_memory.baseline.file import Figures
from pytest_cka_memory.core.conditions import Changed, Fingerprint, listed
from pytest_cka_memory.core.figures import COMPARED, RegionRecord
from pytest_cka_memory.core.relations import relations_of
from pytest_cka_memory.core.tolerance import (
    Difference,
    Tolerance,
    differences,
    excess,
    not_comparable,
    parse_tolerance,
)
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.units import format_exact

REMEDY = "write one with --cka-memory-update-baseline"


_NOT_GIVEN = object()


def tolerance_of_marker(
    tolerance: object = _NOT_GIVEN,
    *,
    relative_to: object = None,
    less_than: object = None,
    at_most: object = None,
    saves: object = None,
    of: object = None,
) -> Tolerance | None:
    """Return the tolerance of a ``memory_baseline`` marker; None if it gives none.

    Args:
        tolerance: how far a figure may rise.
        relative_to: id of a parameter; see
            :func:`~pytest_cka_memory.core.relations.relations_of` for this and the next four.
        less_than: id of a parameter.
        at_most: a factor and the id of a parameter.
        saves: a size, with `relative_to`.
        of: the figure that is compared.

    Raises:
        LimitError: if one of them cannot be read.
    """
    given = None if tolerance is _NOT_GIVEN else parse_tolerance(tolerance)
    relations_of(
        relative_to=relative_to,
        less_than=less_than,
        at_most=at_most,
        saves=saves,
        of=of,
        tolerance=given or parse_tolerance("0%"),
    )
    return given


@dataclass(frozen=True)
class WithinBaseline(Limit):
    """No figure may be more than the tolerance above the baseline."""

    tolerance: Tolerance
    known: Mapping[str, Figures]
    """Label -> the baseline of this test on this device."""
    device: Fingerprint | None = None
    """What the test runs on, if the baseline has no entry for it."""
    required: bool = False
    """Whether a region without a baseline breaks this limit."""
    changed: Mapping[str, Sequence[Changed]] = field(default_factory=dict)
    """Label -> facts that its figures depend on, and that are not what they were."""

    def judge(self, record: RegionRecord) -> Verdict:
        """Return the first of :meth:`verdicts`."""
        return next(iter(self.verdicts(record)), None)

    def verdicts(self, record: RegionRecord) -> list[Verdict]:
        """Return a breach per figure that is too high, and what was not judged, with the reason."""
        old, facts = self.known.get(record.label), self.changed.get(record.label, ())
        if old is None:
            return [self._without_baseline()]
        now = {name: getattr(record, name) for name in COMPARED}
        found = differences(old, now, self.tolerance, facts)
        breaches = [self._breach(difference) for difference in found if difference.broken]
        return [*breaches, *self._left_out(old, facts)]

    def _without_baseline(self) -> Verdict:
        missing = "region" if self.device is None else f"device ({self.device})"
        reason = f"no baseline for this {missing}; {REMEDY}"
        if not self.required:
            return Unjudged(self.text, reason)
        message = f"cannot be judged although --cka-memory-require-baseline is given: {reason}"
        return Breach(self.text, 0, None, message, next(iter(COMPARED)))

    def _left_out(self, old: Figures, facts: Sequence[Changed]) -> Iterator[Unjudged]:
        """Yield what is not judged because it depends on facts that have changed."""
        groups: dict[str, list[str]] = {}
        for figure, changes, place in not_comparable(old, facts):
            instead = "; judged without scratch memory of operators" if place else ""
            groups.setdefault(f"{listed(changes)}{instead}", []).append(COMPARED[figure].noun)
        for reason, nouns in groups.items():
            remedy = "record it for this machine with --cka-memory-update-baseline"
            yield Unjudged(f"{self.text}: {', '.join(nouns)}", f"{reason}; {remedy}")

    def _breach(self, difference: Difference) -> Breach:
        old, new, allowed = difference.old_bytes, difference.new_bytes, difference.allowed_bytes
        noun = COMPARED[difference.figure].noun
        if new is None:
            message = (
                f"cannot be judged: {noun} is {format_exact(old)} in the baseline and not known "
                "now; run 5 full batches or more, or update the baseline"
            )
        else:
            message = excess(difference, self.tolerance, "the baseline")
        return Breach(self.text, allowed, new, message, difference.figure)
