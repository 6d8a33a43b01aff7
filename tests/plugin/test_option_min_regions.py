"""``--cka-memory-min-regions``: a session cannot pass by skipping its tests."""

import pytest

ONE = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"


def _run_with_minimum(session, source, minimum, *options):
    return session(source, f"--cka-memory-min-regions={minimum}", *options)


@pytest.mark.parametrize(("minimum", "status"), [(0, 0), (1, 0), (2, 1)])
def test_session_fails_below_the_minimum(scripted, minimum, status):
    """The minimum number of regions is enough; with one fewer, a session that passed fails."""
    run = _run_with_minimum(scripted, ONE, minimum)
    assert run.result.ret == status
    assert ("FAILED: 1 region measured" in run.text) == bool(status)
    run.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "body",
    ["pytest.skip('no data')", "pytest.importorskip('no_such_module')"],
)
def test_skipped_tests_do_not_count(scripted, body):
    """A test that is skipped inside has no complete region, which does not count."""
    run = _run_with_minimum(scripted, f"import pytest\ndef test_it(cka_memory): {body}\n", 1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(skipped=1)
    run.result.stdout.fnmatch_lines(["FAILED: 0 regions measured, but *min-regions=1; *"])


@pytest.mark.parametrize("source", ["", "import pytest\npytest.skip(allow_module_level=True)\n"])
def test_session_without_tests_fails(scripted, source):
    """With a minimum, a session without tests fails: an empty file, or a skipped module."""
    run = _run_with_minimum(scripted, source, 1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 0 regions measured" in run.text


def test_deselected_tests_do_not_count(scripted):
    """A -k that matches nothing fails a session that requires a minimum of regions."""
    run = _run_with_minimum(scripted, ONE, 1, "-k", "nothing")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED


def test_regions_left_by_an_exception_do_not_count(scripted):
    """Of the regions, only those that ran to their end count for the minimum."""
    run = _run_with_minimum(
        scripted,
        """
        def test_it(cka_memory):
            with cka_memory.measure(): pass
            with cka_memory.measure(): raise ValueError
        """,
        2,
    )
    run.assert_outcomes(failed=1)
    assert [r["completed"] for r in run.regions] == [True, False]
    assert "FAILED: 1 region measured" in run.text


def test_collect_only_ignores_the_minimum(scripted):
    """--collect-only is not meant to measure, so it ignores the minimum of regions."""
    run = _run_with_minimum(scripted, ONE, 5, "--collect-only")
    assert run.result.ret == pytest.ExitCode.OK


def test_session_that_a_test_exits_with_status_0_fails(scripted):
    """If pytest.exit ends the session with status 0 below the minimum, it fails."""
    run = _run_with_minimum(
        scripted, "import pytest\ndef test_it(): pytest.exit('enough', returncode=0)\n", 1
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 0 regions measured" in run.text


@pytest.mark.slow
def test_regions_of_all_workers_are_counted(scripted):
    """Under xdist the controller counts the regions of all workers for the minimum."""
    pytest.importorskip("xdist")
    source = (
        "import pytest\n@pytest.mark.parametrize('x', range(4))\ndef test_it(cka_memory, x): pass"
    )
    assert _run_with_minimum(scripted, source, 4, "-n2").result.ret == pytest.ExitCode.OK
    run = _run_with_minimum(scripted, source, 5, "-n2")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 4 regions measured" in run.text
