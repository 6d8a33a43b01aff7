"""Inner pytest sessions for the tests of the plugin, most of them with a scripted meter."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_processes
import pytest

# After an inner session in this process, pytester removes the modules that the session imported.
# torch._dynamo cannot be imported a second time.
import torch._dynamo  # noqa: F401

# The package keeps the class MemoryProbe that it has imported first, so its module must stay too.

# Importing this once is faster than importing it in every inner session.

SCRIPTED = """
import pytest
from pytest_cka_memory.testing import ScriptedMeter

METER = ScriptedMeter(has_reserve={has_reserve})

def pytest_cka_memory_meter(device):
    return METER

@pytest.fixture
def meter():
    return METER
"""
"""A conftest whose meter is set by the tests: ``meter.allocate(bytes)``, ``meter.free(block)``."""


@dataclass(frozen=True)
class Session:
    """A finished inner session."""

    result: pytest.RunResult
    report: dict[str, Any] | None
    """Its JSON report, or None if it wrote none."""

    @property
    def text(self) -> str:
        return self.result.stdout.str()

    @property
    def errors(self) -> str:
        return self.result.stderr.str()

    @property
    def regions(self) -> list[dict[str, Any]]:
        assert self.report is not None, self.text + self.errors
        return self.report["regions"]

    @property
    def region(self) -> dict[str, Any]:
        """The only region of the session."""
        (region,) = self.regions
        return region

    def region_of(self, test: str) -> dict[str, Any]:
        """Return the only region of the test of this name."""
        (region,) = [r for r in self.regions if r["nodeid"].endswith(f"::{test}")]
        return region

    def assert_outcomes(self, **expected: int) -> None:
        """Assert the outcomes of the tests, and that no internal error occurred."""
        assert "INTERNALERROR" not in self.text + self.errors
        self.result.assert_outcomes(**expected)

    def assert_refused(self, *texts: str) -> None:
        """Assert a usage error that contains all of `texts`, in a session that ran no test."""
        output = self.text + self.errors
        assert self.result.ret == pytest.ExitCode.USAGE_ERROR, output
        assert "INTERNALERROR" not in output
        assert "Traceback" not in output
        for text in texts:
            assert text in output
        assert self.report is None


Run = Callable[..., Session]


@pytest.fixture(autouse=True, scope="module")
def _fast_collections(imports_excluded_from_collection: None) -> None:
    """Apply to every test of this folder."""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a file of tests in an inner session that writes its JSON report.

    It runs in this process, in a new one that has torch already (``forked=True``), as have those
    that it starts, or in a new interpreter (``subprocess=True``), which takes three seconds longer
    if it imports torch.
    """
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("CI", raising=False)

    def run(
        source: str | None,
        *args: str,
        forked: bool = False,
        subprocess: bool = False,
        writes_json: bool = True,
    ) -> Session:
        if source is not None:
            pytester.makepyfile(test_it=source)
        path = pytester.path / "r.json"
        path.unlink(missing_ok=True)
        options = ["-p", "no:hypothesispytest", *args]  # slow to import in every session
        if writes_json:
            options.append("--cka-memory-json=r.json")
        if forked:
            return Session(forked_processes.run_pytest(*options), _read(path))
        if subprocess:
            return Session(pytester.runpytest_subprocess(*options), _read(path))
        has_workers = any(option.startswith("-n") for option in options)
        plugins = [forked_processes.forked_workers()] if has_workers else []
        return Session(pytester.runpytest_inprocess(*options, plugins=plugins), _read(path))

    return run


@pytest.fixture
def scripted(pytester: pytest.Pytester, session: Run) -> Run:
    """Like ``session``, with a scripted meter without a reserve; tests set it by ``meter``."""
    pytester.makeconftest(SCRIPTED.format(has_reserve=False))
    return session


@pytest.fixture
def scripted_reserve(pytester: pytest.Pytester, session: Run) -> Run:
    """Like ``session``, with a scripted meter that has a reserve, as a GPU has."""
    pytester.makeconftest(SCRIPTED.format(has_reserve=True))
    return session


@pytest.fixture(scope="module")
def finished_sessions() -> dict[object, Session]:
    """Sessions that several tests of a module check, by a key that the tests choose."""
    return {}


@pytest.fixture
def extend_conftest(pytester: pytest.Pytester) -> Callable[[str], None]:
    """Append text to the conftest of the inner session, which ``scripted`` has written."""

    def extend(text: str) -> None:
        conftest = pytester.path / "conftest.py"
        conftest.write_text(conftest.read_text("utf-8") + text, "utf-8")

    return extend


@pytest.fixture
def baseline_path(pytester: pytest.Pytester) -> Path:
    """Path of the baseline file with the default name, in the root of the inner session."""
    return pytester.path / "cka-memory-baseline.json"


@pytest.fixture
def job_summary(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run inner sessions as in a job of GitHub Actions; return the path of the job's summary."""
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    return summary


@pytest.fixture(params=[[], ["-n2"]], ids=["serial", "parallel"])
def workers(request: pytest.FixtureRequest) -> list[str]:
    """Options that run the inner session serially and, in a second test, in two workers."""
    if request.param:
        pytest.importorskip("xdist")
    options: list[str] = request.param
    return options


@pytest.fixture(params=[[], ["-n1"]], ids=["serial", "parallel"])
def worker(request: pytest.FixtureRequest) -> list[str]:
    """Like ``workers``, with one worker: for inner sessions with a single test, or none."""
    if request.param:
        pytest.importorskip("xdist")
    options: list[str] = request.param
    return options


def _read(path: Path) -> dict[str, Any] | None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {path.name} is not valid JSON")

    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    return report
