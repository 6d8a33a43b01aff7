"""Every kind of test item is either measured or reported as not measured."""

import unittest

import pytest

from pytest_cka_memory.plugin.pytest_private import has_class_fixture

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


def test_testcase_methods_are_measured_without_set_up_and_tear_down(scripted):
    """A unittest.TestCase method is judged like a function, by what the method itself does."""
    run = scripted(TESTCASE, "--cka-memory-report")
    run.assert_outcomes(passed=1, failed=2, skipped=2, xfailed=1)
    assert run.region_of("test_kept")["retained_bytes"] == 5
    assert run.region_of("test_kept")["net_bytes"] == 5
    assert run.region_of("test_broken")["retained_bytes"] == 6
    verdicts = {r["nodeid"].rpartition("::")[2]: r["verdict"] for r in run.regions}
    assert verdicts == {
        "test_kept": "ok",
        "test_broken": "BREACH",
        "test_fails": "not judged",
        "test_skips": "not judged",
        "test_expected": "known (xfail)",
    }
    run.result.stdout.fnmatch_lines_random(
        ["max_retained_mb('5 B') broken: retained 6 bytes, allowed 5 bytes: 1 byte too much"]
    )
    assert "pytest_cka_memory/" not in run.text  # no traceback of the plugin
    assert "not measured:" not in run.text


def test_testcase_methods_may_open_regions(scripted):
    """An autouse fixture gives methods of a TestCase the probe, so that they can open regions."""
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
    run.assert_outcomes(passed=1)
    assert run.region["label"] == "mine"


ASYNC_TESTCASE = """
import asyncio
import unittest

import pytest
from conftest import METER

class TestIt(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self): METER.allocate(1000)
    async def asyncTearDown(self): METER.allocate(100)

    @pytest.mark.max_retained_mb("5 B")
    async def test_kept(self):
        await asyncio.sleep(0)
        METER.allocate(5)

    @pytest.mark.max_retained_mb("5 B")
    async def test_broken(self):
        await asyncio.sleep(0)
        METER.allocate(6)

    @pytest.mark.zero_retention
    async def test_fails(self): self.fail("its own failure")

    @pytest.mark.zero_retention
    def test_sync(self): pass
"""


def test_async_testcase_methods_are_measured_without_set_up_and_tear_down(scripted):
    """Async methods, which unittest runs in an event loop, are
    measured like those of any TestCase.
    """
    run = scripted(ASYNC_TESTCASE, "--cka-memory-report")
    run.assert_outcomes(passed=2, failed=2)
    verdicts = {r["nodeid"].rpartition("::")[2]: r["verdict"] for r in run.regions}
    assert verdicts == {
        "test_kept": "ok",
        "test_broken": "BREACH",
        "test_fails": "not judged",
        "test_sync": "ok",
    }
    assert run.region_of("test_kept")["retained_bytes"] == 5
    assert "pytest_cka_memory/" not in run.text  # no traceback of the plugin


UNAWAITED_TESTCASE = """
import unittest
import pytest

class TestIt(unittest.TestCase):
    {marker}
    async def test_async(self): pass

    @pytest.mark.zero_retention
    def test_sync(self): pass
"""


def test_marked_async_method_of_a_plain_testcase_fails(scripted):
    """The code of a marked async method of a plain TestCase never runs: the failure says what to
    write.
    """
    run = scripted(UNAWAITED_TESTCASE.format(marker="@pytest.mark.zero_retention"))
    run.assert_outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines(
        ["zero_retention: not checked. Async methods of a unittest.TestCase*write the test as *"]
    )
    assert run.region["nodeid"].endswith("test_sync")


def test_unmarked_async_method_of_a_plain_testcase_is_counted_as_not_measured(scripted):
    """An unmarked async method of a plain TestCase passes, and is counted as not measured."""
    run = scripted(UNAWAITED_TESTCASE.format(marker=""), "--cka-memory-report")
    run.assert_outcomes(passed=2)
    run.result.stdout.fnmatch_lines(["1 not measured: async methods of a unittest.TestCase (*"])


