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
"""
TESTS = """
import pytest
@pytest.mark.slow
def test_slow(): pass
def test_other(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "passed", "skipped"),
    [
        ("", 1, 1),
        ("-k slow", 0, 1),
        ("--slow", 2, 0),
        ("--slow -m slow", 1, 0),
        ("tests", 2, 0),
        ("tests/test_it.py", 2, 0),
        ("tests/test_it.py::test_slow", 1, 0),
        ("-n 1", 1, 1),
        ("-n 1 tests", 2, 0),
    ],
)
def test_slow_tests_run_if_they_are_asked_for(
    pytester: pytest.Pytester, arguments: str, passed: int, skipped: int
) -> None:
    """``--slow`` runs them, and a path; the others say how. Workers do what their session does."""
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers = slow")
    folder = pytester.mkdir("tests")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    result = pytester.runpytest("-rs", *arguments.split())
    result.assert_outcomes(passed=passed, skipped=skipped)
    reason = "takes seconds; pytest --slow runs it, as CI does"
    assert (reason in result.stdout.str()) == bool(skipped)
