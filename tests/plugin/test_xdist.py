"""Under pytest-xdist: the same figures, one report, and nothing lost in silence."""

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

@pytest.fixture
def kept():
    tensors = []
    yield tensors
    tensors.clear()  # or the tests after it in the same process start higher

@pytest.mark.max_retained_mb(0)
def test_leaks(kept): kept.append(torch.ones(100))

@pytest.mark.zero_retention
class TestClean:
    def test_sum(self): torch.ones(1000).sum()
    def test_two_regions(self, cka_memory):
        with cka_memory.measure("a"): torch.ones(10)
        with cka_memory.measure("b"): torch.ones(20)
"""


def _without_worker(run):
    return [{key: v for key, v in region.items() if key != "worker"} for region in run.regions]


def test_workers_report_what_a_serial_run_reports(session):
    """The same regions in the same order with the same bytes; only the worker differs."""
    options = ["--cka-memory-report", "--cka-memory-device=cpu"]
    serial = session(NETWORK, *options, subprocess=True)
    parallel = session(NETWORK, *options, "-n2", subprocess=True)
    for run in (serial, parallel):
        run.outcomes(passed=6, failed=1)
    assert _without_worker(parallel) == _without_worker(serial)
    assert {r["worker"] for r in serial.regions} == {"main"}
    assert {r["worker"] for r in parallel.regions} <= {"gw0", "gw1"}
    assert serial.report["session"]["workers"] == 1
    assert parallel.report["session"]["workers"] == len({r["worker"] for r in parallel.regions})
    for key in ("device", "device_name", "meter", "torch", "cuda", "notes"):
        assert parallel.report["session"][key] == serial.report["session"][key]
    assert parallel.text.count("device: cpu") == 1
    assert parallel.text.count("test_forward[8] train") == 1


def test_the_order_is_that_of_collection(scripted):
    """However tests are handed out, the report lists them as a serial run would."""
    source = """
        import time
        import pytest

        @pytest.mark.parametrize("n", range(8))
        def test_it(cka_memory, meter, n):
            time.sleep(0.05 * (n % 3 == 0))
            meter.allocate(n)
        """
    run = scripted(source, "-n2", "--cka-memory-report")
    run.outcomes(passed=8)
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_it[{n}]" for n in range(8)]
    assert [r["retained_bytes"] for r in run.regions] == list(range(8))
    assert run.report["missing"] == []


@pytest.mark.parametrize("dist", ["loadscope", "loadfile", "each", "worksteal"])
def test_every_way_of_handing_out_is_reported(scripted, dist):
    """Also where each worker runs every test: then every region is there, once a worker."""
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

def test_dies(cka_memory): {death}

@pytest.mark.parametrize("n", range(3))
def test_after(cka_memory, meter, n): meter.allocate(n)
"""


@pytest.mark.parametrize(
    "death", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "killed"]
)
def test_a_dead_worker_leaves_the_finished_tests_and_is_named(scripted, death):
    """What ran is in the report, the lost test is named, and others run on in a new worker."""
    run = scripted(CRASH.format(death=death), "-n2", "--cka-memory-report")
    run.outcomes(passed=6, failed=1)
    assert [r["retained_bytes"] for r in run.regions] == [0, 1, 2, 0, 1, 2]
    assert run.report["missing"] == ["test_it.py::test_dies"]
    run.result.stdout.fnmatch_lines(
        ["1 collected tests have no result (stopped early, or lost)", "  test_it.py::test_dies"]
    )


def test_when_no_worker_is_left_the_rest_is_named(scripted):
    """A run that ends for want of workers is red, and its report says what never ran."""
    run = scripted(CRASH.format(death="os._exit(3)"), "-n1", "--max-worker-restart=0")
    assert run.result.ret != pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_before[{n}]" for n in range(3)]
    assert run.report["missing"] == [
        "test_it.py::test_dies",
        *(f"test_it.py::test_after[{n}]" for n in range(3)),
    ]


def test_a_worker_that_dies_in_teardown_keeps_what_it_sent(scripted):
    """The figures ride on the report of the call, before the teardown that kills."""
    run = scripted(
        """
        import os
        import pytest

        @pytest.fixture
        def deadly():
            yield
            os._exit(1)

        def test_it(deadly, cka_memory, meter): meter.allocate(5)
        """,
        "-n1",
        "--max-worker-restart=0",
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["retained_bytes"] == 5
    assert run.report["missing"] == ["test_it.py::test_it"]


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_any_number_of_workers_will_do(scripted, workers):
    """No worker at all is a serial run."""
    run = scripted("def test_it(cka_memory): pass", workers)
    run.outcomes(passed=1)
    assert run.region["worker"] == {"-n0": "main", "-n1": "gw0"}[workers]


def test_without_any_test_nothing_crashes(scripted):
    """An empty session writes an empty report."""
    run = scripted("", "-n2")
    assert run.result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run.regions == []


def test_a_broken_file_is_an_error_of_its_own(scripted):
    """Collection errors in workers are pytest's to tell."""
    run = scripted("import no_such_module", "-n2")
    assert run.result.ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert "INTERNALERROR" not in run.text
    assert run.regions == []


def test_the_last_failed_run_again(scripted):
    """--lf measures only what failed, and reports only that."""
    source = """
        import pytest
        @pytest.mark.max_retained_mb("4 B")
        @pytest.mark.parametrize("n", range(6))
        def test_it(meter, n): meter.allocate(n)
        """
    scripted(source, "-n2").outcomes(passed=5, failed=1)
    for workers in ([], ["-n2"]):
        run = scripted(source, "--lf", *workers)
        run.outcomes(failed=1)
        assert run.region["nodeid"] == "test_it.py::test_it[5]"
        assert run.report["missing"] == []
