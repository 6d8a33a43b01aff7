"""Gathers the results of a session, from this process or from any worker, off the test reports."""

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from pytest_cka_memory._version import __version__
from pytest_cka_memory.core.verdicts import Report, Result
from pytest_cka_memory.meters import Meter

Payload = dict[str, Any]
"""What rides on a test report, in builtin types: see :meth:`ReportBuilder.add`."""


def facts_of(meter: Meter) -> dict[str, Any]:
    """What the figures of `meter` depend on; asked in the process that measured."""
    torch = sys.modules.get("torch")  # a meter that needs none must not import it
    return {
        "device": meter.device,
        "device_name": meter.device_name,
        "meter": meter.name,
        "notes": list(meter.notes),
        "torch": str(torch.__version__) if torch else None,
        "cuda": torch.version.cuda if torch and meter.device.startswith("cuda") else None,
    }


@dataclass
class ReportBuilder:
    """All results so far. The controller of an xdist run has one; workers need none."""

    started: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    facts: dict[str, Any] = field(default_factory=dict)
    unmeasured: Counter[str] = field(default_factory=Counter)
    """Why tests that were to be measured could not be -> how many."""
    workers: set[str] = field(default_factory=set)
    facts_of_workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    narrowed: bool = False
    """Whether tests may have been left out of a file that was collected."""
    locations: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _results: dict[str, list[Result]] = field(default_factory=dict)

    def expect(self, nodeids: Iterable[str]) -> None:
        """Note the tests of this session, in their order."""
        for nodeid in nodeids:
            self._expected.setdefault(nodeid, len(self._expected))

    def add(self, nodeid: str, worker: str, outcome: str, payload: Payload) -> None:
        """Take in what one report carries."""
        self.workers.add(worker)
        self.facts = self.facts or payload["facts"]
        self.facts_of_workers[worker] = payload["facts"]
        self.narrowed = self.narrowed or payload["narrowed"]
        for reason in payload["unmeasured"]:
            self.unmeasured[reason] += 1
        results = [Result.from_dict(region) for region in payload["regions"]]
        self._results.setdefault(nodeid, []).extend(
            replace(result, worker=worker, outcome=outcome) for result in results
        )

    def locate(self, nodeid: str, file: str, line: int | None) -> None:
        """Note where a test stands; `line` counts from 0, as pytest's do."""
        self.locations[nodeid] = file, None if line is None else line + 1

    def forget(self, nodeid: str, worker: str) -> None:
        """Let go of a run of a test that is run again: the last one counts."""
        kept = [result for result in self._results.get(nodeid, []) if result.worker != worker]
        self._results[nodeid] = kept

    def finish(self, nodeid: str, *, teardown_failed: bool = False) -> None:
        """Note that a test has run to its end."""
        self._finished.add(nodeid)
        if teardown_failed:
            self._results[nodeid] = [
                replace(result, outcome="error") for result in self._results.get(nodeid, [])
            ]

    @property
    def results(self) -> list[Result]:
        """Every region, in the order of collection whatever process ran it."""
        order = sorted(self._results, key=lambda nodeid: self._expected.get(nodeid, sys.maxsize))
        return [result for nodeid in order for result in self._results[nodeid]]

    @property
    def missing(self) -> list[str]:
        """Collected tests without a result."""
        return [nodeid for nodeid in self._expected if nodeid not in self._finished]

    @property
    def measured(self) -> int:
        """Regions that ran to their end: what a gate may count on."""
        return sum(result.record.completed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """What another process needs to :meth:`absorb` it; builtin types only."""
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
        """Take in all that another rank gathered: the same tests, on another device."""
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
        """All of it, as plain data."""
        return Report(
            self._description(),
            tuple(self.results),
            tuple(self.missing),
            dict(self.unmeasured),
            frozenset(self._expected),
            self.narrowed,
            dict(self.facts_of_workers),
            dict(self.locations),
        )

    def _description(self) -> Mapping[str, Any]:
        unknown = dict.fromkeys(("device", "device_name", "meter", "torch", "cuda"))
        return {
            **(self.facts or {**unknown, "notes": []}),
            "python": platform.python_version(),
            "plugin": __version__,
            "workers": len(self.workers),
            "started": self.started,
        }


def _joined(facts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Facts of several ranks: their devices are named one by one where they differ."""
    if not facts or not others:
        return facts or others
    names = {
        key: ", ".join(dict.fromkeys([*facts[key].split(", "), others[key]]))
        for key in ("device", "device_name")
    }
    return {**facts, **names}
