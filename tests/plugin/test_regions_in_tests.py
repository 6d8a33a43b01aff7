"""Regions opened by tests and by fixtures: which are judged, and when."""

import pytest


def test_region_is_judged_instead_of_the_whole_test(scripted):
    """If a test opens a region, what it retains outside of it is not judged."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_it(cka_memory, meter):
            meter.allocate(1)
            with cka_memory.measure("clean"):
                pass
            meter.allocate(1)
        """
    )
    run.assert_outcomes(passed=1)
    assert run.region["label"] == "clean"


def test_fixture_without_a_region_measures_the_whole_test(scripted):
    """A test that requests the fixture and opens no region is measured as a whole."""
    run = scripted("def test_it(cka_memory, meter): meter.allocate(5)")
    assert run.region["label"] == ""
    assert run.region["retained_bytes"] == 5
    assert run.region["verdict"] == "no limit"


def test_nested_regions_have_their_own_figures(scripted):
    """The outer region includes the inner ones; the peak of one inner region is not in the next."""
    run = scripted(
        """
        import pytest

        @pytest.mark.max_retained_mb("5 B")
        def test_it(cka_memory, meter):
            with cka_memory.measure("outer"):
                with cka_memory.measure("first"):
                    meter.free(meter.allocate(100))
                    meter.allocate(2)
                with cka_memory.measure("second"):
                    meter.allocate(3)
        """
    )
    run.assert_outcomes(passed=1)
    figures = {r["label"]: (r["retained_bytes"], r["peak_increase_bytes"]) for r in run.regions}
    assert figures == {"first": (2, 100), "second": (3, 3), "outer": (5, 100)}


def test_region_that_ends_in_teardown_is_judged_in_teardown(scripted):
    """A region that a fixture keeps open is judged in teardown, where a breach is an error."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def around(cka_memory):
            with cka_memory.measure("around") as region:
                yield region

        @pytest.mark.max_retained_mb("5 B")
        def test_broken(around, meter): meter.allocate(5); meter.allocate(1)

        @pytest.mark.max_retained_mb("5 B")
        def test_kept(around, meter): meter.allocate(5)
        """
    )
    # test_broken opens no region, so the whole test is judged as well.
    run.assert_outcomes(passed=1, failed=1, errors=1)
    labels = [(r["nodeid"].partition("::")[2], r["label"], r["verdict"]) for r in run.regions]
    assert labels == [
        ("test_broken", "", "BREACH"),
        ("test_broken", "around", "BREACH"),
        ("test_kept", "", "ok"),
        ("test_kept", "around", "ok"),
    ]


def test_leak_in_a_fixture_fails_the_teardown(scripted):
    """A leak after the test, inside a region that a fixture opened, fails the teardown."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def around(cka_memory, meter):
            with cka_memory.measure("around"):
                yield
                meter.allocate(1)

        @pytest.mark.zero_retention
        def test_it(around): pass
        """
    )
    run.assert_outcomes(passed=1, errors=1)
    assert [r["outcome"] for r in run.regions] == ["error", "error"]
    run.result.stdout.fnmatch_lines(["*ERROR at teardown*", "zero_retention broken*", "*'around'*"])


def test_region_around_a_failed_test_is_not_judged(scripted):
    """The traceback of a failed test references its tensors, so the region is not judged."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def around(cka_memory):
            with cka_memory.measure("around"):
                yield

        @pytest.mark.zero_retention
        def test_it(around, meter):
            meter.allocate(1)
            raise ValueError("its own failure")
        """
    )
    run.assert_outcomes(failed=1)
    assert [r["verdict"] for r in run.regions] == ["not judged", "not judged"]


def test_region_in_a_fixture_does_not_replace_the_test(scripted):
    """If a fixture measures its own setup, the test itself is still measured."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def built(cka_memory):
            with cka_memory.measure("build"):
                pass

        @pytest.mark.zero_retention
        def test_it(built, meter): meter.allocate(1)
        """
    )
    run.assert_outcomes(failed=1)
    assert [(r["label"], r["verdict"]) for r in run.regions] == [("build", "ok"), ("", "BREACH")]


