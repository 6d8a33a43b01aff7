"""A session or worker that ends inside a region reports the other tests exactly."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")

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
PROCESS_ENDS = {"exit": "os._exit(3)", "killed": "os.kill(os.getpid(), signal.SIGKILL)"}
# Install the handler because shells start background processes with SIGINT ignored.
INTERRUPT = (
    "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)"
)
ENDS = {
    "interrupt": (INTERRUPT, pytest.ExitCode.INTERRUPTED),
    "pytest.exit": ("pytest.exit('enough', returncode=7)", 7),
    "system-exit": ("sys.exit(3)", pytest.ExitCode.TESTS_FAILED),
}


@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS)
def test_session_that_ends_in_a_region_reports_the_tests_that_ran(faulty, tmp_path, end, status):
    """If the session ends inside a region, the meter's patches and dispatch modes are removed."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    test = tmp_path / "test_it.py"
    test.write_text(TESTS.format(end=end))
    run = faulty(test, "--confcutdir", str(tmp_path), forked=True)
    assert run.status == status
    assert "INTERNALERROR" not in run.text
    assert "modes left: []" in run.text
    (before,) = run.regions_of("test_before")
    assert (before["retained_bytes"], before["verdict"]) == (100, "no limit")
    if end == "sys.exit(3)":  # pytest reports it as an ordinary failure
        assert [r["retained_bytes"] for r in run.regions] == [100, 4000, 4000, 100, 0]
        assert {r["verdict"] for r in run.regions_of("test_ends")} == {"not judged"}
    else:
        assert run.regions_of("test_ends") == run.regions_of("test_after") == []
        assert [name.split("::")[1] for name in run.missing][-2:] == [
            "test_after",
            "test_clean_after",
        ]


@pytest.mark.parametrize("end", PROCESS_ENDS.values(), ids=PROCESS_ENDS)
def test_worker_that_ends_in_a_region_loses_only_that_test(faulty, end):
    """A worker that ends in a region is replaced, and the new one measures the rest to the byte."""
    pytest.importorskip("xdist")
    run = faulty(TESTS.format(end=end), "-p", "xdist", "-n1", forked=True)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in run.text
    assert [name.split("::")[1] for name in run.missing] == ["test_ends"]
    figures = {r["nodeid"].split("::")[1]: r["retained_bytes"] for r in run.regions}
    assert figures == {"test_before": 100, "test_after": 100, "test_clean_after": 0}
