"""Judge a region's record: by limits, and by how far a figure may rise above an older one.

Baselines and the comparison of two reports have the same tolerance.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from pytest_cka_memory.core.conditions import Changed
from pytest_cka_memory.core.decoder import MAX_NUMBER, decode
from pytest_cka_memory.core.figure_rows import NOT_OF_DEVICE
from pytest_cka_memory.core.figures import COMPARED, NESTED, RegionRecord
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import format_exact, parse_size


@dataclass(frozen=True)
class Breach:
    """A limit that a region broke, or that could not be judged and so counts as broken."""

    limit: str
    """As a user writes it: ``max_retained_mb(1)``."""
    allowed_bytes: int
    """The most that the limit allows; per batch for a growth limit."""
    measured_bytes: float | None
    """What was measured; None if the limit could not be judged."""
    message: str
    """One sentence: measured, allowed, by how much."""
    figure: str
    """Name of the figure that is too high."""
    warns: bool = False
    """Whether it is only a warning, so that the test does not fail."""
    warmup: int | None = None
    """How many batches a limit on growth leaves out; None for every other limit."""

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name.

        Returns:
            Builtin types only, as they are in the JSON report.
        """
        return asdict(self)


@dataclass(frozen=True)
class Unjudged:
    """A limit that does not apply on this device; reports name it, so it is not a silent pass."""

    limit: str
    """As a user writes it; with what it leaves out, if the rest was judged."""
    reason: str


WARNED = "warning"
"""The verdict on a broken limit that is only a warning."""
KNOWN = "known (xfail)"
"""The verdict on a broken limit of a test that is marked to fail, and does."""

Verdict = Breach | Unjudged | None
"""None means that the limit was kept."""


@dataclass(frozen=True)
class Limit(ABC):
    """One limit on a region."""

    text: str
    """As a user writes it: ``max_retained_mb(1)``."""

    warns: bool = field(default=False, kw_only=True)
    """Whether a test that breaks it gets a warning and does not fail."""

    scope: str = field(default="function", kw_only=True)
    """What it is judged over: each region of a test, or all tests of a ``class`` or ``module``."""

    @property
    def addition(self) -> str:
        """What must be measured in addition to judge it, as in ``ADDITIONS``; empty if nothing."""
        return ""

    @property
    def reports_host(self) -> bool:
        """Whether it reports, unjudged, what several batches have left on the host."""
        return False

    @property
    def judges_device(self) -> bool:
        """Whether it judges memory of the measured device, so that a test without any keeps it.

        Such a limit is not judged if a test allocates nothing on an accelerator. A limit on
        something else, such as tensors on the host, returns False and is always judged.
        """
        return self.addition not in NOT_OF_DEVICE

    @abstractmethod
    def judge(self, record: RegionRecord) -> Verdict:
        """Judge a region by this limit. A value equal to the limit keeps it.

        Args:
            record: the figures of a region that has ended.

        Returns:
            None if `record` keeps the limit, a :class:`Breach` if not, :class:`Unjudged` if the
            limit does not apply on this device.
        """

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """Judge a region by each figure that this limits; override it if there are several.

        Args:
            record: the figures of a region that has ended.

        Returns:
            One verdict for each figure.
        """
        return [self.judge(record)]


