"""Which sessions of this project's tests run those with the marker ``slow``."""

from pathlib import Path

import pytest

FILE = Path(__file__).with_name("conftest.py")
CONFTEST = f"""
import importlib.util, sys
sys.path.insert(0, {str(FILE.parent)!r})  # not there in a worker
spec = importlib.util.spec_from_file_location("suite", {str(FILE)!r})
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
pytest_addoption = suite.pytest_addoption
pytest_configure = suite.pytest_configure
pytest_collection_modifyitems = suite.pytest_collection_modifyitems
pytest_terminal_summary = suite.pytest_terminal_summary
"""
TESTS = """
import pytest
@pytest.mark.slow
def test_slow(): pass
def test_other(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "passed", "leaves_out"),
    [
        ("", 1, True),
        ("-q", 1, True),
        ("--slow", 2, False),
        ("-m slow", 1, False),
        ("-k test_slow", 1, False),
        ("--lf", 2, False),
        ("tests", 2, False),
        ("tests/test_it.py", 2, False),
        ("tests/test_it.py::test_slow", 1, False),
        ("-q -n 1", 1, True),
        ("-n 1 tests", 2, False),
    ],
)
def test_slow_tests_run_if_they_are_asked_for(
    pytester: pytest.Pytester, arguments: str, passed: int, leaves_out: bool
) -> None:
    """``--slow`` runs them, and a path; other sessions say how, also those with workers."""
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers = slow")
    folder = pytester.mkdir("tests")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    result = pytester.runpytest(*arguments.split())
    result.assert_outcomes(passed=passed)
    text = "left out: tests that take a second or more; pytest --slow runs them, as CI does"
    assert (text in result.outlines) == leaves_out
