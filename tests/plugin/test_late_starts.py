"""Sessions in which nothing asks to be measured until tests already run."""

import pytest

BOTH = pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])


@pytest.fixture
def late(scripted, pytester, monkeypatch):
    """Run tests without any option; what was measured is read in the summary of a job."""

    def run(source, *args):
        summary = pytester.path / "summary.md"
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        session = scripted(source, *args, writes_json=False, subprocess=True)
        return session, summary.read_text("utf-8") if summary.exists() else ""

    return run


@BOTH
def test_nothing_that_measures_is_loaded_for_tests_that_do_not_ask(late, workers):
    """Not even the table's library."""
    session, summary = late(
        """
        import sys
        import pytest

        @pytest.mark.parametrize("n", range(3))
        def test_it(n):
            assert "pytest_cka_memory.plugin.hooks" not in sys.modules
            assert "tabulate" not in sys.modules
        """,
        *workers,
    )
    session.outcomes(passed=3)
    assert summary == ""


@BOTH
@pytest.mark.parametrize("where", ["test", "fixture"])
def test_a_probe_that_is_asked_for_by_name_measures(late, where, workers):
    """In a test or in another fixture; the tests before it are not called missing."""
    session, summary = late(
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
        *workers,
    )
    session.outcomes(passed=3)
    assert "1 region measured, no limit to keep" in summary
    assert "test_it late" in summary
    assert "without a result" not in session.text + summary


@BOTH
@pytest.mark.parametrize(("size", "outcome"), [(4, "passed"), (5, "failed")])
def test_a_marker_that_a_fixture_adds_is_held(late, size, outcome, workers):
    """Though no test was marked when tests were collected."""
    session, summary = late(
        f"""
        import pytest

        def test_before(): pass

        @pytest.fixture
        def limited(request): request.applymarker(pytest.mark.max_retained_mb("4 B"))

        def test_it(limited, meter): meter.allocate({size})
        """,
        *workers,
    )
    session.outcomes(**({"passed": 2} if outcome == "passed" else {"passed": 1, "failed": 1}))
    assert ("kept every limit" in summary) == (outcome == "passed")


def test_a_testcase_that_a_fixture_marks_is_held(late):
    """Its methods are called another way."""
    session, _ = late(
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
    session.outcomes(failed=1)
    assert "zero_retention broken: retained 1 byte" in session.text


@BOTH
@pytest.mark.parametrize("marker", ["zero_retention", "max_retained_mb(-1)"])
def test_a_marker_that_comes_too_late_is_refused(late, marker, workers):
    """A limit that was added inside the test was not checked: that is no pass."""
    session, _ = late(
        f"""
        import pytest
        def test_before(): pass
        def test_it(request): request.applymarker(pytest.mark.{marker})
        """,
        *workers,
    )
    session.outcomes(passed=1, failed=1)
    assert f"{marker}: " in session.text
    assert "items.py" not in session.text


def test_sessions_within_a_session_load_one_copy_each(late, pytester):
    """Tests of other plugins run pytest in their own process, which forgets what it imported."""
    conftest = (pytester.path / "conftest.py").read_text("utf-8")
    hooks = conftest + (
        "\nfrom pytest_cka_memory.limits import zero_retention\n"
        "def pytest_cka_memory_limits(item): return [zero_retention()]\n"
    )
    session, _ = late(
        f"""
        pytest_plugins = ["pytester"]

        def test_twice(pytester):
            for _ in range(2):
                pytester.makeconftest({hooks!r})
                pytester.makepyfile("def test_it(meter): meter.allocate(1)")
                pytester.runpytest_inprocess("-p", "no:hypothesispytest").assert_outcomes(failed=1)
        """
    )
    session.outcomes(passed=1)
