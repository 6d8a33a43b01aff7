"""Beside the plugins that people have: the real ones, in a process of their own."""

import re

import pytest

FLAKY = """
import pytest
RUNS = []

@pytest.mark.zero_retention
def test_it(meter):
    RUNS.append(1)
    meter.allocate({leak})
    assert len(RUNS) > 1
"""
KEPT_AND_BROKEN = """
import pytest

@pytest.mark.max_retained_mb("4 B")
@pytest.mark.parametrize("size", range(6))
def test_it(meter, size): meter.free(meter.allocate(100)); meter.allocate(size)
"""


@pytest.fixture
def beside(scripted):
    """Run tests in a process that also has the named plugin, or skip where it is not there."""

    def run(source, plugin, *args):
        # Under the names of their entry points, which not all of them can be imported by.
        module = {"rerunfailures": "pytest_rerunfailures", "timeout": "pytest_timeout"}
        pytest.importorskip(module.get(plugin, f"pytest_{plugin.removeprefix('pytest_')}"))
        return scripted(source, "-p", plugin, *args, subprocess=True)

    return run


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])
def test_cov_changes_no_figure(beside, pytester, workers):
    """With pytest-cov tracing every line, bytes and verdicts are the same, and it reports too."""
    options = ("--cov=.", "--cov-report=term", "--cka-memory-report", *workers)
    run = beside(KEPT_AND_BROKEN, "pytest_cov", *options)
    run.outcomes(passed=5, failed=1)
    assert [r["retained_bytes"] for r in run.regions] == [0, 1, 2, 3, 4, 5]
    assert {r["peak_increase_bytes"] for r in run.regions} == {100}
    run.result.stdout.fnmatch_lines(["TOTAL*"])


def test_cov_changes_no_figure_of_real_tensors(beside, session, pytester):
    """Nor does tracing keep tensors alive."""
    source = """
        import torch

        def test_it(cka_memory):
            with cka_memory.measure():
                kept = [torch.ones(100) for _ in range(10)]
                del kept[5:]
        """
    (pytester.path / "conftest.py").unlink()
    options = ("--cov=.", "--cov-branch", "--cka-memory-device=cpu")
    region = beside(source, "pytest_cov", *options).region
    assert (region["retained_bytes"], region["peak_increase_bytes"]) == (2000, 4000)


def test_a_fail_under_of_cov_and_a_breach_are_one_red_session(beside):
    """Both gate the session; neither hides the other."""
    source = f"{KEPT_AND_BROKEN}\ndef never_called():\n    return 1\n"
    run = beside(source, "pytest_cov", "--cov=.", "--cov-fail-under=100", "-k", "5")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.result.stdout.fnmatch_lines(["*Required test coverage of 100% not reached*"])
    run.outcomes(failed=1)
    assert run.region["verdict"] == "BREACH"


def test_a_timeout_is_no_crash(beside):
    """With pytest-timeout, a hanging region fails its test and is not judged."""
    run = beside(
        """
        import time

        def test_it(cka_memory):
            with cka_memory.measure("hangs"):
                time.sleep(30)

        def test_next(cka_memory): pass
        """,
        "timeout",
        "--timeout=0.5",
    )
    run.outcomes(passed=1, failed=1)
    assert [r["verdict"] for r in run.regions] == ["not judged", "no limit"]


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])
@pytest.mark.parametrize(
    ("leak", "outcomes", "verdict"),
    [(0, {"passed": 1}, "ok"), (1, {"failed": 1}, "BREACH")],
    ids=["clean-at-last", "leaks"],
)
def test_the_last_run_counts(beside, leak, outcomes, verdict, workers):
    """With pytest-rerunfailures a test has one region, that of the run which decided."""
    run = beside(FLAKY.format(leak=leak), "rerunfailures", "--reruns=2", *workers)
    run.outcomes(**outcomes)
    assert run.region["verdict"] == verdict
    assert run.region["outcome"] == next(iter(outcomes))
    assert run.text.count("1 byte, allowed 0 bytes: 1 byte too much") == leak


