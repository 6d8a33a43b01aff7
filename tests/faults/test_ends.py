"""A session that is ended from within a region: what is lost is named, what is left is exact."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")

TESTS = """
import os
import signal
import sys
import threading

import pytest
import torch

KEPT = []

def test_before(): KEPT.append(torch.zeros(25))

def test_ends(cka_memory):
    with cka_memory.measure("outer"), cka_memory.measure("inner"):
        KEPT.append(torch.zeros(1000))
        {end}

def test_after():
    KEPT.append(torch.zeros(25))

@pytest.mark.zero_retention
def test_clean_after(): torch.zeros(10)
"""
CONFTEST = """
import threading
import torch

BEFORE = threading.Thread.start, torch.UntypedStorage.resize_, torch.jit.trace

def pytest_unconfigure():
    assert (threading.Thread.start, torch.UntypedStorage.resize_, torch.jit.trace) == BEFORE
    print("modes left:", torch.utils._python_dispatch._get_current_dispatch_mode_stack())
"""
DEATHS = {"exit": "os._exit(3)", "killed": "os.kill(os.getpid(), signal.SIGKILL)"}
# As in a terminal: shells start what runs in the background with SIGINT ignored.
INTERRUPT = (
    "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)"
)
ENDS = {
    "interrupt": (INTERRUPT, pytest.ExitCode.INTERRUPTED),
    "pytest.exit": ("pytest.exit('enough', returncode=7)", 7),
    "system-exit": ("sys.exit(3)", pytest.ExitCode.TESTS_FAILED),
}


@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS)
def test_a_session_ended_in_a_region_reports_what_ran(faulty, tmp_path, end, status):
    """And takes off what the meter had put on."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    test = tmp_path / "test_it.py"
    test.write_text(TESTS.format(end=end))
    run = faulty(test, "--confcutdir", str(tmp_path))
    assert run.status == status
    assert "INTERNALERROR" not in run.text
    assert "modes left: []" in run.text
    (before,) = run.of("test_before")
    assert (before["retained_bytes"], before["verdict"]) == (100, "no limit")
    if end == "sys.exit(3)":  # to pytest that is a failure like others
        assert [r["retained_bytes"] for r in run.regions] == [100, 4000, 4000, 100, 0]
        assert {r["verdict"] for r in run.of("test_ends")} == {"not judged"}
    else:
        assert run.of("test_ends") == run.of("test_after") == []
        assert [name.split("::")[1] for name in run.missing][-2:] == [
            "test_after",
            "test_clean_after",
        ]


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_a_worker_that_dies_in_a_region_costs_that_test_alone(faulty, death):
    """Its successor measures the rest to the byte."""
    pytest.importorskip("xdist")
    run = faulty(TESTS.format(end=death), "-p", "xdist", "-n1")
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in run.text
    assert [name.split("::")[1] for name in run.missing] == ["test_ends"]
    figures = {r["nodeid"].split("::")[1]: r["retained_bytes"] for r in run.regions}
    assert figures == {"test_before": 100, "test_after": 100, "test_clean_after": 0}
