"""What a test may do to its process without upsetting what is measured after it."""

import sys
from pathlib import Path

import faulty as planted
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no fork and no SIGALRM")

FILE = Path(planted.__file__)
FAULTS = [name for name, it in vars(planted).items() if name.startswith("Test")]
KEPT = [True, 100, 100, 100, "no limit"]
LET_GO = [True, 0, 0, 40, "ok"]
UPSET = {
    "TestOutOfMemory": [("", "failed", "not judged", 4000, 4000)],
    "TestOutOfMemoryCaught": [("", "passed", "no limit", 100, 4000)],
    "TestExceptionInNestedRegions": [
        ("inner", "failed", "not judged", 100, 100),
        ("outer", "failed", "not judged", 100, 100),
    ],
    "TestSkippedHalfWay": [("region", "skipped", "not judged", 100, 100)],
    "TestExpectedToFail": [("region", "xfailed", "not judged", 100, 100)],
    "TestForks": [("", "passed", "no limit", 100, 1000)],
    "TestCollectorDisabled": [("", "passed", "no limit", 100, 4100)],
    "TestCollectorPatched": [("", "passed", "no limit", 100, 4100)],
    "TestOverlap": [
        ("first", "passed", "no limit", 11, 11),
        ("second", "passed", "no limit", 110, 110),
    ],
    "TestTasksInterleaved": [
        ("short", "passed", "no limit", 1, 1),
        ("long", "passed", "no limit", 31, 31),
    ],
    "TestTaskCancelled": [
        ("cancelled", "passed", "not judged", 10, 10),
        ("around", "passed", "no limit", 10, 10),
    ],
    "TestNamedOddly": [("", "passed", "no limit", 100, 100)] * 5,
}
"""(label, outcome, verdict, retained, peak increase) of a fault's own regions; of others, as of
one that passes and keeps 100 bytes."""


@pytest.fixture(scope="module")
def session(faulty):
    """The session over every fault, one after the other in one process."""
    return faulty(FILE)


def figures(region, *names):
    """Those figures of a region, in that order."""
    return [region[name] for name in names]


def test_the_session_runs_to_its_end(session):
    """Nothing crashes, and nothing is lost."""
    assert session.status == pytest.ExitCode.TESTS_FAILED, session.text
    assert "INTERNALERROR" not in session.text
    assert session.missing == []
    assert "3 failed, 110 passed, 1 skipped, 1 xfailed" in session.text


@pytest.mark.parametrize("fault", FAULTS)
def test_what_comes_after_a_fault_is_measured_to_the_byte(session, fault):
    """A known leak and a clean test get the figures they have without the fault."""
    asked = ("completed", "retained_bytes", "net_bytes", "peak_increase_bytes", "verdict")
    (kept,) = session.of(f"{fault}::test_keeps_after")
    (let_go,) = session.of(f"{fault}::test_lets_go_after")
    assert figures(kept, *asked) == KEPT
    assert figures(let_go, *asked) == LET_GO


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_itself_is_told_as_it_is(session, fault):
    """What the test kept, and what the limit's verdict is worth."""
    asked = ("label", "outcome", "verdict", "retained_bytes", "peak_increase_bytes")
    told = [tuple(figures(region, *asked)) for region in session.of(f"{fault}::test_it")]
    assert told == UPSET.get(fault, [("", "passed", "no limit", 100, 100)])


def test_running_out_of_memory_is_the_tests_own_failure(session):
    """With torch's words, and a word on why no limit was judged."""
    assert "you tried to allocate 4611686018427387904 bytes" in session.text
    assert "not judged faulty.py::TestOutOfMemory::test_it: the test failed" in session.text


@pytest.mark.parametrize("patched", ["test_a_thread_after", "test_another_thread_after"])
def test_threads_start_after_a_test_that_patched_how_they_do(session, patched):
    """An undo after the region had put our wrapper back, and every later thread died of it."""
    (region,) = session.of(f"TestThreadsPatched::{patched}")
    assert (region["outcome"], region["retained_bytes"]) == ("passed", 100)


def test_a_thread_that_outlives_its_test_is_named_where_it_is_counted(session):
    """Its tensor is born in the later test, which breaks its limit by it; the report says whose."""
    (region,) = session.of("TestThreadOutlives::test_a_later_one")
    assert (region["retained_bytes"], region["verdict"]) == (107, "BREACH")
    made = [frame for holding in region["retained"] for frame in holding["created_at"]]
    assert any(frame.endswith("lives_on") for frame in made)


def test_reports_go_where_the_user_said_from_wherever_a_test_has_gone(session):
    """Two tests change the folder, and one deletes it: the report was read from where it was."""
    assert session.of("TestFolderDeleted::test_it")


def test_a_worker_is_no_less_sturdy(faulty):
    """The same figures from a process that xdist started."""
    pytest.importorskip("xdist")
    run = faulty(FILE, "-p", "xdist", "-n1", "-k", "TestForks or TestThreadsPatched")
    assert "INTERNALERROR" not in run.text
    assert [r["retained_bytes"] for r in run.regions] == [100, 100, 0] * 2 + [100] * 4 + [0]
