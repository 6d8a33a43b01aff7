"""Under pytest-xdist: the same figures, one report, and lost tests are listed."""

import pytest

pytest.importorskip("xdist")

NETWORK = """
import pytest
import torch

def test_first_unmarked(): pass

@pytest.mark.parametrize("width", [8, 16, 32])
def test_forward(cka_memory, width):
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 4))
    with cka_memory.measure("train") as region:
        for _ in range(6):
            model(torch.ones(32, 16)).sum().backward()
            region.batch_done(32)

@pytest.mark.zero_retention
class TestClean:
    def test_sum(self): torch.ones(1000).sum()
    def test_two_regions(self, cka_memory):
        with cka_memory.measure("a"): torch.ones(10)
        with cka_memory.measure("b"): torch.ones(20)

kept = []

# The last one: what it keeps, and what the search for its holder makes, later tests start with.
@pytest.mark.max_retained_mb(0)
def test_leaks(): kept.append(torch.ones(100))
"""


def _without_worker(run):
    return [{key: v for key, v in region.items() if key != "worker"} for region in run.regions]


def _notes(run):
    """Return what the meter notes, but for threads: other plugins start them in some processes."""
    return [note for note in run.report["session"]["notes"] if not note.startswith("threads were")]


@pytest.mark.slow
def test_workers_report_the_same_as_a_serial_run(session):
    """Workers report the regions, order and figures of a serial run; only the worker differs."""
    options = ["--cka-memory-report", "--cka-memory-device=cpu"]
    serial = session(NETWORK, *options, forked=True)
    parallel = session(NETWORK, *options, "-n2", forked=True)
    for run in (serial, parallel):
        run.assert_outcomes(passed=6, failed=1)
    assert _without_worker(parallel) == _without_worker(serial)
    assert {r["worker"] for r in serial.regions} == {"main"}
    assert {r["worker"] for r in parallel.regions} <= {"gw0", "gw1"}
    assert serial.report["session"]["workers"] == 1
    assert parallel.report["session"]["workers"] == len({r["worker"] for r in parallel.regions})
    for key in ("device", "device_name", "meter", "torch", "cuda"):
        assert parallel.report["session"][key] == serial.report["session"][key]
    assert _notes(parallel) == _notes(serial)
    assert parallel.text.count("device: cpu") == 1
    assert parallel.text.count("test_forward[8] train") == 1


def test_regions_are_in_the_order_of_collection(scripted):
    """Regions have the order of collection, whichever worker ran a test, and whenever."""
    source = """
        import time
        import pytest

        @pytest.mark.parametrize("n", range(8))
        def test_it(cka_memory, meter, n):
            time.sleep(0.05 * (n % 3 == 0))
            meter.allocate(n)
        """
    run = scripted(source, "-n2", "--cka-memory-report")
    run.assert_outcomes(passed=8)
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_it[{n}]" for n in range(8)]
    assert [r["retained_bytes"] for r in run.regions] == list(range(8))
    assert run.report["missing"] == []


@pytest.mark.parametrize("dist", ["loadscope", "loadfile", "each", "worksteal"])
def test_every_distribution_mode_reports_all_regions(scripted, dist):
    """With each --dist mode all regions are there; with ``each``, once per worker."""
    source = """
        import pytest
        @pytest.mark.parametrize("n", range(3))
        def test_it(cka_memory, n): pass
        """
    run = scripted(source, "-n2", f"--dist={dist}")
    assert run.result.ret == pytest.ExitCode.OK
    assert len(run.regions) == (6 if dist == "each" else 3)
    assert run.report["missing"] == []


CRASH = """
import os
import signal
import pytest

@pytest.mark.parametrize("n", range(3))
def test_before(cka_memory, meter, n): meter.allocate(n)

def test_crashes(cka_memory): {crash}

@pytest.mark.parametrize("n", range(3))
def test_after(cka_memory, meter, n): meter.allocate(n)
"""


@pytest.mark.parametrize(
    "crash", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "killed"]
)
def test_crashed_worker_loses_only_the_test_it_ran(scripted, crash):
    """If a worker crashes, its test is named as lost, and a new worker runs the others."""
    run = scripted(CRASH.format(crash=crash), "-n2", "--cka-memory-report")
    run.assert_outcomes(passed=6, failed=1)
    assert [r["retained_bytes"] for r in run.regions] == [0, 1, 2, 0, 1, 2]
    assert run.report["missing"] == ["test_it.py::test_crashes"]
    run.result.stdout.fnmatch_lines(
        [
            "1 collected test has no result (the session stopped early, or a worker died)",
            "  test_it.py::test_crashes",
        ]
    )


def test_tests_that_no_worker_ran_are_reported_as_missing(scripted):
    """If no worker is left, tests that did not run are missing and the session fails."""
    run = scripted(CRASH.format(crash="os._exit(3)"), "-n1", "--max-worker-restart=0")
    assert run.result.ret != pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_before[{n}]" for n in range(3)]
    assert run.report["missing"] == [
        "test_it.py::test_crashes",
        *(f"test_it.py::test_after[{n}]" for n in range(3)),
    ]


def test_region_is_reported_if_the_worker_crashes_in_teardown(scripted):
    """A region is sent with the call's report, so that a crash in teardown does not lose it."""
    run = scripted(
        """
        import os
        import pytest

        @pytest.fixture
        def crashing_teardown():
            yield
            os._exit(1)

        def test_it(crashing_teardown, cka_memory, meter): meter.allocate(5)
        """,
        "-n1",
        "--max-worker-restart=0",
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["retained_bytes"] == 5
    assert run.report["missing"] == ["test_it.py::test_it"]


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_zero_or_one_worker_is_supported(scripted, workers):
    """With zero or one worker a session is measured; zero is a serial one."""
    run = scripted("def test_it(cka_memory): pass", workers)
    run.assert_outcomes(passed=1)
    assert run.region["worker"] == {"-n0": "main", "-n1": "gw0"}[workers]


def test_session_without_tests_writes_an_empty_report(scripted):
    """A session without tests under xdist writes a report without regions."""
    run = scripted("", "-n2")
    assert run.result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run.regions == []


def test_collection_error_in_workers_is_not_an_internal_error(scripted):
    """If workers cannot collect a file, pytest reports it, and the plugin's report is empty."""
    run = scripted("import no_such_module", "-n2")
    assert run.result.ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert "INTERNALERROR" not in run.text
    assert run.regions == []


@pytest.mark.slow
def test_last_failed_measures_only_the_failed_tests(scripted):
    """With --lf only the tests that failed are measured and reported."""
    source = """
        import pytest
        @pytest.mark.max_retained_mb("4 B")
        @pytest.mark.parametrize("n", range(6))
        def test_it(meter, n): meter.allocate(n)
        """
    scripted(source, "-n2").assert_outcomes(passed=5, failed=1)
    for workers in ([], ["-n2"]):
        run = scripted(source, "--lf", *workers)
        run.assert_outcomes(failed=1)
        assert run.region["nodeid"] == "test_it.py::test_it[5]"
        assert run.report["missing"] == []
