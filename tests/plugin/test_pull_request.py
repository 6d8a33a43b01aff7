"""A pull request from the committed baseline to the fix, as in a real project."""

import json

import forked_processes
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
def job(pytester, monkeypatch, job_summary):
    """Run the project's tests as a job of GitHub Actions; return status, log and summary."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(floats, *options):
        pytester.makepyfile(project=PROJECT.format(floats=floats), test_load=TESTS)
        job_summary.write_text("", "utf-8")
        result = pytester.runpytest_inprocess(
            *("-p", "no:hypothesispytest", "--cka-memory-device=cpu", *options),
            plugins=[forked_processes.forked_workers()] if "-n1" in options else [],
        )
        return result.ret, result.stdout.str(), job_summary.read_text("utf-8")

    return run


@pytest.mark.slow
def test_regression_is_stopped_explained_and_fixed(job, pytester, worker):
    """A rise of 6 % fails if the tolerance is 5 %, and names figure, holder and line."""
    file = pytester.path / "cka-memory-baseline.json"

    status, _, _ = job(25_000, "--cka-memory-update-baseline", *worker)
    committed = file.read_text("utf-8")
    assert status == pytest.ExitCode.OK
    assert '"retained_bytes": 100000' in committed

    status, log, summary = job(25_000, *worker)
    assert status == pytest.ExitCode.OK
    assert "::error" not in log
    assert "1 region kept every limit" in summary

    status, log, summary = job(26_500, *worker)
    assert status == pytest.ExitCode.TESTS_FAILED
    annotations = [line for line in log.splitlines() if line.startswith("::error")]
    assert annotations[0].startswith("::error file=test_load.py,line=9,title=memory_baseline")
    for output in (log, "\n".join(annotations), summary):
        assert "106,000 bytes" in output
        assert "project.CACHE[0]" in output
    assert "broke a limit" in summary

    status, log, summary = job(26_000, "--cka-memory-json=fixed.json", *worker)
    assert status == pytest.ExitCode.OK
    assert "::error" not in log
    (region,) = json.loads((pytester.path / "fixed.json").read_text("utf-8"))["regions"]
    assert (region["retained_bytes"], region["verdict"]) == (104_000, "ok")
    assert file.read_text("utf-8") == committed
