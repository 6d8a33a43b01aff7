"""Run other projects' test suites with every test measured and without: no outcome may change.

    python benchmarks/other_suites.py --ledger --repeat 3 --json suites.json \
        "einops=einops-0.8.2/einops/tests" "timm=timm-1.0.31/tests/test_layers.py -k pool"

A suite is the name of a distribution and the arguments for pytest, relative to the current folder.
The runs load no other plugin, so the tests' own requirements must be installed beside pytest.

With ``--ledger`` each suite runs once more with the meter that counts Python's tensors instead of
torch's allocations. The retained and net bytes of every region are compared with those of that run.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tabulate import tabulate

MEASURED = ("-p", "cka_memory", "--cka-memory-report", "--cka-memory-device=cpu")
COMMON = ("-q", "--no-header", "-p", "no:cacheprovider", "--tb=no")
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1"}
LEDGER = {"CKA_MEMORY_NATIVE": "0"}
"""Environment of a run that counts Python's tensors."""

Outcomes = Mapping[str, str]
"""Test -> passed, failed, error or skipped."""


class Figures(NamedTuple):
    """What two meters of one region must agree on, in bytes."""

    retained: int
    net: int


Regions = Mapping[tuple[str, str], Figures]
"""The completed regions, by test and label."""


@dataclass(frozen=True)
class Run:
    """One session over a suite."""

    exit_status: int
    outcomes: Outcomes
    user_seconds: float
    """Processor time in user mode, children included."""
    text: str
    facts: Mapping[str, object]
    """The meter, the device and the versions, as the report names them; empty without a report."""
    regions: Regions


@dataclass(frozen=True)
class Row:
    """The result of one suite."""

    suite: str
    version: str
    arguments: str
    tests: int
    outcomes: Mapping[str, int]
    regions: int
    """Completed regions; doctests and tests that were skipped or failed have none."""
    changed: tuple[str, ...]
    """Tests with another outcome when measured."""
    exit_status_changed: bool
    crashed: bool
    user_seconds_without: float
    """The median of the repetitions, as the next one."""
    user_seconds_with: float
    meter: str
    retaining: int
    """Regions that retained anything."""
    user_seconds_ledger: float | None
    """Of one run; None unless it was asked for, as the next one."""
    differing: tuple[str, ...] | None
    """Regions whose retained or net bytes the ledger counts otherwise."""

    @property
    def ratio(self) -> float:
        return self.user_seconds_with / self.user_seconds_without


def main() -> int:
    """Run each suite without and with the plugin; return 1 if an outcome changed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="+", metavar="NAME=ARGUMENTS")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="report medians of N")
    parser.add_argument("--ledger", action="store_true", help="compare with the ledger's figures")
    args = parser.parse_args()
    rows = []
    facts: Mapping[str, object] = {}
    for suite in args.suites:
        name, _, arguments = suite.partition("=")
        row, facts = compared(name, arguments, args.repeat, ledger=args.ledger)
        rows.append(row)
        print(table(rows[-1:]), flush=True)
    if len(rows) > 1:
        print(table(rows))
    if args.json:
        data = {"torch": version("torch"), "python": sys.version.split()[0]}
        data |= {"device_name": facts.get("device_name")}
        data |= {"threads": os.environ.get("OMP_NUM_THREADS")}
        data |= {"suites": [asdict(row) | {"ratio": round(row.ratio, 3)} for row in rows]}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any(row.changed or row.crashed or row.exit_status_changed for row in rows))


def compared(
    name: str, arguments: str, repeat: int, *, ledger: bool
) -> tuple[Row, Mapping[str, object]]:
    """Run one suite without and with the plugin; return also the facts in its report."""
    given = shlex.split(arguments)
    pairs = [(run(given), run(given, measured={})) for _ in range(repeat)]
    without, measured = pairs[0]
    changed = [change for a, b in pairs for change in differences(a.outcomes, b.outcomes)]
    counted = run(given, measured=LEDGER) if ledger else None
    row = Row(
        suite=name,
        version=version(name),
        arguments=arguments,
        tests=len(without.outcomes),
        outcomes=dict(Counter(without.outcomes.values())),
        regions=len(measured.regions),
        changed=tuple(dict.fromkeys(changed)),
        exit_status_changed=without.exit_status != measured.exit_status,
        crashed="INTERNALERROR" in measured.text or measured.exit_status not in (0, 1),
        user_seconds_without=round(median(a.user_seconds for a, _ in pairs), 1),
        user_seconds_with=round(median(b.user_seconds for _, b in pairs), 1),
        meter=str(measured.facts.get("meter")),
        retaining=sum(figures.retained > 0 for figures in measured.regions.values()),
        user_seconds_ledger=counted and round(counted.user_seconds, 1),
        differing=counted and differing_regions(counted.regions, measured.regions),
    )
    return row, measured.facts


def run(arguments: list[str], measured: Mapping[str, str] | None = None) -> Run:
    """Run pytest in a separate process and wait for its end.

    Args:
        arguments: what pytest is given.
        measured: the environment in which every test is measured; None for no measurement.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results, report, output = (folder / n for n in ("results.xml", "report.json", "output.txt"))
        command = [sys.executable, "-m", "pytest", *COMMON, f"--junitxml={results}", *arguments]
        if measured is not None:
            command += [*MEASURED, f"--cka-memory-json={report}"]
        with output.open("wb") as file:
            started = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(measured or {})},
            )
            _, status, usage = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        data = json.loads(report.read_text("utf-8")) if report.exists() else {}
        return Run(
            exit_status=started.returncode,
            outcomes=outcomes_in(results) if results.exists() else {},
            user_seconds=usage.ru_utime,
            text=output.read_text("utf-8", errors="replace"),
            facts=data.get("session", {}),
            regions=regions_in(data.get("regions", [])),
        )


