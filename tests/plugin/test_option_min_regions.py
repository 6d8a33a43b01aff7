"""``--cka-memory-min-regions``: a gate cannot pass by skipping."""

import pytest

ONE = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"


def _gate(session, source, minimum, *options):
    return session(source, f"--cka-memory-min-regions={minimum}", *options)


@pytest.mark.parametrize(("minimum", "status"), [(0, 0), (1, 0), (2, 1)])
def test_the_session_fails_below_the_minimum(scripted, minimum, status):
    """As many as asked for is enough; one fewer fails a session whose tests all passed."""
    run = _gate(scripted, ONE, minimum)
    assert run.result.ret == status
    assert ("FAILED: 1 regions measured" in run.text) == bool(status)
    run.outcomes(passed=1)


@pytest.mark.parametrize(
    "body",
    ["pytest.skip('no data')", "pytest.importorskip('no_such_module')"],
)
def test_skipped_tests_do_not_count(scripted, body):
    """A test that skips half way has measured nothing that a gate may count on."""
    run = _gate(scripted, f"import pytest\ndef test_it(cka_memory): {body}\n", 1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.outcomes(skipped=1)
    run.result.stdout.fnmatch_lines(["FAILED: 0 regions measured, --cka-memory-min-regions=1"])


@pytest.mark.parametrize("source", ["", "import pytest\npytest.skip(allow_module_level=True)\n"])
def test_an_empty_session_fails(scripted, source):
    """No tests, or a skipped module, is no way through the gate."""
    run = _gate(scripted, source, 1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 0 regions measured" in run.text


def test_deselected_tests_do_not_count(scripted):
    """-k cannot empty the gate either."""
    run = _gate(scripted, ONE, 1, "-k", "nothing")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED


def test_regions_left_by_an_exception_do_not_count(scripted):
    """Only regions that ran to their end count, each for itself."""
    run = _gate(
        scripted,
        """
        def test_it(cka_memory):
            with cka_memory.measure(): pass
            with cka_memory.measure(): raise ValueError
        """,
        2,
    )
    run.outcomes(failed=1)
    assert [r["completed"] for r in run.regions] == [True, False]
    assert "FAILED: 1 regions measured" in run.text


def test_collecting_only_is_not_gated(scripted):
    """There a session is not meant to measure."""
    run = _gate(scripted, ONE, 5, "--collect-only")
    assert run.result.ret == pytest.ExitCode.OK


def test_a_test_cannot_leave_the_session_past_the_gate(scripted):
    """pytest.exit with status 0 ends the session before the gate is met: that is no pass."""
    run = _gate(scripted, "import pytest\ndef test_it(): pytest.exit('enough', returncode=0)\n", 1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 0 regions measured" in run.text


def test_the_gate_counts_what_workers_measured(scripted):
    """Under xdist the controller counts, and fails the whole session."""
    pytest.importorskip("xdist")
    source = (
        "import pytest\n@pytest.mark.parametrize('x', range(4))\ndef test_it(cka_memory, x): pass"
    )
    assert _gate(scripted, source, 4, "-n2").result.ret == pytest.ExitCode.OK
    run = _gate(scripted, source, 5, "-n2")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 4 regions measured" in run.text
