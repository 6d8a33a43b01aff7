"""What one region of one test came to, and what all of a session did: figures and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.limits import Breach, Limit, Unjudged


@dataclass(frozen=True)
class Result:
    """A region, judged. Becomes builtin types to ride on a test report to any process."""

    nodeid: str
    record: RegionRecord
    breaches: tuple[Breach, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    limits: tuple[str, ...] = ()
    """Those that applied, as users write them."""
    outcome: str = "passed"
    """The test's: passed, failed, skipped, xfailed, xpassed or error."""
    worker: str = "main"
    extra: dict[str, Any] = field(default_factory=dict)
    """What other plugins add, see the hook ``pytest_cka_memory_region``; builtin types."""

    @property
    def name(self) -> str:
        """Test, label and rank, as people would say it."""
        return " ".join(filter(None, (self.nodeid, self.record.label, self.rank)))

    @property
    def rank(self) -> str:
        """Which of several ranks measured it, as ``rank 1``; else empty."""
        return self.worker if self.worker.startswith("rank ") else ""

    @property
    def verdict(self) -> str:
        """In a word or two: ok, BREACH, no limit, not judged."""
        if self.breaches:
            return "BREACH"
        if not self.record.completed:
            return "not judged"
        if not self.limits:
            return "no limit"
        return "not judged" if len(self.unjudged) == len(self.limits) else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Builtin types only, in the order of the published schema."""
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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Result":
        """Rebuild from :meth:`to_dict`."""
        return cls(
            nodeid=data["nodeid"],
            record=RegionRecord.from_dict(data),
            breaches=tuple(Breach(**breach) for breach in data["breaches"]),
            unjudged=tuple(Unjudged(**unjudged) for unjudged in data["unjudged"]),
            limits=tuple(data["limits"]),
            outcome=data["outcome"],
            worker=data["worker"],
            extra=data.get("extra", {}),
        )


def judge(nodeid: str, record: RegionRecord, limits: Sequence[Limit]) -> Result:
    """Hold `record` against every limit; one that an exception left is not judged."""
    judging = limits if record.completed else ()
    verdicts = [verdict for limit in judging for verdict in limit.verdicts(record)]
    return Result(
        nodeid,
        record,
        breaches=tuple(v for v in verdicts if isinstance(v, Breach)),
        unjudged=tuple(v for v in verdicts if isinstance(v, Unjudged)),
        limits=tuple(limit.text for limit in limits),
    )


@dataclass(frozen=True)
class Report:
    """A session: what every file, table and page is made from."""

    session: Mapping[str, Any]
    """Device, meter, versions: see :meth:`pytest_cka_memory.core.report.ReportBuilder.report`."""
    results: tuple[Result, ...]
    """Every region, in the order of collection."""
    missing: tuple[str, ...] = ()
    """Collected tests without a result."""
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    """Why tests that were to be measured could not be -> how many."""
    collected: frozenset[str] = frozenset()
    """Every test of the session, measured or not."""
    narrowed: bool = False
    """Whether tests of a file may have been left out: by -k, -m, ``file.py::test`` and the like."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Worker -> what its figures depend on; of one machine's cards not all may be alike."""
    locations: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    """Measured test -> its file, from pytest's root, and the line it starts on, from 1."""
    problems: tuple[str, ...] = ()
    """What failed the session beyond its tests."""
