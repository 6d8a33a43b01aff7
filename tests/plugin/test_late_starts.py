"""Sessions in which nothing requests a measurement until tests are running."""

import pytest


@pytest.fixture
def run_in_job(scripted, job_summary):
    """Run tests without any option; return the session and the summary of its GitHub job."""

    def run(source, *args, **how):
        session = scripted(source, *args, writes_json=False, **(how or {"forked": True}))
        return session, job_summary.read_text("utf-8") if job_summary.exists() else ""

    return run


@pytest.mark.slow
def test_session_that_measures_nothing_does_not_import_the_hooks(run_in_job, workers):
    """A session that measures nothing imports neither the hooks nor the library for tables."""
    session, summary = run_in_job(
        """
        import sys
        import pytest

        @pytest.mark.parametrize("n", range(3))
        def test_it(n):
            assert "pytest_cka_memory.plugin.hooks" not in sys.modules
            assert "tabulate" not in sys.modules
        """,
        *workers,
        subprocess=True,  # a forked session has imported the hooks
    )
    session.assert_outcomes(passed=3)
    assert summary == ""


@pytest.mark.parametrize("where", ["test", "fixture"])
def test_fixture_requested_by_name_measures(run_in_job, where, worker):
    """If a test or fixture requests the fixture by name, it measures; earlier tests are not
    missing.
    """
    session, summary = run_in_job(
        f"""
        import pytest

        def test_before(): pass

        @pytest.fixture
        def given(request):
            return request.getfixturevalue("cka_memory") if "{where}" == "fixture" else None

        def test_it(request, given, meter):
            probe = given or request.getfixturevalue("cka_memory")
            with probe.measure("late"):
                meter.allocate(5)

        def test_after(): pass
        """,
        *worker,
    )
    session.assert_outcomes(passed=3)
    assert "1 region measured, no limits set" in summary
    assert "test_it late" in summary
    assert "without a result" not in session.text + summary


@pytest.mark.parametrize(("size", "outcome"), [(4, "passed"), (5, "failed")])
def test_marker_added_by_a_fixture_is_checked(run_in_job, size, outcome, worker):
    """A marker that a fixture adds is checked, although no test had one at collection."""
    session, summary = run_in_job(
        f"""
        import pytest

        def test_before(): pass

        @pytest.fixture
        def limited(request): request.applymarker(pytest.mark.max_retained_mb("4 B"))

        def test_it(limited, meter): meter.allocate({size})
        """,
        *worker,
    )
    session.assert_outcomes(
        **({"passed": 2} if outcome == "passed" else {"passed": 1, "failed": 1})
    )
    assert ("kept every limit" in summary) == (outcome == "passed")


def test_marker_added_to_a_testcase_by_a_fixture_is_checked(run_in_job):
    """Pytest calls methods of a TestCase in another way, and a fixture's marker works there too."""
    session, _ = run_in_job(
        """
        import unittest
        import pytest
        from conftest import METER

        class TestIt(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def limited(self, request): request.applymarker(pytest.mark.zero_retention)
            def test_it(self): METER.allocate(1)
        """
    )
    session.assert_outcomes(failed=1)
    assert "zero_retention broken: retained 1 byte" in session.text


@pytest.mark.parametrize("marker", ["zero_retention", "max_retained_mb(-1)"])
def test_marker_added_inside_the_test_fails_it(run_in_job, marker, worker):
    """A limit that was added inside the test was not checked, so the test must not pass."""
    session, _ = run_in_job(
        f"""
        import pytest
        def test_before(): pass
        def test_it(request): request.applymarker(pytest.mark.{marker})
        """,
        *worker,
    )
    session.assert_outcomes(passed=1, failed=1)
    assert f"{marker}: " in session.text
    assert "pytest_cka_memory/" not in session.text  # no traceback of the plugin


def test_in_process_sessions_within_a_session_are_measured(run_in_job, pytester):
    """Tests of plugins run pytest in-process and remove what it
    imported; these sessions measure.
    """
    conftest = (pytester.path / "conftest.py").read_text("utf-8")
    hooks = conftest + (
        "\nfrom pytest_cka_memory.limits import zero_retention\n"
        "def pytest_cka_memory_limits(item): return [zero_retention()]\n"
    )
    session, _ = run_in_job(
        f"""
        pytest_plugins = ["pytester"]

        def test_twice(pytester):
            for _ in range(2):
                pytester.makeconftest({hooks!r})
                pytester.makepyfile("def test_it(meter): meter.allocate(1)")
                pytester.runpytest_inprocess("-p", "no:hypothesispytest").assert_outcomes(failed=1)
        """
    )
    session.assert_outcomes(passed=1)


MARKING_WRAPPER = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    {target}.add_marker(pytest.mark.max_peak_mb({limit}))
    return (yield)
"""
TWO_MB = """
import torch

def test_peak():
    torch.zeros(2 * 2**18)
"""


@pytest.mark.parametrize("target", ["item", "item.parent"])
@pytest.mark.parametrize(("limit", "outcome"), [(3, "passed"), (1, "failed")])
def test_limit_that_an_outermost_wrapper_adds_is_judged(session, pytester, target, limit, outcome):
    """Other plugins' wrappers that are to come first run before the plugin looks for markers."""
    pytester.makeconftest(MARKING_WRAPPER.format(target=target, limit=limit))
    run = session(TWO_MB, writes_json=False)
    assert run.result.parseoutcomes() == {outcome: 1}, run.text
    assert ("max_peak_mb(1) broken" in run.text) == (outcome == "failed")