def test_doctests_are_counted_as_not_measured(scripted, pytester):
    """Doctest items run their code where it cannot be measured, so they are counted."""
    pytester.maketxtfile(test_doc=">>> 1 + 1\n2\n")
    run = scripted(
        "def test_it(): '''\n    >>> 1\n    1\n    '''\n",
        "--doctest-modules",
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=3)
    run.result.stdout.fnmatch_lines(["2 not measured: doctests run their code*"])
    assert len(run.regions) == 1


def test_option_with_a_limit_does_not_fail_doctests(scripted):
    """A doctest has no marker that could be removed, so an option's limit does not fail it."""
    run = scripted(
        "def test_it(): '''\n    >>> 1\n    1\n    '''\n",
        "--doctest-modules",
        "--cka-memory-max-retained-mb=1",
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=2)
    run.result.stdout.fnmatch_lines(["1 not measured: doctests run their code*"])


def test_items_of_other_plugins_are_counted_as_not_measured(scripted, pytester, extend_conftest):
    """Items of other plugins pass and are counted; with a limit they fail, as nothing checks it."""
    (pytester.path / "a.recipe").touch()
    extend_conftest(
        CUSTOM_ITEMS.replace(
            '"step")', '"step")\n        yield Marked.from_parent(self, name="marked")'
        )
        + "\nclass Marked(Step):\n    def __init__(self, **kw):\n        super().__init__(**kw)\n"
        "        self.add_marker(pytest.mark.zero_retention)\n",
    )
    run = scripted(None, "--cka-memory-report")
    run.assert_outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines_random(
        ["zero_retention: not checked. Marked items*", "1 not measured: Step items run their*"]
    )
    assert run.regions == []


def test_async_functions_that_a_plugin_runs_are_measured(scripted, extend_conftest):
    """Readings are taken around a plugin that runs coroutines from pytest_pyfunc_call."""
    extend_conftest(ASYNC_PLUGIN)
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
    run.assert_outcomes(passed=2, failed=1)
    assert run.region_of("test_kept")["peak_increase_bytes"] == 7
    assert run.region_of("test_broken")["retained_bytes"] == 7
    assert run.region_of("test_region")["label"] == "inside"


def test_async_function_that_no_plugin_runs_fails(scripted):
    """An async function that no plugin runs is failed by pytest, and its region is not judged."""
    run = scripted(
        "import pytest\n@pytest.mark.zero_retention\nasync def test_it(): pass\n",
        "-p",
        "no:asyncio",
        "-p",
        "no:anyio",
    )
    run.assert_outcomes(failed=1)
    assert run.region["verdict"] == "not judged"


def test_subtests_of_one_test_share_a_region(scripted):
    """The subtests fixture reports each step, but the region belongs to the test."""
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
        pytest.skip("this pytest version has no subtests fixture")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["retained_bytes"] == 3


def test_region_around_a_failed_subtest_is_reported(scripted):
    """After a failed subtest the test goes on, although a traceback may hold tensors."""
    run = scripted(
        """
        def test_it(subtests, cka_memory, meter):
            with cka_memory.measure("all"):
                with subtests.test("a"):
                    assert 0
        """
    )
    if "fixture 'subtests' not found" in run.text:
        pytest.skip("this pytest version has no subtests fixture")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.region["label"] == "all"


def test_static_class_and_decorated_functions_are_measured(scripted):
    """Static, class and decorated test functions, which pytest itself calls, are measured."""
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
    run.assert_outcomes(failed=3)


def test_hypothesis_examples_share_a_region(scripted):
    """A property test is measured as a whole, with all examples in one region."""
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
        forked=True,
    )
    run.assert_outcomes(failed=1)
    assert run.region["retained_bytes"] == 5


def test_class_fixture_is_one_that_the_class_or_a_base_of_it_defines() -> None:
    """A TestCase always has both methods for its class; they count only if a class defines them."""

    class Plain(unittest.TestCase):
        def setUp(self) -> None: ...

    class Own(unittest.TestCase):
        @classmethod
        def tearDownClass(cls) -> None: ...

    class Inherited(Own): ...

    assert [has_class_fixture(cls) for cls in (Plain, Own, Inherited)] == [False, True, True]
