"""Sessions that end early: the report has what was measured until then."""

import pytest

MANY = """
import pytest

@pytest.mark.parametrize("n", range(6))
@pytest.mark.max_retained_mb("1 B")
def test_it(meter, n): {body}
"""
LEAKING = MANY.format(body="meter.allocate(n)")
INTERRUPTED = MANY.format(body="\n    meter.allocate(0)\n    if n == 3: raise KeyboardInterrupt")


@pytest.mark.parametrize(
    ("options", "failed", "left"),
    [(["-x"], 1, 3), (["--maxfail=2"], 2, 2)],
    ids=["exitfirst", "maxfail"],
)
def test_stopping_at_a_failure_reports_what_ran(scripted, options, failed, left):
    """If a session stops at a failure, tests that never ran are counted and named."""
    run = scripted(LEAKING, *options)
    run.assert_outcomes(passed=2, failed=failed)
    assert len(run.regions) == 6 - left
    assert run.report["missing"] == [f"test_it.py::test_it[{n}]" for n in range(6 - left, 6)]
    run.result.stdout.fnmatch_lines([f"{left} collected tests have no result*"])


def test_stopping_workers_at_a_failure_reports_what_ran(scripted):
    """Workers may finish tests they have received after a failure, and all are reported."""
    pytest.importorskip("xdist")
    run = scripted(LEAKING, "-n2", "-x")
    assert run.result.ret != pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert len(run.regions) + len(run.report["missing"]) == 6
    assert any(region["verdict"] == "BREACH" for region in run.regions)


def test_ctrl_c_in_a_test_reports_what_ran(scripted):
    """Ctrl-C in a test gives pytest's own status, and the report is written."""
    run = scripted(INTERRUPTED, forked=True)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert "INTERNALERROR" not in run.text
    assert [r["verdict"] for r in run.regions] == ["ok"] * 3
    assert len(run.report["missing"]) == 3


def test_ctrl_c_removes_the_hooks_of_the_meter(session, pytester):
    """Ctrl-C in a region removes the hooks of the CPU meter."""
    pytester.makeconftest(
        """
        import threading
        import torch

        START, RESIZE = threading.Thread.start, torch.UntypedStorage.resize_

        def pytest_unconfigure():
            modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            assert threading.Thread.start is START
            assert torch.UntypedStorage.resize_ is RESIZE
            print("modes left:", modes)
        """
    )
    run = session(
        """
        import torch

        def test_it(cka_memory):
            with cka_memory.measure(), cka_memory.measure():
                torch.ones(3)
                raise KeyboardInterrupt
        """,
        "--cka-memory-device=cpu",
        forked=True,
    )
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert "modes left: []" in run.text


@pytest.mark.slow
def test_ctrl_c_in_a_worker_reports_what_ran(scripted):
    """Ctrl-C in a worker ends the session without an internal error, with a report."""
    pytest.importorskip("xdist")
    run = scripted(INTERRUPTED, "-n2", forked=True)
    assert run.result.ret != pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text + run.errors
    assert run.report is not None
    assert len(run.regions) + len(run.report["missing"]) == 6


@pytest.mark.parametrize("how", ["pytest.exit('enough')", "raise SystemExit(3)"])
def test_exit_from_a_test_reports_what_ran(scripted, how):
    """If a test calls pytest.exit, that decides how the session ends; the report is written."""
    run = scripted(f"import pytest\ndef test_a(cka_memory): pass\ndef test_b(cka_memory): {how}\n")
    assert run.result.ret != pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert run.region_of("test_a")["verdict"] == "no limit"


def test_collection_error_writes_an_empty_report(scripted):
    """A file that cannot be imported stops the session before any test: an empty report."""
    run = scripted("import no_such_module")
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert run.regions == []


def test_setup_only_measures_nothing(scripted):
    """--setup-only runs fixtures and no test, so nothing is measured."""
    for option in ("--setup-only", "--setup-plan"):
        run = scripted("def test_it(cka_memory): pass", option)
        assert run.result.ret == pytest.ExitCode.OK
        assert run.regions == []


def test_stepwise_measures_from_where_it_stopped(scripted):
    """After a breach, a session with --stepwise starts at that test and measures from there."""
    run = scripted(LEAKING, "--stepwise")
    assert len(run.regions) == 3
    run = scripted(LEAKING, "--stepwise")
    assert run.region["nodeid"].endswith("[2]")
