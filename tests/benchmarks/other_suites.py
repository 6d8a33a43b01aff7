"""Run other projects' test suites with every test measured and without: no outcome may change.

    python tests/benchmarks/other_suites.py --json suites.json \
        "einops=einops-0.8.2/einops/tests" "timm=timm-1.0.31/tests/test_layers.py -k pool"

A suite is the name of a distribution and the arguments for pytest, relative to the current folder.
Both runs load no other plugin, so the tests' own requirements must be installed beside pytest.
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
from xml.etree import ElementTree

from tabulate import tabulate

MEASURED = ("-p", "cka_memory", "--cka-memory-report", "--cka-memory-device=cpu")
COMMON = ("-q", "--no-header", "-p", "no:cacheprovider", "--tb=no")
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1"}

Outcomes = Mapping[str, str]
"""Test -> passed, failed, error or skipped."""


@dataclass(frozen=True)
class Run:
    """One session over a suite."""

    exit_status: int
    outcomes: Outcomes
    user_seconds: float
    """Processor time in user mode, children included."""
    text: str


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
    user_seconds_with: float

    @property
    def ratio(self) -> float:
        return self.user_seconds_with / self.user_seconds_without


def main() -> int:
    """Run each suite twice; return 1 if an outcome changed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="+", metavar="NAME=ARGUMENTS")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for suite in args.suites:
        name, _, arguments = suite.partition("=")
        rows.append(compared(name, arguments))
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    if args.json:
        data = {"torch": version("torch"), "python": sys.version.split()[0]}
        data |= {"suites": [asdict(row) | {"ratio": round(row.ratio, 3)} for row in rows]}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any(row.changed or row.crashed or row.exit_status_changed for row in rows))


def compared(name: str, arguments: str) -> Row:
    """Run one suite without the plugin, then with it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        given = shlex.split(arguments)
        without = run(given, Path(folder))
        measured = run([*given, *MEASURED, f"--cka-memory-json={report}"], Path(folder))
        regions = json.loads(report.read_text("utf-8"))["regions"] if report.exists() else []
        completed = sum(region["completed"] for region in regions)
    return Row(
        suite=name,
        version=version(name),
        arguments=arguments,
        tests=len(without.outcomes),
        outcomes=dict(Counter(without.outcomes.values())),
        regions=completed,
        changed=differences(without.outcomes, measured.outcomes),
        exit_status_changed=without.exit_status != measured.exit_status,
        crashed="INTERNALERROR" in measured.text or measured.exit_status not in (0, 1),
        user_seconds_without=round(without.user_seconds, 1),
        user_seconds_with=round(measured.user_seconds, 1),
    )


def run(arguments: list[str], folder: Path) -> Run:
    """Run pytest in a separate process and wait for its end."""
    results, output = folder / "results.xml", folder / "output.txt"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *COMMON, f"--junitxml={results}", *arguments]
    with output.open("wb") as file:
        started = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
        )
        _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    text = output.read_text("utf-8", errors="replace")
    outcomes = outcomes_in(results) if results.exists() else {}
    return Run(started.returncode, outcomes, usage.ru_utime, text)


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
    """Return a table of the rows, followed by every test that changed."""
    headers = ["suite", "tests", "regions", "changed", "user s without", "with", "ratio"]
    cells = [
        [
            f"{row.suite} {row.version}",
            ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items()),
            row.regions,
            len(row.changed),
            row.user_seconds_without,
            row.user_seconds_with,
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    changed = [f"{row.suite}: {change}" for row in rows for change in row.changed]
    crashed = [f"{row.suite}: CRASHED" for row in rows if row.crashed]
    return "\n".join([tabulate(cells, headers), *changed, *crashed])


if __name__ == "__main__":
    sys.exit(main())
