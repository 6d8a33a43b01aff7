"""The report of a session: how it is built of what every process has sent, and made anonymous.

An anonymous report may be given to anyone: it names no user, no folder of this machine, no host.
"""

from __future__ import annotations

import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import datetime, timezone
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pytest_cka_memory._version import __version__
from pytest_cka_memory.core.places import anonymizer, in_plain_values
from pytest_cka_memory.units import counted, format_with_unit

if TYPE_CHECKING:
    from pytest_cka_memory.core.verdicts import Breach, Result

_FIXTURE = re.compile(r"::[^:]+ \((?:class|module|package|session) fixture\)")
_SCOPE = re.compile(r"::all tests \((?:class|module) scope\)$")


def fixture_nodeid(place: str, name: str, scope: str) -> str:
    """Return ``tests/conftest.py::model (session fixture)``."""
    return f"{place}::{name} ({scope} fixture)"


def is_fixture(nodeid: str) -> bool:
    """Whether it names a fixture, which is not collected as a test is."""
    return (bool(_FIXTURE.search(nodeid)) and nodeid.endswith(" fixture)")) or is_scope(nodeid)


def scope_nodeid(place: str, scope: str) -> str:
    """Return ``tests/test_model.py::TestModel::all tests (class scope)``."""
    return f"{place}::all tests ({scope} scope)"


def is_scope(nodeid: str) -> bool:
    """Whether it names the region of a whole class or module, whose limits fail its last test."""
    return bool(_SCOPE.search(nodeid))


Payload = dict[str, Any]
"""What one test report carries, in builtin types.

``facts`` about the meter, ``regions`` as :meth:`Result.filled` returns them, the reasons why the
test is ``unmeasured``, whether the session is ``narrowed``, regions of ``fixtures`` that ended
meanwhile, and ``relations`` to tests that had not run.
"""


_MOST_NAMED = 5
_GARBAGE_LEFT = (
    "≤ marks tests without limits whose retained memory may include garbage in reference "
    "cycles, because collecting it would have taken too long; give a test a limit to make "
    "its figure exact",
)


