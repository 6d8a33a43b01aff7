"""Tests that misuse their process do not change the figures of the tests after them."""

import sys
from pathlib import Path

import faulty
import faulty_concurrency
import faulty_patches
import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork and no SIGALRM"),
    pytest.mark.slow,
]

MODULES = (faulty, faulty_patches, faulty_concurrency)
FILES = [str(module.__file__) for module in MODULES]
FAULTS = [name for module in MODULES for name in vars(module) if name.startswith("Test")]
KEPT = [True, 100, 100, 100, "no limit"]
FREED = [True, 0, 0, 40, "ok"]
EXPECTED = {
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
"""(label, outcome, verdict, retained, peak increase) of the regions of each faulty test.

Faulty tests that are not listed pass and keep 100 bytes.
"""


@pytest.fixture(scope="module")
def session(faulty):
    """A session that runs all faulty tests in one process."""
    first, *others = FILES
    return faulty(Path(first), *others, forked=True)


def figures(region, *names):
    """Return the named figures of a region in the given order."""
    return [region[name] for name in names]


def test_session_runs_to_its_end(session):
    """A session with faulty tests runs to its end, without an internal error or a missing test."""
    assert session.status == pytest.ExitCode.TESTS_FAILED, session.text
    assert "INTERNALERROR" not in session.text
    assert session.missing == []
    assert "3 failed, 110 passed, 1 skipped, 1 xfailed" in session.text


@pytest.mark.parametrize("fault", FAULTS)
def test_tests_after_a_fault_are_measured_to_the_byte(session, fault):
    """A known leak and a clean test get the same figures after a faulty test as without one."""
    names = ("completed", "retained_bytes", "net_bytes", "peak_increase_bytes", "verdict")
    (kept,) = session.regions_of(f"{fault}::test_keeps_after")
    (freed,) = session.regions_of(f"{fault}::test_frees_after")
    assert figures(kept, *names) == KEPT
    assert figures(freed, *names) == FREED


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_test_is_reported_with_its_own_figures(session, fault):
    """The report has the outcome, the verdict and the retained bytes of the faulty test."""
    names = ("label", "outcome", "verdict", "retained_bytes", "peak_increase_bytes")
    reported = [
        tuple(figures(region, *names)) for region in session.regions_of(f"{fault}::test_it")
    ]
    assert reported == EXPECTED.get(fault, [("", "passed", "no limit", 100, 100)])


def test_out_of_memory_error_is_reported_as_the_failure_of_the_test(session):
    """The failure has torch's message and the reason why no limit was judged."""
    assert "you tried to allocate 4611686018427387904 bytes" in session.text
    assert "not judged faulty.py::TestOutOfMemory::test_it: the test failed" in session.text


@pytest.mark.parametrize("patched", ["test_a_thread_after", "test_another_thread_after"])
def test_threads_start_after_a_test_that_patched_thread_start(session, patched):
    """A test that patches ``Thread.start`` and undoes it later does not restore the meter's
    wrapper.
    """
    (region,) = session.regions_of(f"TestThreadsPatched::{patched}")
    assert (region["outcome"], region["retained_bytes"]) == ("passed", 100)


def test_thread_that_outlives_its_test_breaks_a_later_limit(session):
    (region,) = session.regions_of("TestThreadOutlives::test_a_later_one")
    assert (region["retained_bytes"], region["verdict"]) == (107, "BREACH")


@pytest.mark.native  # the ledger does not see in which line another thread allocates
def test_thread_that_outlives_its_test_is_named_in_the_later_region(session):
    (region,) = session.regions_of("TestThreadOutlives::test_a_later_one")
    made = [frame for holding in region["retained"] for frame in holding["created_at"]]
    assert any(frame.endswith("lives_on") for frame in made)


def test_report_path_does_not_depend_on_the_working_directory_of_tests(session):
    """The report is written to its folder though tests change the
    working directory or delete it.
    """
    assert session.regions_of("TestFolderDeleted::test_it")


def test_xdist_worker_measures_the_same_after_faults(faulty):
    """After faulty tests the figures in a worker process of xdist are the same."""
    pytest.importorskip("xdist")
    first, *others = FILES
    run = faulty(
        Path(first), *others, "-p", "xdist", "-n1", "-k", "TestForks or TestThreadsPatched",
        forked=True,
    )  # fmt: skip
    assert "INTERNALERROR" not in run.text
    assert [r["retained_bytes"] for r in run.regions] == [100, 100, 0] * 2 + [100] * 4 + [0]