def test_a_rerun_breach_in_teardown_leaves_one_region(beside):
    """Also where the call had passed and been reported before its teardown failed."""
    run = beside(
        """
        import pytest

        @pytest.fixture
        def around(cka_memory, meter):
            with cka_memory.measure("around"):
                yield
                meter.allocate(1)

        @pytest.mark.zero_retention
        def test_it(around): pass
        """,
        "rerunfailures",
        "--reruns=1",
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert [r["label"] for r in run.regions] == ["", "around"]
    assert run.report["missing"] == []


def test_a_rerun_takes_the_late_regions_of_the_run_before_along(beside):
    """What a fixture measured around the first run does not count either."""
    source = """
        import pytest
        RUNS = []

        @pytest.fixture
        def around(cka_memory):
            with cka_memory.measure("around"):
                yield

        def test_it(around):
            RUNS.append(1)
            assert len(RUNS) > 1
        """
    run = beside(source, "rerunfailures", "--reruns=1")
    run.outcomes(passed=1)
    assert [r["label"] for r in run.regions] == ["", "around"]
    assert [r["verdict"] for r in run.regions] == ["no limit"] * 2


def test_every_run_has_the_properties_of_its_own(beside, pytester):
    """JUnit XML lists a rerun as a test case more: with its figures, not those of both."""
    source = FLAKY.replace("assert", "meter.free(meter.allocate(len(RUNS)))\n    assert")
    beside(source.format(leak=0), "rerunfailures", "--reruns=2", "--junitxml=j.xml")
    xml = (pytester.path / "j.xml").read_text("utf-8")
    assert re.findall(r'"cka_memory.peak_increase_bytes" value="(\d+)"', xml) == ["1", "2"]


def test_any_order_gives_the_same_figures(beside):
    """With pytest-randomly the report follows the order of the run; each test has its own bytes."""
    run = beside(KEPT_AND_BROKEN, "randomly", "-p", "randomly", "-p", "no:cacheprovider")
    run.outcomes(passed=5, failed=1)
    for region in run.regions:
        size = int(region["nodeid"][-2])
        assert (region["retained_bytes"], region["verdict"]) == (
            size,
            "BREACH" if size > 4 else "ok",
        )


def test_repeated_tests_are_measured_each(beside):
    """With pytest-repeat every repetition is a test with a region."""
    run = beside(
        "def test_it(cka_memory, meter): meter.allocate(3)\n", "pytest_repeat", "--count=3"
    )
    run.outcomes(passed=3)
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_it[{n}-3]" for n in (1, 2, 3)]
    assert [r["retained_bytes"] for r in run.regions] == [3, 3, 3]


@pytest.mark.parametrize("options", [[], ["--asyncio-mode=auto"]], ids=["marked", "auto"])
def test_asyncio_is_measured(beside, options):
    """With pytest-asyncio, a coroutine's leak is found, and one that keeps its limit passes."""
    marker = "" if options else "@pytest.mark.asyncio\n"
    run = beside(
        f"""
import asyncio
import pytest

pytestmark = pytest.mark.zero_retention

@pytest.fixture
def kept(meter): meter.allocate(100)

{marker}async def test_leaks(kept, meter):
    await asyncio.sleep(0)
    meter.allocate(7)

{marker}async def test_clean(kept, cka_memory, meter):
    with cka_memory.measure("inside"):
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))
        meter.free(meter.allocate(7))
""",
        "asyncio",
        *options,
    )
    run.outcomes(passed=1, failed=1)
    assert run.of("test_leaks")["retained_bytes"] == 7
    assert run.of("test_clean")["peak_increase_bytes"] == 7


def test_all_of_them_at_once(beside):
    """They do not get in each other's way either: one region and one failure a test."""
    for plugin in ("pytest_cov", "pytest_repeat", "pytest_timeout", "pytest_rerunfailures"):
        pytest.importorskip(plugin)
    others = ["-p", "pytest_cov", "-p", "pytest_repeat", "--cov=.", "--count=2", "--timeout=60"]
    run = beside(KEPT_AND_BROKEN, "randomly", *others, "--reruns=1", "-n2")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert len({r["nodeid"] for r in run.regions}) == len(run.regions) == 12
    verdicts = [r["verdict"] for r in run.regions]
    assert (verdicts.count("ok"), verdicts.count("BREACH")) == (10, 2)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--durations=0", "-vv"], ["*s call *test_it*0*", "*s setup *test_it*5*"]),
        (["-p", "xdist", "-p", "randomly"], ["*1 failed, 5 passed*"]),
        (["-rA"], ["PASSED test_it.py::test_it*0*", "FAILED test_it.py::test_it*5*"]),
        (["--ff", "--tb=line"], ["*1 failed, 5 passed*"]),
    ],
    ids=["durations", "xdist", "summary", "failed-first"],
)
def test_what_pytest_is_asked_for_it_still_gives(scripted, options, shown):
    """With the verdicts of any other session."""
    run = scripted(KEPT_AND_BROKEN, *options, subprocess=True)
    run.outcomes(passed=5, failed=1)
    assert sorted(r["verdict"] for r in run.regions) == ["BREACH", *["ok"] * 5]
    run.result.stdout.fnmatch_lines_random(shown)
