"""The report of a session: every region of every process, and what could not be measured."""

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from pytest_cka_memory._version import __version__
from pytest_cka_memory.core.collection import Collection
from pytest_cka_memory.core.verdicts import Result

Payload = dict[str, Any]
"""What one test report carries, in builtin types.

``facts`` about the meter, ``regions`` as :meth:`Result.to_dict` returns them, the reasons why the
test is ``unmeasured``, whether the session is ``narrowed``, and regions of ``fixtures`` that ended
meanwhile.
"""


_GARBAGE_LEFT = (
    "≤ marks tests without limits for which collecting all garbage would have taken too long:",
    "what they retained may include reference cycles; a limit makes the figure exact",
)


@dataclass(frozen=True)
class Report:
    """A session: every file, table and page is made from it."""

    session: Mapping[str, Any]
    """Device, meter, versions, start time; see the JSON schema."""
    results: tuple[Result, ...]
    """Every region, in the order of collection."""
    missing: tuple[str, ...] = ()
    """Collected tests without a result."""
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    """Reason why tests could not be measured -> number of tests."""
    collected: frozenset[str] = frozenset()
    """Every test of the session, measured or not."""
    narrowed: bool = False
    """Whether tests of a file may have been left out, by -k, -m, ``file.py::test`` and the like."""
    collection: Collection = field(default_factory=Collection)
    """Which tests exist; recorded only for ``--cka-memory-prune-baseline``."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Worker -> facts about its device; the cards of one machine may differ."""
    locations: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    """Measured test -> its file, relative to pytest's root, and its first line, from 1."""
    problems: tuple[str, ...] = ()
    """Reasons why the session failed that belong to no test."""


