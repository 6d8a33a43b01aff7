"""The steps that `versions.py` runs in an environment, and what each of them records.

A step returns a dict in which ``ok`` says whether it passed. It runs in the environment's Python;
this module needs only the standard library.
"""

import collections
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

BENCHMARKS = Path(__file__).parent
IN_PARALLEL = ("-n", "auto", "--dist", "worksteal")
# How torch's real CUDA build refuses what its CUDA backend cannot do.
_REFUSED_BY_TORCH = re.compile(
    r"arguments from the '\w*CUDA' backend|not supported on CUDA|_cuda\" not implemented for"
)
_OTHER_VALUE = re.compile(r"\d+: (value|gradient): ")


class Environment(NamedTuple):
    """A virtual environment and the checkout that is tested in it."""

    venv: Path
    root: Path

    @property
    def python(self) -> str:
        """The path of its interpreter."""
        return str(self.venv / "bin" / "python")

    def run(self, *arguments: str, **variables: str) -> int:
        """Run its Python in the checkout, as if the environment were active."""
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        given = {**os.environ, "VIRTUAL_ENV": str(self.venv), "PATH": path, **variables}
        given.pop("PYTHONHOME", None)
        command = [self.python, *arguments]
        return subprocess.run(command, cwd=self.root, env=given, check=False).returncode

    def pytest(self, *arguments: str, **variables: str) -> dict[str, Any]:
        """Run tests; return how many passed, which failed, and how many were skipped and why."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "junit.xml"
            status = self.run("-m", "pytest", f"--junitxml={file}", *arguments, **variables)
            outcomes = outcomes_in(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {"ok": status == 0, "exit_status": status, **outcomes}


def outcomes_in(junit: str) -> dict[str, Any]:
    """Return the outcomes in a file of JUnit: numbers, names of failed tests, reasons of skips."""
    passed, failed = 0, []
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in ElementTree.fromstring(junit).iter("testcase"):
        kinds = {element.tag: element for element in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif "skipped" in kinds:
            skip = kinds["skipped"]
            kind = "xfailed" if skip.get("type") == "pytest.xfail" else "skipped"
            reasons[kind][skip.get("message", "")] += 1
        else:
            passed += 1
    return {
        "passed": passed,
        "failed": sorted(set(failed)),
        "skipped": dict(sorted(reasons["skipped"].items())),
        "xfailed": dict(sorted(reasons["xfailed"].items())),
    }


def gates(environment: Environment, tests: list[str] | None) -> dict[str, Any]:
    """Run the gates; ``REPORT`` may name a file for their JSON report."""
    report = os.environ.get("REPORT")
    options = ["--cka-memory-report", "--cka-memory-min-regions=10"]
    options += [f"--cka-memory-json={report}"] if report else []
    return environment.pytest("tests/gates", *options)


def suite(environment: Environment, tests: list[str] | None) -> dict[str, Any]:
    """Run all tests, or those of a trial."""
    return environment.pytest(*IN_PARALLEL, "--slow", "--durations=30", *(tests or []))


def without_kernel(environment: Environment, tests: list[str] | None) -> dict[str, Any]:
    """Run cka's tests as on a machine on which its kernel cannot be compiled."""
    return environment.pytest(*IN_PARALLEL, "tests/cka", CKA_NATIVE="0")


def opinfo(environment: Environment, tests: list[str] | None) -> dict[str, Any]:
    """Compare one sample of each of torch's operators with the CPU; three operators in a trial."""
    names = ["add", "cumsum", "histogram"] if tests else []
    status, found = _with_json(environment, "opinfo.py", "--samples", "1", *names)
    if not isinstance(found, dict):
        return {"ok": False, "exit_status": status}
    first = {name: problems[0] for name, problems in found["different"].items()}
    other_values = [name for name, problem in first.items() if _OTHER_VALUE.match(problem)]
    raising = {name: problem for name, problem in first.items() if name not in other_values}
    unexpected = [
        name for name, problem in raising.items() if not _REFUSED_BY_TORCH.search(problem)
    ]
    wrong = {*other_values, *unexpected, *found["crashed"]}
    return {
        "ok": status == 0 and not wrong,
        "exit_status": status,
        "operators": found["operators"],
        "agreeing": found["operators"] - len({*first, *found["crashed"]}),
        "refused_by_torch": sorted(set(raising) - set(unexpected)),
        "raising": {name: raising[name] for name in sorted(unexpected)},
        "other_values": {name: first[name] for name in sorted(other_values)},
        "of_the_cpu": {name: found["of_the_cpu"][name][0] for name in sorted(found["of_the_cpu"])},
        "crashed": found["crashed"],
    }


def published(environment: Environment, tests: list[str] | None) -> dict[str, Any]:
    """Compare figures with those that others published for real cards."""
    status, found = _with_json(environment, "published_qwen3.py")
    return {"ok": status == 0 and bool(found), "exit_status": status, "figures": found or []}


def _with_json(environment: Environment, script: str, *arguments: str) -> tuple[int, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        status = environment.run(str(BENCHMARKS / script), f"--json={file}", *arguments)
        return status, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


STEPS: dict[str, Callable[[Environment, list[str] | None], dict[str, Any]]] = {
    "gates": gates,
    "suite": suite,
    "without_kernel": without_kernel,
    "opinfo": opinfo,
    "published": published,
}
"""Name -> what runs it; in this order."""
