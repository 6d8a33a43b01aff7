"""Regions opened by tests and by fixtures: which of them count, and when they are judged."""

import pytest


def test_a_block_replaces_the_whole_test(scripted):
    """A test that opens a region is judged by it alone: what it keeps outside is its own affair."""
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
    run.outcomes(passed=1)
    assert run.region["label"] == "clean"


def test_the_fixture_alone_measures_the_whole_test(scripted):
    """Asking for the fixture without opening a region measures all of the call."""
    run = scripted("def test_it(cka_memory, meter): meter.allocate(5)")
    assert run.region["label"] == ""
    assert run.region["retained_bytes"] == 5
    assert run.region["verdict"] == "no limit"


def test_nested_regions_keep_their_own_figures(scripted):
    """The outer one includes its inner ones; the inner peak is no part of its sibling's."""
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
    run.outcomes(passed=1)
    figures = {r["label"]: (r["retained_bytes"], r["peak_increase_bytes"]) for r in run.regions}
    assert figures == {"first": (2, 100), "second": (3, 3), "outer": (5, 100)}


def test_a_region_that_ends_in_teardown_is_judged_there(scripted):
    """A fixture may hold a region open around the test: its breach is an error of the teardown."""
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
    # The whole test breaks its limit too: it opened no region of its own.
    run.outcomes(passed=1, failed=1, errors=1)
    labels = [(r["nodeid"].partition("::")[2], r["label"], r["verdict"]) for r in run.regions]
    assert labels == [
        ("test_broken", "", "BREACH"),
        ("test_broken", "around", "BREACH"),
        ("test_kept", "", "ok"),
        ("test_kept", "around", "ok"),
    ]


def test_what_only_the_late_region_sees_breaks_there(scripted):
    """A leak in the fixture's own part, after the test, is found by the region around it."""
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
    run.outcomes(passed=1, errors=1)
    assert [r["outcome"] for r in run.regions] == ["error", "error"]
    run.result.stdout.fnmatch_lines(["*ERROR at teardown*", "zero_retention broken*", "*'around'*"])


def test_a_late_region_of_a_failed_test_is_not_judged(scripted):
    """A failure keeps the test's frames, and so its tensors: the region around is not to blame."""
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
    run.outcomes(failed=1)
    assert [r["verdict"] for r in run.regions] == ["not judged", "not judged"]


def test_a_region_in_a_fixture_does_not_stand_for_the_test(scripted):
    """A fixture that measured its own set-up leaves the test itself to be measured."""
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
    run.outcomes(failed=1)
    assert [(r["label"], r["verdict"]) for r in run.regions] == [("build", "ok"), ("", "BREACH")]


def test_a_breach_in_a_fixture_is_told_in_the_call(scripted):
    """Limits hold for every region of the test, those of its fixtures included."""
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
    run.outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*region 'build'*"])


def test_a_setup_that_fails_after_a_region_keeps_its_figures(scripted):
    """The region is reported; no wrong reason is given for the test that never ran."""
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
    run.outcomes(errors=1)
    assert run.region["label"] == "build"
    assert "not measured: Function" not in run.text


def test_the_fixture_may_be_asked_for_by_name(scripted):
    """request.getfixturevalue works where nothing told beforehand that the test is measured."""
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
    run.outcomes(passed=2)
    assert [(r["label"], r["retained_bytes"]) for r in run.regions] == [("mine", 3), ("mine", 4)]
    assert "not measured" not in run.text


def test_labels_are_text_in_one_line(scripted):
    """Anything may be a label: it is shown, and cannot upset the table or a worker."""
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
    run.outcomes(passed=1)
    assert all(isinstance(r["label"], str) for r in run.regions)
    run.result.stdout.fnmatch_lines(["test_it two lines*", "test_it 7*", "test_it a/b*"])


def test_batch_sizes_are_plain_numbers(scripted):
    """A size that is a NumPy number or a tensor becomes an int: no tensor is kept by a sample."""
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
    run.outcomes(passed=1)
    assert [sample["size"] for sample in run.region["timeline"]] == [4, 4]


def test_a_second_run_of_the_same_test_is_measured_anew(scripted, pytester):
    """Plugins that re-run a failed test must not pass its second run unmeasured."""
    conftest = pytester.path / "conftest.py"
    conftest.write_text(
        conftest.read_text("utf-8")
        + """
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
""",
        "utf-8",
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
    run.outcomes(failed=1)
    assert run.region["verdict"] == "BREACH"


@pytest.mark.parametrize("options", [[], ["--cka-memory-report"]], ids=["plain", "report"])
def test_a_region_left_by_a_caught_exception_is_said_not_to_be_judged(scripted, options):
    """The exception in hand holds its tensors; a pass without a judgement is never silent."""
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
    run.outcomes(passed=1)
    run.result.stdout.fnmatch_lines(["not judged *test_it inside: an exception left it; *"])


def test_a_region_around_the_caught_exception_is_judged(scripted):
    """That is how to measure what an error path leaves behind."""
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
    run.outcomes(failed=1)


def test_a_region_that_never_ends_is_an_error(scripted):
    """Its block was entered and not left: it is ended for it, named, and the next test is right."""
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
    run.outcomes(passed=2, errors=1)
    run.result.stdout.fnmatch_lines(["never ended: region 'forgotten', so nothing of it was*"])
    assert [region["verdict"] for region in run.regions] == ["no limit", "not judged", "ok"]