@dataclass
class ReportBuilder:
    """Collects the results of a session from the test reports of any process."""

    started: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    facts: dict[str, Any] = field(default_factory=dict)
    unmeasured: Counter[str] = field(default_factory=Counter)
    """Reason why tests could not be measured -> number of tests."""
    workers: set[str] = field(default_factory=set)
    facts_of_workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    narrowed: bool = False
    """Whether tests of a collected file may have been left out."""
    locations: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _results: dict[str, list[Result]] = field(default_factory=dict)
    _of_fixtures: dict[str, dict[str, list[Result]]] = field(default_factory=dict)
    """Fixture -> worker -> its regions; each worker sets up a session's fixture of its own."""

    def expect(self, nodeids: Iterable[str]) -> None:
        """Record the tests of this session, in their order."""
        for nodeid in nodeids:
            self._expected.setdefault(nodeid, len(self._expected))

    def add(self, nodeid: str, worker: str, outcome: str, payload: Payload) -> None:
        """Add the regions of one test report; `worker` is the process that measured them."""
        self.workers.add(worker)
        self.facts = _with_notes(self.facts or payload["facts"], payload["facts"])
        self.facts_of_workers[worker] = payload["facts"]
        self.narrowed = self.narrowed or payload["narrowed"]
        for reason in payload["unmeasured"]:
            self.unmeasured[reason] += 1
        results = [Result.from_dict(region) for region in payload["regions"]]
        self._results.setdefault(nodeid, []).extend(
            replace(result, worker=worker, outcome=outcome) for result in results
        )

        for result in map(Result.from_dict, payload.get("fixtures", ())):
            if result.nodeid == nodeid:  # a fixture of this test alone
                self._results[nodeid].append(replace(result, worker=worker, outcome=outcome))
            else:
                of_workers = self._of_fixtures.setdefault(result.nodeid, {})
                of_workers.setdefault(worker, []).append(replace(result, worker=worker))

    def locate(self, nodeid: str, file: str, line: int | None) -> None:
        """Record the file and line of a test; `line` counts from 0, like pytest's."""
        self.locations[nodeid] = file, None if line is None else line + 1

    def forget(self, nodeid: str, worker: str) -> None:
        """Drop the results of a run of a test that is run again: the last run counts."""
        kept = [result for result in self._results.get(nodeid, []) if result.worker != worker]
        self._results[nodeid] = kept

    def finish(self, nodeid: str, *, teardown_failed: bool = False) -> None:
        """Record that a test has finished."""
        self._finished.add(nodeid)
        if teardown_failed:
            self._results[nodeid] = [
                replace(result, outcome="error") for result in self._results.get(nodeid, [])
            ]

    @property
    def results(self) -> list[Result]:
        """Every region in the order of collection, whichever process ran it; fixtures are last."""
        order = sorted(self._results, key=lambda nodeid: self._expected.get(nodeid, sys.maxsize))
        tests = [result for nodeid in order for result in self._results[nodeid]]
        return [*tests, *self.of_fixtures]

    @property
    def of_fixtures(self) -> list[Result]:
        """The regions of fixtures: of several workers those that needed most."""
        return [
            result
            for of_workers in self._of_fixtures.values()
            for result in max(of_workers.values(), key=_memory_needed)
        ]

    @property
    def missing(self) -> list[str]:
        """Collected tests without a result."""
        return [nodeid for nodeid in self._expected if nodeid not in self._finished]

    @property
    def measured(self) -> int:
        """Number of completed regions, which ``--cka-memory-min-regions`` counts."""
        return sum(result.record.completed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return what another rank needs to :meth:`absorb` it; builtin types only."""
        return {
            "facts": self.facts,
            "unmeasured": dict(self.unmeasured),
            "workers": sorted(self.workers),
            "narrowed": self.narrowed,
            "expected": list(self._expected),
            "missing": self.missing,
            "results": [result.to_dict() for result in self.results],
        }

    def absorb(self, data: Mapping[str, Any]) -> None:
        """Add everything that another rank measured: the same tests on another device."""
        missing = {*self.missing, *data["missing"]}
        self.expect(data["expected"])
        self._finished = set(self._expected) - missing
        self.facts = _joined(self.facts, data["facts"])
        self.unmeasured.update(data["unmeasured"])
        self.workers.update(data["workers"])
        self.facts_of_workers.update(dict.fromkeys(data["workers"], data["facts"]))
        self.narrowed = self.narrowed or data["narrowed"]
        for result in map(Result.from_dict, data["results"]):
            self._results.setdefault(result.nodeid, []).append(result)

    def report(self) -> Report:
        """Return all of it as plain data."""
        return Report(
            self._description(),
            tuple(self.results),
            tuple(self.missing),
            dict(self.unmeasured),
            frozenset(self._expected),
            self.narrowed,
            facts=dict(self.facts_of_workers),
            locations=dict(self.locations),
        )

    def _description(self) -> Mapping[str, Any]:
        unknown = dict.fromkeys(("device", "device_name", "meter", "torch", "cuda"))
        facts = self.facts or {**unknown, "notes": []}
        if any(result.record.garbage_left for result in self.results):
            facts = _with_notes(facts, {"notes": _GARBAGE_LEFT})
        return {
            **facts,
            "python": platform.python_version(),
            "plugin": __version__,
            "workers": len(self.workers),
            "started": self.started,
        }


def _memory_needed(results: Iterable[Result]) -> int:
    records = [result.record for result in results]
    return sum(record.peak_increase_bytes + record.retained_bytes for record in records)


def _joined(facts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Merge the facts of two ranks: devices that differ are listed one by one."""
    if not facts or not others:
        return facts or others
    names = {
        key: ", ".join(dict.fromkeys([*facts[key].split(", "), others[key]]))
        for key in ("device", "device_name")
    }
    return _with_notes({**facts, **names}, others)


def _with_notes(facts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Add the notes of `others` that `facts` lacks: some follow from what a test has done."""
    return {**facts, "notes": list(dict.fromkeys([*facts["notes"], *others["notes"]]))}