@dataclass(frozen=True)
class Result:
    """A region with its verdicts. Its dict form travels on a test report to any process."""

    nodeid: str
    record: RegionRecord
    breaches: tuple[Breach, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    limits: tuple[str, ...] = ()
    """The limits that applied, as users write them."""
    outcome: str = "passed"
    """The test's: passed, failed, skipped, xfailed, xpassed or error."""
    worker: str = "main"
    """The process that measured: main, gw0, rank 1."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of other plugins, see the hook ``pytest_cka_memory_region``; builtin types."""

    @property
    def name(self) -> str:
        """Test, label and rank in one text."""
        return " ".join(filter(None, (self.nodeid, self.record.label, self.rank)))

    @property
    def rank(self) -> str:
        """``rank 1`` under torchrun; otherwise empty."""
        return self.worker if self.worker.startswith("rank ") else ""

    @property
    def verdict(self) -> str:
        """One of ok, BREACH, warning, known (xfail), no limit, not judged."""
        if self.breaches:
            return self.verdict_of(min(self.breaches, key=lambda breach: breach.warns))
        if not self.record.completed:
            return "not judged"
        if not self.limits:
            return "no limit"
        unjudged = {unjudged.limit for unjudged in self.unjudged}
        return "not judged" if unjudged.issuperset(self.limits) else "ok"

    def verdict_of(self, breach: Breach) -> str:
        """Return the verdict on one of the broken limits.

        Args:
            breach: one of :attr:`breaches`.

        Returns:
            ``BREACH``, ``warning`` or ``known (xfail)``.
        """
        if breach.warns:
            return WARNED
        return KNOWN if self.outcome == "xfailed" else "BREACH"

    def to_dict(self) -> dict[str, Any]:
        """Return the region as it is in the JSON report.

        Returns:
            Builtin types only, in the order of the published schema.
        """
        record = self.record.to_dict()
        return {
            "nodeid": self.nodeid,
            "label": record.pop("label"),
            "worker": self.worker,
            "outcome": self.outcome,
            "verdict": self.verdict,
            **record,
            "limits": list(self.limits),
            "breaches": [breach.to_dict() for breach in self.breaches],
            "unjudged": [asdict(unjudged) for unjudged in self.unjudged],
            **({"extra": self.extra} if self.extra else {}),
        }

    def filled(self) -> dict[str, Any]:
        """Return what travels on a test report: see :meth:`RegionRecord.filled`.

        Returns:
            Builtin types, without the process; :meth:`from_filled` reads it.
        """
        fields = {"nodeid": self.nodeid, "outcome": self.outcome, **self.record.filled()}
        if self.limits:
            fields["limits"] = list(self.limits)
        if self.breaches:
            fields["breaches"] = [breach.to_dict() for breach in self.breaches]
        if self.unjudged:
            fields["unjudged"] = [asdict(unjudged) for unjudged in self.unjudged]
        if self.extra:
            fields["extra"] = self.extra
        return fields

    @classmethod
    def from_filled(cls, data: Mapping[str, Any]) -> "Result":
        """Rebuild a result of a process of this session.

        Most regions have whole numbers and texts alone, which are checked together: one by one, as
        :meth:`from_dict` checks them, took most of the time after the last test.

        Args:
            data: what :meth:`filled` has returned, with ``outcome`` and ``worker``.

        Returns:
            An equal result.

        Raises:
            ShapeError: as :meth:`from_dict`.
        """
        numbers = [value for value in data.values() if type(value) is int]
        if (
            _PARTS.isdisjoint(data)
            and _PLAIN.issuperset(map(type, data.values()))
            and min(numbers, default=0) >= 0
            and max(numbers, default=0) < MAX_NUMBER
        ):
            figures = dict(data)
            nodeid, outcome, worker = map(figures.pop, ("nodeid", "outcome", "worker"))
            return cls(nodeid, RegionRecord.of(**figures), outcome=outcome, worker=worker)
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> "Result":
        """Rebuild a result.

        Args:
            data: what :meth:`to_dict` or :meth:`filled` has returned, also after JSON.
            where: the start of the path in error messages.

        Returns:
            An equal result.

        Raises:
            ShapeError: if a value is missing or has the wrong type.
        """
        result: Result = decode(cls, {**data, "record": dict(data)}, where, flat=("record",))
        return result


_PARTS = {"limits", "breaches", "unjudged", "extra", *NESTED}
"""Fields of a filled result that are more than a number or a text."""
_PLAIN = {int, str, bool}


def judge(nodeid: str, record: RegionRecord, limits: Sequence[Limit]) -> Result:
    """Judge `record` by every limit; a region that an exception ended is not judged."""
    if not limits:  # as in most tests of a session that only reports
        return Result(nodeid, record)
    judging = limits if record.completed else ()
    verdicts = [_warned(limit, verdict) for limit in judging for verdict in limit.verdicts(record)]
    return Result(
        nodeid,
        record,
        breaches=tuple(v for v in verdicts if isinstance(v, Breach)),
        unjudged=tuple(v for v in verdicts if isinstance(v, Unjudged)),
        limits=tuple(limit.text for limit in limits),
    )


def _warned(limit: Limit, verdict: Verdict) -> Verdict:
    return replace(verdict, warns=True) if limit.warns and isinstance(verdict, Breach) else verdict


_PERCENT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*")


@dataclass(frozen=True)
class Tolerance:
    """A share of the old figure, a number of bytes, or the sum of both."""

    text: str
    """As the user wrote it: ``5% + 64 KiB``."""
    share: Fraction = Fraction(0)
    """``5%`` is 1/20. A fraction, because a float would be a byte off at a boundary."""
    slack_bytes: int = 0

    def allowed_bytes(self, old: float) -> int:
        """Return the most whole bytes allowed for a figure that was `old`; 0 if `old` is negative.

        The absolute part comes on top in both cases.
        """
        level = max(Fraction(old), Fraction(0))
        return int(level * (1 + self.share)) + self.slack_bytes


def parse_tolerance(value: object) -> Tolerance:
    """Read ``'5%'``, ``'64 KiB'`` or ``'5% + 64 KiB'``.

    Raises:
        LimitError: for anything else; a number alone could mean percent, bytes or MB.
    """
    parts = value.split("+") if isinstance(value, str) else []
    percents = [percent for part in parts if (percent := _PERCENT.fullmatch(part))]
    sizes = [part for part in parts if not _PERCENT.fullmatch(part)]
    try:
        if len(percents) > 1 or len(sizes) > 1 or not parts:
            raise SizeError
        slack_bytes = sum(map(parse_size, sizes))
    except SizeError:
        raise LimitError(
            f"cannot read {value!r} as a tolerance; write '5%', '64 KiB' or '5% + 64 KiB'"
        ) from None
    share = sum((Fraction(percent[1]) / 100 for percent in percents), Fraction(0))
    return Tolerance(" ".join(str(value).split()), share, slack_bytes)


@dataclass(frozen=True)
class Difference:
    """A figure that has changed."""

    figure: str
    """Its name in a record."""
    old_bytes: float
    new_bytes: float | None
    """None if it was not determined this time, so that a rise cannot be ruled out."""
    allowed_bytes: int

    @property
    def broken(self) -> bool:
        """Whether it rose by more than the tolerance, or is not known."""
        # Not with >, which is False for a NaN.
        return self.new_bytes is None or not self.new_bytes <= self.allowed_bytes


def excess(difference: Difference, tolerance: Tolerance, whose: str) -> str:
    """Return by how much a known figure is above that of the baseline or of another test."""
    new, allowed = difference.new_bytes or 0, difference.allowed_bytes
    because = f"{tolerance.text} above {whose}'s {format_exact(difference.old_bytes)}"
    if allowed == difference.old_bytes:  # such as 5 % of 0
        because = f"as in {whose}"
    return (
        f"{COMPARED[difference.figure].noun} {format_exact(new)}, allowed {format_exact(allowed)} "
        f"({because}): {format_exact(new - allowed)} too much"
    )


def differences(
    old: Mapping[str, float | None],
    new: Mapping[str, float | None],
    tolerance: Tolerance,
    changed: Sequence[Changed] = (),
) -> list[Difference]:
    """Return every compared figure of `old` that has another value in `new`, higher or lower.

    Those that depend on one of the facts that have `changed` are left out. A figure that is
    compared in place of another is left out unless that one is.
    """
    undecided = depending_on(changed)
    return [
        Difference(figure, level, new.get(figure), tolerance.allowed_bytes(level))
        for figure, row in COMPARED.items()
        if figure not in undecided and (not row.in_place_of or row.in_place_of in undecided)
        if (level := old.get(figure)) is not None and new.get(figure) != level
    ]


def depending_on(changed: Sequence[Changed]) -> dict[str, list[Changed]]:
    """Return the compared figures that depend on some of these facts, with those facts."""
    facts_of_figures = {
        figure: [fact for fact in changed if fact.fact in row.depends_on]
        for figure, row in COMPARED.items()
    }
    return {figure: facts for figure, facts in facts_of_figures.items() if facts}


def not_comparable(
    old: Mapping[str, float | None], changed: Sequence[Changed]
) -> list[tuple[str, list[Changed], str]]:
    """Return figures of `old` that are not compared, with the facts, and what is in their place.

    That is the name of another figure, or empty.
    """
    undecided = depending_on(changed)
    places = {
        row.in_place_of: name
        for name, row in COMPARED.items()
        if name not in undecided and old.get(name) is not None
    }
    return [
        (figure, facts, places.get(figure, ""))
        for figure, facts in undecided.items()
        if old.get(figure) is not None and not COMPARED[figure].in_place_of
    ]