class ReportBuilder:
    """Collects the results of a session from the test reports of any process.

    They are read when they are asked for, which is after the tests: so no test waits for it, nor
    for the import of what reads them.
    """

    def __init__(self) -> None:
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.facts: dict[str, Any] = {}
        self.unmeasured: Counter[str] = Counter()
        """Reason why tests could not be measured -> number of tests."""
        self.workers: set[str] = set()
        self.facts_of_workers: dict[str, dict[str, Any]] = {}
        self.narrowed = False
        """Whether tests of a collected file may have been left out."""
        self.locations: dict[str, tuple[str, int | None]] = {}
        self._run_again: set[str] = set()
        """Tests that another plugin has run again."""
        self._expected: dict[str, int] = {}
        self._finished: set[str] = set()
        self._regions: dict[str, list[dict[str, Any]]] = {}
        """Test -> its regions, as :meth:`Result.filled` returns them, with the process."""
        self._of_fixtures: dict[str, dict[str, list[dict[str, Any]]]] = {}
        """Fixture -> worker -> its regions; each worker sets up a session's fixture of its own."""
        self._relations: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        """Test -> worker and relation, of those that wait for another test."""
        self._read: tuple[list[Result], list[Result]] | None = None
        """Results of tests and of fixtures, if nothing has been added since they were read."""

    def expect(self, nodeids: Iterable[str]) -> None:
        """Record the tests of this session, in their order."""
        for nodeid in nodeids:
            self._expected.setdefault(nodeid, len(self._expected))

    def add(self, nodeid: str, worker: str, outcome: str, payload: Payload) -> None:
        """Add the regions of one test report; `worker` is the process that measured them."""
        self.workers.add(worker)
        if payload["facts"] != self.facts_of_workers.get(worker):
            self.facts = _with_notes(self.facts or payload["facts"], payload["facts"])
            self.facts_of_workers[worker] = payload["facts"]
        self.narrowed = self.narrowed or payload["narrowed"]
        for reason in payload["unmeasured"]:
            self.unmeasured[reason] += 1
        for relation in payload.get("relations", ()):
            self._relations.setdefault(nodeid, []).append((worker, relation))
        run = {"worker": worker, "outcome": outcome}
        self._add(nodeid, ({**region, **run} for region in payload["regions"]))
        for region in payload.get("fixtures", ()):
            if region["nodeid"] == nodeid:  # a fixture of this test alone
                self._add(nodeid, [{**region, **run}])
            else:
                of_workers = self._of_fixtures.setdefault(region["nodeid"], {})
                of_workers.setdefault(worker, []).append({**region, "worker": worker})

    def _add(self, nodeid: str, regions: Iterable[dict[str, Any]]) -> None:
        self._regions.setdefault(nodeid, []).extend(regions)
        self._read = None

    def locate(self, nodeid: str, file: str, line: int | None) -> None:
        """Record the file and line of a test; `line` counts from 0, like pytest's."""
        self.locations[nodeid] = file, None if line is None else line + 1

    def forget(self, nodeid: str, worker: str) -> None:
        """Drop the results of a run of a test that is run again: the last run counts."""
        self._run_again.add(nodeid)
        waiting = self._relations.get(nodeid, [])
        self._relations[nodeid] = [each for each in waiting if each[0] != worker]
        regions = self._regions.get(nodeid, [])
        self._regions[nodeid] = [region for region in regions if region["worker"] != worker]
        self._read = None

    def finish(self, nodeid: str, *, teardown_failed: bool = False) -> None:
        """Record that a test has finished."""
        self._finished.add(nodeid)
        if teardown_failed:
            for region in self._regions.get(nodeid, ()):
                region["outcome"] = "error"
            self._read = None

    @property
    def results(self) -> list[Result]:
        """Every region in the order of collection, whichever process ran it; fixtures are last."""
        of_tests, of_fixtures = self._results()
        return [*of_tests, *of_fixtures]

    @property
    def of_fixtures(self) -> list[Result]:
        """The regions of fixtures: of several workers those that needed most."""
        return self._results()[1]

    def _results(self) -> tuple[list[Result], list[Result]]:
        if self._read is None:
            # After the tests: no session waits for it before.
            from pytest_cka_memory.core.verdicts import Result

            order = sorted(
                self._regions, key=lambda nodeid: self._expected.get(nodeid, sys.maxsize)
            )
            of_tests = [
                Result.from_filled(region) for test in order for region in self._regions[test]
            ]
            of_fixtures = [
                result
                for of_workers in self._of_fixtures.values()
                for result in max(
                    (list(map(Result.from_filled, regions)) for regions in of_workers.values()),
                    key=_memory_needed,
                )
            ]
            self._read = of_tests, of_fixtures
        return self._read

    def judge_relations(self) -> list[tuple[Result, Breach]]:
        """Judge the relations that have waited for other tests; return those that are broken."""
        waiting, self._relations = self._relations, {}
        if not any(waiting.values()):
            return []
        from pytest_cka_memory.core.relations import judged_late

        self._read = None
        return [
            broken
            for nodeid, relations in waiting.items()
            for worker, relation in relations
            for broken in judged_late(
                self._regions, nodeid, worker, relation, self.facts_of_workers
            )
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
        # Before the tests of the other rank are expected, none of which has finished here.
        missing = {*self.missing, *data["missing"]}
        self.expect(data["expected"])
        self._finished = set(self._expected) - missing
        self.facts = _joined(self.facts, data["facts"])
        self.unmeasured.update(data["unmeasured"])
        self.workers.update(data["workers"])
        self.facts_of_workers.update(dict.fromkeys(data["workers"], data["facts"]))
        self.narrowed = self.narrowed or data["narrowed"]
        for region in data["results"]:
            self._add(region["nodeid"], [region])

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
        facts = self.facts or {**unknown, "notes": [], "conditions": {}}
        if any(r.record.garbage_left and r.record.retained_bytes for r in self.results):
            facts = _with_notes(facts, {"notes": _GARBAGE_LEFT})
        if self._run_again:
            tests = ", ".join(sorted(self._run_again)[:_MOST_NAMED])
            number = f"another plugin ran {counted(len(self._run_again), 'test')} more than once"
            note = f"{number}; the last run was judged: {tests}"
            facts = _with_notes(facts, {"notes": [note]})
        if outside := _outside_note(self.results):
            facts = _with_notes(facts, {"notes": [outside]})
        return {
            **facts,
            "python": platform.python_version(),
            "plugin": __version__,
            "workers": len(self.workers),
            "started": self.started,
        }


def _outside_note(results: Iterable[Result]) -> str:
    """Return a note if memory outside torch's allocator rose by more than its reserve did."""
    measured = ((result, result.record) for result in results)
    rises = {
        result.name: record.outside_increase_bytes
        for result, record in measured
        if record.outside_increase_bytes
        and record.outside_increase_bytes > (record.reserved_increase_bytes or 0)
    }
    if not rises:
        return ""
    name = max(rises, key=lambda region: rises[region])
    return (
        f"outside torch's allocator the card's memory rose by more than the reserve in "
        f"{counted(len(rises), 'region')}, most in {name}: {format_with_unit(rises[name])}. It is "
        "memory of the CUDA context, NCCL, CUDA graphs, other libraries or other processes"
    )


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


@dataclass(frozen=True)
class Collection:
    """What pytest has collected, before it deselected tests."""

    tests: frozenset[str] = frozenset()
    """Every test that was collected, including those that were deselected later."""
    complete: frozenset[str] = frozenset()
    """Files and folders, relative to pytest's root, of which every part was collected."""

    def shows_gone(self, nodeid: str, root: Path) -> bool:
        """Whether a test does not exist, because all that lies beside it was collected.

        A file must have been collected completely. If the file does not exist, its folder must have
        been, or the nearest folder that exists; `root` is pytest's root folder.
        """
        if nodeid in self.tests:
            return False
        file = PurePosixPath(file_of(nodeid))
        existing = next((path for path in (file, *file.parents) if (root / path).exists()), file)
        return str(existing) in self.complete


def merged_collections(collections: Iterable[Collection]) -> Collection:
    """Return what several processes have collected: tests of any, completeness in all."""
    several = list(collections)
    if not several:
        return Collection()
    return Collection(
        frozenset().union(*(each.tests for each in several)),
        reduce(frozenset.intersection, (each.complete for each in several)),
    )


def file_of(nodeid: str) -> str:
    """Return the file of a test, or of a class in it."""
    return nodeid.partition("::")[0]


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


TextChange = Callable[[str], str]


def anonymous(report: Report, root: Path) -> Report:
    """Return `report` with paths relative to `root`, and without paths that lead elsewhere.

    Files of tests in `locations` stay as they are, because GitHub needs them to find its own.
    """
    change = anonymizer(root)
    unmeasured: Counter[str] = Counter()
    for reason, count in report.unmeasured.items():
        unmeasured[change(reason)] += count
    return replace(
        report,
        session=in_plain_values(dict(report.session), change),
        results=tuple(_changed(result, change) for result in report.results),
        missing=tuple(map(change, report.missing)),
        unmeasured=dict(unmeasured),
        collected=frozenset(map(change, report.collected)),
        locations={change(nodeid): place for nodeid, place in report.locations.items()},
        problems=tuple(map(change, report.problems)),
    )


def _changed(result: Result, change: TextChange) -> Result:
    changed: Result = _in_dataclass(replace(result, extra={}), change)
    return replace(changed, extra=in_plain_values(result.extra, change))


def _in_dataclass(value: Any, change: TextChange) -> Any:
    """Return a dataclass with every text changed, also in dataclasses and tuples in it."""
    new = {}
    for name in vars(value):
        if name == "timeline":  # has numbers only, and may be long
            continue
        old = getattr(value, name)
        if old and (changed := _in_field(old, change)) != old:
            new[name] = changed
    return replace(value, **new) if new else value


def _in_field(value: Any, change: TextChange) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_in_field(item, change) for item in value)
    if isinstance(value, dict):
        return in_plain_values(value, change)
    return _in_dataclass(value, change) if is_dataclass(value) else value
