"""A test of which a subtest has failed is judged without what the subtest's traceback keeps."""

import sys

import pytest

pytest.importorskip("_pytest.subtests", reason="pytest before 9 has no subtests")

START = """
import unittest
import warnings
import pytest
import torch

pytestmark = pytest.mark.zero_retention
KEPT = []

def fail(size=1000):
    values = torch.ones(size)
    error = ValueError("no")
    raise error
"""
SUBTESTS = """
def test_whole(subtests):
    values = torch.ones(10)
    with subtests.test(): fail()
    with subtests.test():
        try:
            fail()
        except ValueError as error:
            raise ExceptionGroup("both", [error]) from error

def test_regions(subtests, cka_memory):
    with cka_memory.measure("around"):
        with subtests.test(): fail()
    with cka_memory.measure("after"):
        pass

def test_deleted_later(subtests, cka_memory):
    with cka_memory.measure("region"):
        values = torch.ones(1000)
        with subtests.test(): assert 0
        del values

@pytest.mark.flat_per_batch
def test_batches(subtests, cka_memory):
    with cka_memory.measure("loop") as region:
        for _ in region.batches(range(10)):
            with subtests.test(): fail()

def test_leak(subtests):
    with subtests.test(): fail()
    KEPT.append(torch.ones(2000))

def test_stores_the_exception(subtests, cka_memory):
    stored = []
    with cka_memory.measure("region"):
        with subtests.test():
            try:
                fail()
            except ValueError as error:
                stored.append(error)
                raise
    assert stored[0].__traceback__.tb_next.tb_frame.f_locals["values"].numel() == 1000
"""
TESTCASE = """
class TestIt(unittest.TestCase):
    def test_whole(self):
        with self.subTest(): fail()

    def test_leak(self):
        with self.subTest(): fail()
        KEPT.append(torch.ones(2000))

class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_whole(self):
        with self.subTest(): fail()
"""
PLUGINS = [(), ("-p", "no:rerunfailures")]


def verdicts(run):
    return {
        " ".join(filter(None, [r["nodeid"].rpartition("::")[2], r["label"]])): (
            r["verdict"],
            r["retained_bytes"],
        )
        for r in run.regions
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
@pytest.mark.parametrize("plugins", PLUGINS, ids=["all-plugins", "without-rerunfailures"])
def test_failed_subtest_is_not_a_leak_of_its_test(session, plugins):
    """Only what the test itself keeps is retained, whichever plugin stores the tracebacks."""
    run = session(START + SUBTESTS, "--cka-memory-device=cpu", *plugins, forked=True)
    assert verdicts(run) == {
        "test_whole": ("ok", 0),
        "test_regions around": ("ok", 0),
        "test_regions after": ("ok", 0),
        "test_deleted_later region": ("ok", 0),
        "test_batches loop": ("ok", 0),
        "test_leak": ("BREACH", 8000),
        "test_stores_the_exception region": ("BREACH", 4000),
    }
    assert "what to do: store the text of the exception instead" in run.text
    assert "f_locals['values'] in test_stores_the_exception" in " ".join(run.text.split())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="unittest reports subtests at the end")
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("plugins", PLUGINS, ids=["all-plugins", "without-rerunfailures"])
def test_outcome_of_a_testcase_depends_on_no_plugin(session, plugins, marked):
    """A TestCase with a failed subtest has the same outcome with and without a marker."""
    source = START if marked else START.replace("pytestmark =", "unused =")
    run = session(source + TESTCASE, "--cka-memory-device=cpu", *plugins, forked=True)
    found = run.result.parseoutcomes()
    assert (found["passed"], found["failed"]) == ((2, 4) if marked else (3, 3)), run.text
    if marked:
        assert verdicts(run) == {"test_whole": ("ok", 0), "test_leak": ("BREACH", 8000)}


@pytest.mark.slow
def test_subtests_that_unittest_keeps_are_not_judged(session):
    """Up to Python 3.10 unittest keeps the tracebacks until the test has ended; the report says
    that the limit was not judged.
    """
    source = """
class TestIt(unittest.TestCase):
    def test_it(self):
        try:
            fail()
        except ValueError as error:
            kept = self, (ValueError, error, error.__traceback__)
        self._outcome.errors = [kept]
"""
    run = session(START + source, "--cka-memory-device=cpu")
    assert run.region["verdict"] == "not judged"
    fails = sys.version_info < (3, 11)  # then unittest reports what the test has stored
    assert fails or "not judged test_it.py::TestIt::test_it" in run.text
    run.assert_outcomes(failed=int(fails), passed=int(not fails))


SWALLOWED = """
def test_raises():
    with pytest.raises(ValueError) as error: fail()

def test_warning():
    with warnings.catch_warnings(record=True) as seen:
        try:
            fail()
        except ValueError as error:
            warnings.warn(UserWarning(error))

def test_retries():
    for _ in range(3):
        try:
            fail()
        except ValueError as error:
            last = error

def test_raises_in_region(cka_memory):
    with cka_memory.measure("region"):
        with pytest.raises(ValueError) as info: fail()
"""


def test_stored_exception_ends_with_the_test_that_stores_it(session):
    """A test's variable ends with the test; in a region that ends earlier the exception is named
    as what holds the tensor.
    """
    run = session(START + SWALLOWED, "--cka-memory-device=cpu", forked=True)
    assert verdicts(run) == {
        "test_raises": ("ok", 0),
        "test_warning": ("ok", 0),
        "test_retries": ("ok", 0),
        "test_raises_in_region region": ("BREACH", 4000),
    }
    assert "store the text of the exception instead" in run.text