def test_breach_in_a_fixture_fails_the_call(scripted):
    """Limits apply to the regions of a test's fixtures too, whose breach fails the call."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def built(cka_memory, meter):
            with cka_memory.measure("build"):
                meter.allocate(1)

        @pytest.mark.zero_retention
        def test_it(built): pass
        """
    )
    run.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*region 'build'*"])


def test_region_of_a_failed_setup_is_reported(scripted):
    """If setup fails, its region is reported, and the test is not counted as not measured."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def broken(cka_memory, meter):
            with cka_memory.measure("build"):
                meter.allocate(1)
            raise ValueError("no luck")

        def test_it(broken): pass
        """,
        "--cka-memory-report",
    )
    run.assert_outcomes(errors=1)
    assert run.region["label"] == "build"
    assert "not measured: Function" not in run.text


def test_fixture_may_be_requested_by_name(scripted):
    """request.getfixturevalue works although nothing announced that the test is measured."""
    run = scripted(
        """
        import pytest

        def test_in_the_test(request, meter):
            with request.getfixturevalue("cka_memory").measure("mine"):
                meter.allocate(3)

        @pytest.fixture
        def probe(request): return request.getfixturevalue("cka_memory")

        def test_in_a_fixture(probe, meter):
            with probe.measure("mine"):
                meter.allocate(4)
        """,
    )
    run.assert_outcomes(passed=2)
    assert [(r["label"], r["retained_bytes"]) for r in run.regions] == [("mine", 3), ("mine", 4)]
    assert "not measured" not in run.text


def test_labels_are_shown_as_one_line_of_text(scripted):
    """A label may be any object; it breaks neither the table nor the transfer from a worker."""
    run = scripted(
        """
        import pathlib

        def test_it(cka_memory):
            for label in ("two\\nlines", 7, pathlib.Path("a/b"), object, None):
                with cka_memory.measure(label):
                    pass
        """,
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=1)
    assert all(isinstance(r["label"], str) for r in run.regions)
    run.result.stdout.fnmatch_lines(["  test_it two lines*", "  test_it 7*", "  test_it a/b*"])


def test_batch_sizes_are_converted_to_int(scripted):
    """A size that is a tensor becomes an int, so that the sample does not reference the tensor."""
    run = scripted(
        """
        import numpy
        import torch

        def test_it(cka_memory):
            with cka_memory.measure() as region:
                region.batch_done(numpy.int64(4))
                region.batch_done(torch.tensor(4))
        """
    )
    run.assert_outcomes(passed=1)
    assert [sample["size"] for sample in run.region["timeline"]] == [4, 4]


