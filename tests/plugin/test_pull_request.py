"""A pull request's story, from the committed baseline to the fix, as a project lives it."""

import json

import pytest

PROJECT = """
import torch

CACHE = []


def load():
    CACHE.append(torch.zeros({floats}))
"""
TESTS = """
import pytest
import project

@pytest.fixture
def fresh():
    yield
    project.CACHE.clear()

@pytest.mark.memory_baseline(tolerance="5%")
def test_load(fresh, cka_memory):
    with cka_memory.measure("load"):
        project.load()

def test_unmeasured(): pass
"""


@pytest.fixture
def job(pytester, monkeypatch):
    """Run the project's tests as a job of GitHub Actions; returns status, log and summary."""
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))

    def run(floats, *options):
        pytester.makepyfile(project=PROJECT.format(floats=floats), test_load=TESTS)
        summary.write_text("", "utf-8")
        result = pytester.runpytest_subprocess("--cka-memory-device=cpu", *options)
        return result.ret, result.stdout.str(), summary.read_text("utf-8")

    return run


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])
def test_a_regression_is_stopped_explained_and_fixed(job, pytester, workers):
    """A rise of 6 % over a baseline held to 5 % fails, with figure, holder, line and summary."""
    file = pytester.path / "cka-memory-baseline.json"

    status, _, _ = job(25_000, "--cka-memory-update-baseline", *workers)
    committed = file.read_text("utf-8")
    assert status == pytest.ExitCode.OK
    assert '"retained_bytes": 100000' in committed

    status, log, summary = job(25_000, *workers)
    assert status == pytest.ExitCode.OK
    assert "::error" not in log
    assert "1 region kept every limit" in summary

    status, log, summary = job(26_500, *workers)
    assert status == pytest.ExitCode.TESTS_FAILED
    annotations = [line for line in log.splitlines() if line.startswith("::error")]
    assert annotations[0].startswith("::error file=test_load.py,line=9,title=memory_baseline")
    for told in (log, "\n".join(annotations), summary):
        assert "106,000 bytes" in told
        assert "project.CACHE[0]" in told
    assert "broke a limit" in summary

    status, log, summary = job(26_000, "--cka-memory-json=fixed.json", *workers)
    assert status == pytest.ExitCode.OK
    assert "::error" not in log
    (region,) = json.loads((pytester.path / "fixed.json").read_text("utf-8"))["regions"]
    assert (region["retained_bytes"], region["verdict"]) == (104_000, "ok")
    assert file.read_text("utf-8") == committed
