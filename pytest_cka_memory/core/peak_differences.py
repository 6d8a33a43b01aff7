"""What was live at the peak of a region in one report and not, or less, in another."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.two_reports import Comparison, RegionKey, keyed

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
    old: Report, new: Report, found: Comparison
) -> tuple[tuple[PeakDifference, ...], int]:
    """Return the differences of the peaks, the largest rise first, and how many are not known.

    Args:
        old: a report.
        new: another report of the same tests.
        found: the comparison of both. Of its regions, one counts as not known if a report does not
            list what was live at the peak.
    """
    before, after = keyed(old.results), keyed(new.results)
    differences, unknown = [], 0
    for key in after:
        if key not in before or key in found.incomplete:
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
