"""Inner pytest sessions for the tests of the plugin, most of them over a scripted meter."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A session in this process forgets what it imported, and these cannot be imported twice.
import torch._dynamo  # noqa: F401

import pytest_cka_memory.meters.cpu
import pytest_cka_memory.plugin.activation

# Nor need these be imported for each.
import pytest_cka_memory.plugin.torchrun_reporter  # noqa: F401

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
"""A conftest whose meter is moved by hand: ``meter.allocate(bytes)``, ``meter.free(block)``."""


@dataclass(frozen=True)
class Session:
    """An inner session that has ended."""

    result: pytest.RunResult
    report: dict[str, Any] | None
    """Its JSON report; None where it wrote none."""

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

    def of(self, test: str) -> dict[str, Any]:
        """The only region of the test of this name."""
        (region,) = [r for r in self.regions if r["nodeid"].endswith(f"::{test}")]
        return region

    def outcomes(self, **expected: int) -> None:
        """Assert what came of the tests, and that nothing crashed on the way."""
        assert "INTERNALERROR" not in self.text + self.errors
        self.result.assert_outcomes(**expected)

    def refused(self, *texts: str) -> None:
        """Assert a usage error that says all of `texts`, in a session that ran no test."""
        said = self.text + self.errors
        assert self.result.ret == pytest.ExitCode.USAGE_ERROR, said
        assert "INTERNALERROR" not in said
        assert "Traceback" not in said
        for text in texts:
            assert text in said
        assert self.report is None


Run = Callable[..., Session]


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a file of tests in an inner session that writes its JSON report."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("CI", raising=False)

    def run(
        source: str | None, *args: str, subprocess: bool = False, writes_json: bool = True
    ) -> Session:
        if source is not None:
            pytester.makepyfile(test_it=source)
        path = pytester.path / "r.json"
        path.unlink(missing_ok=True)
        options = ["-p", "no:hypothesispytest", *args]  # it would be imported anew each time
        if writes_json:
            options.append("--cka-memory-json=r.json")
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return Session(start(*options), _read(path))

    return run


@pytest.fixture
def scripted(pytester: pytest.Pytester, session: Run) -> Run:
    """As ``session``, over a scripted meter without a reserve; tests move it by ``meter``."""
    pytester.makeconftest(SCRIPTED.format(has_reserve=False))
    return session


@pytest.fixture
def scripted_reserve(pytester: pytest.Pytester, session: Run) -> Run:
    """As ``session``, over a scripted meter that has a reserve, as a GPU has."""
    pytester.makeconftest(SCRIPTED.format(has_reserve=True))
    return session


def _read(path: Path) -> dict[str, Any] | None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {path.name} is no JSON")

    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    return report
