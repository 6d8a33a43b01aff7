"""A full disk or an unwritable folder is reported and does not change outcomes of tests."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and /proc")

TESTS = """
import pytest
import torch

KEPT = []

@pytest.mark.max_retained_mb("99 B")
def test_leaks(): KEPT.append(torch.zeros(25))

def test_fails():
    held = torch.zeros(25)
    raise ValueError("its own failure")

@pytest.mark.zero_retention
@pytest.mark.parametrize("n", range(3))
def test_clean(n): torch.zeros(25)
"""
WITH_HISTORY = """
from pytest_cka_memory.testing import ScriptedMeter

class WithHistory(ScriptedMeter):
    def record_history(self): return True
    def dump_history(self, path):
        with open(path, "wb") as file:
            file.write(b"half of a snapshot")
            {fault}
        return True

METER = WithHistory()

def pytest_cka_memory_meter(): return METER
"""
SNAPSHOTS = """
import pytest

@pytest.mark.parametrize("name", ["plain", "\\ud800"])
def test_fails(cka_memory, name): raise ValueError("its own failure")
"""
FILES = ("json", "markdown", "html")
FULL = "No space left on device"


@pytest.mark.parametrize("kind", FILES)
def test_full_device_fails_the_session_with_a_message(faulty, kind):
    """If the disk is full, the report cannot be written, but every test keeps its outcome."""
    run = faulty(TESTS, f"--cka-memory-{kind}=/dev/full", "-k", "clean", forked=True)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED: cannot write /dev/full: {FULL}" in run.text
    assert "3 passed" in run.text
    assert "INTERNALERROR" not in run.text


@pytest.mark.parametrize("option", ["json", "markdown", "html", "baseline"])
def test_unwritable_folder_is_refused_before_any_test_runs(faulty, option):
    """A folder that cannot be written ends the session early: even root cannot write to /proc."""
    update = ["--cka-memory-update-baseline"] if option == "baseline" else []
    run = faulty(TESTS, f"--cka-memory-{option}=/proc/r.json", *update, forked=True)
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert f"--cka-memory-{option}: cannot write /proc/r.json: " in run.text
    assert "test_it.py" not in run.text
    assert "Traceback" not in run.text


def test_report_that_does_not_fit_leaves_the_old_report_unchanged(faulty, tmp_path):
    """A report that cannot be written in full leaves the old one as
    it was, and no temporary file.
    """
    old = tmp_path / "r.json"
    old.write_text("old")
    # What is printed is a file here, too, and a small one beside the report of so many tests.
    many = TESTS.replace("range(3)", "range(100)")
    tests = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (30_000, -1))\n{many}"
    run = faulty(tests, f"--cka-memory-json={old}", "-k", "clean", "-s", forked=True)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED: cannot write {old}: File too large" in run.text
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_other_reports_are_written_if_one_cannot_be_written(faulty, tmp_path):
    """The other reports are written, and the HTML report names the one that could not be."""
    run = faulty(
        TESTS, f"--cka-memory-json={tmp_path / 'r.json'}", "--cka-memory-markdown=/dev/full",
        f"--cka-memory-html={tmp_path / 'r.html'}", forked=True,
    )  # fmt: skip
    page = (tmp_path / "r.html").read_text("utf-8")
    assert f"cannot write …/full: {FULL}" in page  # reports name no folder outside the project
    regions = json.loads((tmp_path / "r.json").read_text("utf-8"))["regions"]
    assert [region["verdict"] for region in regions] == ["BREACH", "not judged", *["ok"] * 3]
    assert "2 failed, 3 passed" in run.text


@pytest.mark.parametrize(
    ("folder", "fault", "reason"),
    [
        ("/proc/snapshots", "", "cannot write /proc/snapshots/*: *"),
        ("snapshots", f"raise OSError(28, {FULL!r})", f"cannot write *: {FULL}"),
    ],
    ids=["no-folder", "full"],
)
def test_snapshot_that_cannot_be_written_does_not_hide_the_failure_of_the_test(
    pytester, folder, fault, reason
):
    """The error of the test comes before that of its snapshot; no incomplete snapshot is left."""
    pytester.makeconftest(WITH_HISTORY.format(fault=fault or "pass"))
    pytester.makepyfile(test_it=SNAPSHOTS)
    result = pytester.runpytest_inprocess(
        "-p", "no:hypothesispytest", f"--cka-memory-snapshots={folder}"
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*ValueError: its own failure", f"no memory snapshot: {reason}"])
    assert "INTERNALERROR" not in result.stdout.str()
    assert list(Path(pytester.path).glob("snapshots/*")) == []