def test_second_run_of_the_same_test_is_measured_again(scripted, extend_conftest):
    """If a plugin runs a failed test again, the second run is measured and judged."""
    extend_conftest(
        """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for _ in range(2):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not any(report.failed for report in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
    )
    run = scripted(
        """
        import pytest
        RUNS = []

        @pytest.mark.zero_retention
        def test_it(meter):
            RUNS.append(1)
            meter.allocate(1)
            assert len(RUNS) == 2
        """
    )
    run.assert_outcomes(failed=1)
    assert run.region["verdict"] == "BREACH"


@pytest.mark.parametrize("options", [[], ["--cka-memory-report"]], ids=["plain", "report"])
def test_region_aborted_by_a_caught_exception_is_reported_as_not_judged(scripted, options):
    """A region that an exception ended is not judged, also if the test caught it outside."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_it(cka_memory, meter):
            with pytest.raises(ValueError):
                with cka_memory.measure("inside"):
                    meter.allocate(1)
                    raise ValueError
        """,
        *options,
        writes_json=False,
    )
    run.assert_outcomes(passed=1)
    run.result.stdout.fnmatch_lines(
        ["not judged *test_it inside: an exception left the region's 'with' block; *"]
    )


def test_region_around_a_caught_exception_is_judged(scripted):
    """A region around a caught exception is judged by what the code that raised retains."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_it(cka_memory, meter):
            with cka_memory.measure("around"), pytest.raises(ValueError):
                meter.allocate(1)
                raise ValueError
        """
    )
    run.assert_outcomes(failed=1)


def test_region_that_is_never_closed_is_an_error(scripted):
    """A region that is never closed is named as an error, and the next test is right."""
    run = scripted(
        """
        import pytest

        KEPT = []

        def test_forgets(cka_memory, meter):
            block = cka_memory.measure("forgotten")
            KEPT.append(block)
            block.__enter__()
            meter.allocate(1)

        @pytest.mark.zero_retention
        def test_after(meter):
            pass
        """
    )
    run.assert_outcomes(passed=2, errors=1)
    run.result.stdout.fnmatch_lines(["region 'forgotten' was never closed, so it was not judged*"])
    assert [region["verdict"] for region in run.regions] == ["no limit", "not judged", "ok"]


def test_region_that_was_never_opened_fails_its_test(scripted):
    """A region that was never opened fails its test; the whole test must not be measured for it."""
    run = scripted(
        """
        def test_it(cka_memory):
            m = cka_memory.measure("train")

        def test_fails_for_its_own_reason(cka_memory):
            m = cka_memory.measure("other")
            assert m.retained_mb == 0

        def test_right(cka_memory):
            with cka_memory.measure("train"):
                pass
        """
    )
    run.assert_outcomes(passed=1, failed=2)
    run.result.stdout.fnmatch_lines(
        [
            "cka_memory.measure('train') was called without 'with', so nothing was measured; "
            "write 'with *",
            "E *RegionError: cannot read retained_mb: cka_memory.measure('other') was called *",
        ]
    )
    assert run.text.count("measure('train')") < 5


SAME_PROGRAMS = """
import numpy, pytest, torch

KEPT = []

class Node:
    def __init__(self):
        self.me, self.tensor = self, torch.ones(700)

def nothing(): pass
def keeps(): KEPT.append(torch.ones(1000))
def peaks(): torch.ones(5000).sum()
def leaves_a_cycle(): Node()
def borrows(): KEPT.append(torch.from_numpy(numpy.ones(300)))
def frees(): KEPT.clear()
def trains():
    model = torch.nn.Linear(40, 40)
    model(torch.ones(8, 40)).sum().backward()
    KEPT.append(model)
def fails():
    KEPT.append(torch.ones(20))
    pytest.fail("as it should")

PROGRAMS = nothing, keeps, peaks, leaves_a_cycle, borrows, frees, trains, fails

@pytest.fixture(autouse=True)
def one_tensor():
    KEPT[:] = [torch.ones(100)]

@pytest.mark.parametrize("program", PROGRAMS)
def test_reported(program): program()

@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.max_peak_mb(1000)
def test_limited(program): program()
"""

OF_LIMITS = "verdict", "limits", "unjudged"


@pytest.mark.native
def test_test_without_limits_has_the_figures_of_one_with_a_limit(session):
    """A test that is only reported has a region of its own kind, which measures the same."""
    run = session(SAME_PROGRAMS, "--cka-memory-report", "--cka-memory-device=cpu", forked=True)
    run.assert_outcomes(passed=14, failed=2)
    reported, limited = (
        [
            {name: value for name, value in region.items() if name not in ("nodeid", *OF_LIMITS)}
            for region in run.regions
            if f"::{test}[" in region["nodeid"]
        ]
        for test in ("test_reported", "test_limited")
    )
    assert reported == limited
    assert [region["retained_bytes"] for region in reported] == [0, 4000, 0, 0, 2400, 0, 13120, 80]
    assert [region["completed"] for region in reported] == [True] * 7 + [False]
