"""Every kind of test: measured, or said aloud not to be."""

import pytest

ASYNC_PLUGIN = """
import asyncio
import inspect

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
"""
CUSTOM_ITEMS = """
def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".recipe":
        return Recipe.from_parent(parent, path=file_path)

class Recipe(pytest.File):
    def collect(self):
        yield Step.from_parent(self, name="step")

class Step(pytest.Item):
    def runtest(self): METER.allocate(1)
    def reportinfo(self): return self.path, 0, "step"
"""


def _extend_conftest(pytester, text):
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text("utf-8") + text, "utf-8")


TESTCASE = """
import unittest

import pytest
from conftest import METER

class TestIt(unittest.TestCase):
    def setUp(self): METER.allocate(1000)
    def tearDown(self): METER.allocate(100)

    @pytest.mark.max_retained_mb("5 B")
    def test_kept(self): METER.allocate(5)

    @pytest.mark.max_retained_mb("5 B")
    def test_broken(self): METER.allocate(6)

    @pytest.mark.zero_retention
    def test_fails(self):
        METER.allocate(6)
        self.fail("its own failure")

    @pytest.mark.zero_retention
    def test_skips(self): self.skipTest("no data")

    @unittest.expectedFailure
    @pytest.mark.zero_retention
    def test_expected(self): METER.allocate(1)

    @unittest.skip("never")
    @pytest.mark.zero_retention
    def test_never(self): METER.allocate(1)
"""


def test_testcase_methods_are_measured_between_set_up_and_tear_down(scripted):
    """A unittest.TestCase method is judged as a function is, by what itself does."""
    run = scripted(TESTCASE, "--cka-memory-report")
    run.outcomes(passed=1, failed=2, skipped=2, xfailed=1)
    assert run.of("test_kept")["retained_bytes"] == 5
    assert run.of("test_kept")["net_bytes"] == 5
    assert run.of("test_broken")["retained_bytes"] == 6
    verdicts = {r["nodeid"].rpartition("::")[2]: r["verdict"] for r in run.regions}
    assert verdicts == {
        "test_kept": "ok",
        "test_broken": "BREACH",
        "test_fails": "not judged",
        "test_skips": "not judged",
        "test_expected": "BREACH",
    }
    run.result.stdout.fnmatch_lines_random(
        ["max_retained_mb('5 B') broken: retained 6 bytes, allowed 5 bytes: 1 byte too much"]
    )
    assert "items.py" not in run.text
    assert "not measured:" not in run.text


def test_testcase_methods_may_open_regions(scripted):
    """Through an autouse fixture that hands them the probe."""
    run = scripted(
        """
        import unittest
        import pytest
        from conftest import METER

        class TestIt(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def probe(self, cka_memory): self.memory = cka_memory

            @pytest.mark.zero_retention
            def test_it(self):
                METER.allocate(1)
                with self.memory.measure("mine"):
                    pass
        """
    )
    run.outcomes(passed=1)
    assert run.region["label"] == "mine"


ASYNC_TESTCASE = """
import unittest
import pytest

class TestIt(unittest.IsolatedAsyncioTestCase):
    {marker}
    async def test_async(self): pass

    @pytest.mark.zero_retention
    def test_sync(self): pass
"""


def test_an_async_testcase_method_refuses_its_marker(scripted):
    """It runs where it cannot be measured: that is a failure which says what to write instead."""
    run = scripted(ASYNC_TESTCASE.format(marker="@pytest.mark.zero_retention"))
    run.outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines(
        ["zero_retention: not checked. TestCaseFunction items run*write it as a plain or async*"]
    )
    assert run.region["nodeid"].endswith("test_sync")


def test_an_unmarked_async_testcase_method_is_said_not_to_be_measured(scripted):
    """It passes, and the summary counts it."""
    run = scripted(ASYNC_TESTCASE.format(marker=""), "--cka-memory-report")
    run.outcomes(passed=2)
    run.result.stdout.fnmatch_lines(["1 not measured: TestCaseFunction items run their code*"])


def test_doctests_are_said_not_to_be_measured(scripted, pytester):
    """Doctest items run their lines where they cannot be measured."""
    pytester.maketxtfile(test_doc=">>> 1 + 1\n2\n")
    run = scripted(
        "def test_it(): '''\n    >>> 1\n    1\n    '''\n",
        "--doctest-modules",
        "--cka-memory-report",
    )
    run.outcomes(passed=3)
    run.result.stdout.fnmatch_lines(["2 not measured: DoctestItem items run their code*"])
    assert len(run.regions) == 1


