"""Limits over all tests of a class or module, with its set-up and tear-down."""

import pytest

CLASSES = """
import unittest
import pytest
import torch


@pytest.mark.zero_retention(scope="class")
class TestParks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = torch.nn.Linear(100, 10, bias=False)

    def test_one(self):
        self.model(torch.ones(1, 100))

    def test_two(self):
        pass


@pytest.mark.zero_retention(scope="class")
class TestDeletes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = torch.nn.Linear(100, 10)

    @classmethod
    def tearDownClass(cls):
        del cls.model

    def test_one(self):
        self.model(torch.ones(1, 100))


@pytest.mark.zero_retention(scope="class")
class TestFixtures:
    @pytest.fixture(scope="class")
    def model(self):
        return torch.nn.Linear(100, 10)

    @pytest.fixture
    def batch(self):
        return torch.ones(1, 100)

    def test_one(self, model, batch):
        model(batch)

    def test_two(self, model, batch):
        self.kept = model(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "ledger"])
def test_class_that_parks_its_model_fails_and_one_that_deletes_it_passes(
    session, monkeypatch, native
):
    """What ``setUpClass`` makes and nobody deletes is retained; values of fixtures are not."""
    monkeypatch.setenv("CKA_MEMORY_NATIVE", native)
    run = session(CLASSES, "--cka-memory-device=cpu", "-p", "no:randomly", forked=True)
    run.assert_outcomes(passed=5, errors=1)
    verdicts = {
        region["nodeid"]: (region["verdict"], region["retained_bytes"])
        for region in run.regions
        if region["nodeid"].endswith(" scope)")
    }
    assert verdicts == {
        "test_it.py::TestParks::all tests (class scope)": ("BREACH", 4000),
        "test_it.py::TestDeletes::all tests (class scope)": ("ok", 0),
        "test_it.py::TestFixtures::all tests (class scope)": ("ok", 0),
    }
    text = " ".join(run.text.split())
    assert "ERROR at teardown of TestParks.test_two" in text
    assert "zero_retention(scope='class') broken: retained 4,000 bytes" in text
    assert "held by test_it.TestParks.model" in text


MODULE = """
import pytest

pytestmark = [pytest.mark.max_retained_mb("100 B", scope="module"), pytest.mark.{own}]


@pytest.fixture(scope="module", autouse=True)
def data(request):
    request.config.hook.pytest_cka_memory_meter(config=request.config, device="cpu").allocate(
        {size}
    )


def test_one():
    pass


class TestTwo:
    def test_two(self):
        {code}
"""


@pytest.mark.parametrize(
    ("size", "kept"), [(100, True), (101, False)], ids=["equal", "one-byte-above"]
)
def test_limit_over_a_module_includes_its_fixtures(scripted, worker, size, kept):
    """A module's limit counts what its fixtures make, serially and in a worker."""
    run = scripted(MODULE.format(own="zero_retention", size=size, code="pass"), *worker)
    run.assert_outcomes(passed=2, errors=int(not kept))
    assert run.result.ret == (0 if kept else 1)
    region = run.region_of("all tests (module scope)")
    assert (region["retained_bytes"], region["verdict"]) == (size, "ok" if kept else "BREACH")


def test_limit_of_each_test_applies_beside_that_of_the_module(scripted):
    """The same marker without a scope judges each test; what a fixture made is not in it."""
    run = scripted(
        MODULE.format(own="zero_retention", size=10, code="self.kept = 1"), "-p", "no:randomly"
    )
    run.assert_outcomes(passed=2)
    limits = [region["limits"] for region in run.regions]
    assert limits == [
        ["zero_retention"],
        ["zero_retention"],
        ["max_retained_mb('100 B', scope='module')"],
    ]


def test_module_with_a_failed_test_is_not_judged(scripted):
    """A traceback keeps what a failed test has allocated, so the module is not judged."""
    run = scripted(MODULE.format(own="zero_retention", size=1000, code="assert 0"))
    run.assert_outcomes(passed=1, failed=1)
    assert run.region_of("all tests (module scope)")["verdict"] == "not judged"


def test_module_limit_that_warns(scripted):
    """With ``warn=True`` a broken limit over a module is in the report, and fails nothing."""
    source = MODULE.format(own="zero_retention", size=1000, code="pass")
    run = scripted(source.replace('scope="module")', 'scope="module", warn=True)', 1))
    run.assert_outcomes(passed=2)
    assert run.region_of("all tests (module scope)")["verdict"] == "warning"


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (
            "zero_retention(scope='file')",
            "scope='file' is not a scope; write one of 'function', 'class'",
        ),
        ("zero_retention(scope='class')", "the test is not in a class; write scope='module'"),
        (
            "flat_per_batch(scope='class')",
            "flat_per_batch is always judged for each region; leave out",
        ),
    ],
)
def test_scopes_that_do_not_fit_are_usage_errors(scripted, marker, message):
    """A scope that does not exist or does not fit stops the session."""
    run = scripted(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    run.assert_refused(message)


def test_report_names_the_highest_level_of_the_session(scripted):
    """The summary has the region with the highest level."""
    run = scripted(
        """
        def test_low(meter): meter.free(meter.allocate(2**20))
        def test_high(meter): meter.free(meter.allocate(2**21))
        """,
        "--cka-memory-report",
    )
    assert "highest level: 2.00 MB in test_it.py::test_high" in run.text