def regions_in(rows: list[Mapping[str, Any]]) -> Regions:
    """Return the completed regions of a JSON report."""
    return {
        (row["nodeid"], row["label"]): Figures(row["retained_bytes"], row["net_bytes"])
        for row in rows
        if row["completed"]
    }


def differing_regions(ledger: Regions, native: Regions) -> tuple[str, ...]:
    """Return the regions whose figures differ or that only one run has, with both figures."""
    found = []
    for nodeid, label in dict.fromkeys([*ledger, *native]):
        before, after = ledger.get((nodeid, label)), native.get((nodeid, label))
        if before is None or after is None:
            found.append(f"{nodeid} [{label}]: {before} -> {after}")
        elif before != after:
            pairs = zip(Figures._fields, before, after, strict=True)
            text = ", ".join(f"{name} {a:,} -> {b:,}" for name, a, b in pairs if a != b)
            found.append(f"{nodeid} [{label}]: {text}")
    return tuple(found)


def outcomes_in(file: Path) -> Outcomes:
    """Return the outcomes in a JUnit XML file; a test that failed and had an error has both."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = "+".join(ends) or "passed"
        found[name] = f"{found[name]}+{outcome}" if name in found else outcome
    return found


def differences(before: Outcomes, after: Outcomes) -> tuple[str, ...]:
    """Return the tests whose outcomes differ or that only one run has, with both outcomes."""
    pairs = {name: (before.get(name), after.get(name)) for name in [*before, *after]}
    return tuple(f"{name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b)


def table(rows: list[Row]) -> str:
    """Return a table of the rows, followed by every test that changed and region that differs."""
    headers = ["suite", "tests", "regions", "changed", "user s without", "with", "ratio"]
    headers += ["retaining", "ledger's user s", "differing"]
    cells = [
        [
            f"{row.suite} {row.version}",
            ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items()),
            row.regions,
            len(row.changed),
            row.user_seconds_without,
            row.user_seconds_with,
            f"{row.ratio:.2f}",
            row.retaining,
            row.user_seconds_ledger,
            None if row.differing is None else len(row.differing),
        ]
        for row in rows
    ]
    changed = [f"{row.suite}: {change}" for row in rows for change in row.changed]
    crashed = [f"{row.suite}: CRASHED" for row in rows if row.crashed]
    differing = [f"{row.suite}: {region}" for row in rows for region in row.differing or ()]
    return "\n".join([tabulate(cells, headers), *changed, *crashed, *differing])


if __name__ == "__main__":
    sys.exit(main())