def test_a_limit_of_the_session_fails_no_doctest(scripted):
    """It has no marker to take off; that it was not measured is said."""
    run = scripted(
        "def test_it(): '''\n    >>> 1\n    1\n    '''\n",
        "--doctest-modules",
        "--cka-memory-max-retained-mb=1",
        "--cka-memory-report",
    )
    run.outcomes(passed=2)
    run.result.stdout.fnmatch_lines(["1 not measured: DoctestItem items run their code*"])


def test_items_of_other_plugins_are_said_not_to_be_measured(scripted, pytester):
    """Without a limit they pass and are counted; with one they fail, for nothing checks it."""
    (pytester.path / "a.recipe").touch()
    _extend_conftest(
        pytester,
        CUSTOM_ITEMS.replace(
            '"step")', '"step")\n        yield Marked.from_parent(self, name="marked")'
        )
        + "\nclass Marked(Step):\n    def __init__(self, **kw):\n        super().__init__(**kw)\n"
        "        self.add_marker(pytest.mark.zero_retention)\n",
    )
    run = scripted(None, "--cka-memory-report")
    run.outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines_random(
        ["zero_retention: not checked. Marked items*", "1 not measured: Step items run their*"]
    )
    assert run.regions == []


def test_async_functions_are_measured_by_whatever_runs_them(scripted, pytester):
    """The readings enclose a plugin that runs coroutines from pytest_pyfunc_call."""
    _extend_conftest(pytester, ASYNC_PLUGIN)
    run = scripted(
        """
        import asyncio
        import pytest

        pytestmark = pytest.mark.zero_retention

        async def test_kept(meter):
            await asyncio.sleep(0)
            meter.free(meter.allocate(7))

        async def test_broken(meter):
            await asyncio.sleep(0)
            meter.allocate(7)

        async def test_region(cka_memory, meter):
            meter.allocate(7)
            with cka_memory.measure("inside"):
                await asyncio.sleep(0)
        """
    )
    run.outcomes(passed=2, failed=1)
    assert run.of("test_kept")["peak_increase_bytes"] == 7
    assert run.of("test_broken")["retained_bytes"] == 7
    assert run.of("test_region")["label"] == "inside"


def test_an_async_function_nobody_runs_is_no_pass(scripted):
    """As pytest fails it for itself; no limit is said to be kept."""
    run = scripted(
        "import pytest\n@pytest.mark.zero_retention\nasync def test_it(): pass\n",
        "-p",
        "no:asyncio",
        "-p",
        "no:anyio",
    )
    run.outcomes(failed=1)
    assert run.region["verdict"] == "not judged"


def test_subtests_and_steps_of_one_test_are_one_region(scripted):
    """The subtests fixture reports each step; the region belongs to the test."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_it(subtests, meter):
            for size in (1, 2):
                with subtests.test(size=size):
                    meter.allocate(size)
        """
    )
    if "fixture 'subtests' not found" in run.text:
        pytest.skip("this pytest has no subtests fixture")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["retained_bytes"] == 3


def test_a_failed_subtest_leaves_the_others_region_reported(scripted):
    """A step that fails inside does not end the test: its traceback may hold tensors."""
    run = scripted(
        """
        def test_it(subtests, cka_memory, meter):
            with cka_memory.measure("all"):
                with subtests.test("a"):
                    assert 0
        """
    )
    if "fixture 'subtests' not found" in run.text:
        pytest.skip("this pytest has no subtests fixture")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["label"] == "all"


def test_class_and_static_methods_and_callables_are_measured(scripted):
    """Every form of test function that pytest calls itself."""
    run = scripted(
        """
        import functools
        import pytest

        pytestmark = pytest.mark.zero_retention

        class TestForms:
            @staticmethod
            def test_static(meter): meter.allocate(1)
            @classmethod
            def test_class(cls, meter): meter.allocate(1)

        def _wrapped(function):
            @functools.wraps(function)
            def inner(*args, **kwargs): return function(*args, **kwargs)
            return inner

        @_wrapped
        def test_decorated(meter): meter.allocate(1)
        """
    )
    run.outcomes(failed=3)


def test_hypothesis_examples_are_one_region(scripted):
    """A property test is measured as a whole, all examples in one region."""
    pytest.importorskip("hypothesis")
    run = scripted(
        """
        import pytest
        from conftest import METER
        from hypothesis import given, settings, strategies as st

        @pytest.mark.max_retained_mb("4 B")
        @settings(max_examples=5, database=None, derandomize=True)
        @given(st.integers(1, 1000))
        def test_it(n): METER.allocate(1)
        """,
        subprocess=True,
    )
    run.outcomes(failed=1)
    assert run.region["retained_bytes"] == 5
