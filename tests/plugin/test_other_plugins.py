"""Sessions with other pytest plugins loaded, each in a process of its own."""

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
FIVE_PASS_ONE_FAILS = """
import pytest

@pytest.mark.max_retained_mb("4 B")
@pytest.mark.parametrize("size", range(6))
def test_it(meter, size): meter.free(meter.allocate(100)); meter.allocate(size)
"""


@pytest.fixture
def with_plugin(scripted):
    """Run tests in a process that also loads a plugin; skip if that is not installed."""

    def run(source, plugin, *args):
        # `plugin` is the name of the entry point; the module of some has another name.
        module = {"rerunfailures": "pytest_rerunfailures", "timeout": "pytest_timeout"}
        pytest.importorskip(module.get(plugin, f"pytest_{plugin.removeprefix('pytest_')}"))
        return scripted(source, "-p", plugin, *args, forked=True)

    return run


@pytest.mark.slow
def test_cov_does_not_change_figures(with_plugin, pytester, workers):
    """With pytest-cov tracing each line, bytes and verdicts are the
    same, and coverage is printed.
    """
    options = ("--cov=.", "--cov-report=term", "--cka-memory-report", *workers)
    run = with_plugin(FIVE_PASS_ONE_FAILS, "pytest_cov", *options)
    run.assert_outcomes(passed=5, failed=1)
    assert [r["retained_bytes"] for r in run.regions] == [0, 1, 2, 3, 4, 5]
    assert {r["peak_increase_bytes"] for r in run.regions} == {100}
    run.result.stdout.fnmatch_lines(["TOTAL*"])


def test_cov_does_not_keep_tensors_alive(with_plugin, session, pytester):
    """Under branch coverage figures of real tensors are the same, so it keeps none alive."""
    source = """
        import torch

        def test_it(cka_memory):
            with cka_memory.measure():
                kept = [torch.ones(100) for _ in range(10)]
                del kept[5:]
        """
    (pytester.path / "conftest.py").unlink()
    options = ("--cov=.", "--cov-branch", "--cka-memory-device=cpu")
    region = with_plugin(source, "pytest_cov", *options).region
    assert (region["retained_bytes"], region["peak_increase_bytes"]) == (2000, 4000)


def test_low_coverage_and_a_breach_are_both_reported(with_plugin):
    """Low coverage and a breach both fail the session, and neither hides the other."""
    source = f"{FIVE_PASS_ONE_FAILS}\ndef never_called():\n    return 1\n"
    run = with_plugin(source, "pytest_cov", "--cov=.", "--cov-fail-under=100", "-k", "5")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.result.stdout.fnmatch_lines(["*Required test coverage of 100% not reached*"])
    run.assert_outcomes(failed=1)
    assert run.region["verdict"] == "BREACH"


def test_region_that_times_out_is_not_judged(with_plugin):
    """With pytest-timeout a region that hangs fails its test only, and the next test runs."""
    run = with_plugin(
        """
        import time
        import pytest

        @pytest.mark.timeout(0.5)
        def test_it(cka_memory):
            with cka_memory.measure("hangs"):
                time.sleep(30)

        def test_next(cka_memory): pass
        """,
        "timeout",
    )
    run.assert_outcomes(passed=1, failed=1)
    assert [r["verdict"] for r in run.regions] == ["not judged", "no limit"]


@pytest.mark.parametrize(
    ("leak", "outcomes", "verdict"),
    [(0, {"passed": 1}, "ok"), (1, {"failed": 1}, "BREACH")],
    ids=["clean-rerun", "leaks"],
)
def test_last_rerun_decides_the_verdict(with_plugin, leak, outcomes, verdict, workers):
    """With pytest-rerunfailures a test has one region, which is that of its last run."""
    run = with_plugin(FLAKY.format(leak=leak), "rerunfailures", "--reruns=2", *workers)
    run.assert_outcomes(**outcomes)
    assert run.region["verdict"] == verdict
    assert run.region["outcome"] == next(iter(outcomes))
    assert run.text.count("1 byte, allowed 0 bytes: 1 byte too much") == leak


def test_rerun_after_a_breach_in_teardown_reports_each_region_once(with_plugin):
    """A breach in teardown causes a rerun after the call was reported; regions are there once."""
    run = with_plugin(
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


def test_rerun_discards_regions_that_ended_in_the_earlier_teardown(with_plugin):
    """If a fixture measured around a rerun test, only its region
    around the last run is reported.
    """
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
    run = with_plugin(source, "rerunfailures", "--reruns=1")
    run.assert_outcomes(passed=1)
    assert [r["label"] for r in run.regions] == ["", "around"]
    assert [r["verdict"] for r in run.regions] == ["no limit"] * 2


def test_junit_xml_has_the_figures_of_each_run(with_plugin, pytester):
    """JUnit XML lists each run as a test case, with the figures of that run only."""
    source = FLAKY.replace("assert", "meter.free(meter.allocate(len(RUNS)))\n    assert")
    with_plugin(source.format(leak=0), "rerunfailures", "--reruns=2", "--junitxml=j.xml")
    xml = (pytester.path / "j.xml").read_text("utf-8")
    assert re.findall(r'"cka_memory.peak_increase_bytes" value="(\d+)"', xml) == ["1", "2"]


def test_random_order_does_not_change_figures(with_plugin):
    """With pytest-randomly each test has the same figures as in the usual order."""
    run = with_plugin(FIVE_PASS_ONE_FAILS, "randomly", "-p", "randomly", "-p", "no:cacheprovider")
    run.assert_outcomes(passed=5, failed=1)
    for region in run.regions:
        size = int(region["nodeid"][-2])
        assert (region["retained_bytes"], region["verdict"]) == (
            size,
            "BREACH" if size > 4 else "ok",
        )


def test_each_repetition_is_measured(with_plugin):
    """With pytest-repeat every repetition is a test with a region of its own."""
    run = with_plugin(
        "def test_it(cka_memory, meter): meter.allocate(3)\n", "pytest_repeat", "--count=3"
    )
    run.assert_outcomes(passed=3)
    assert [r["nodeid"] for r in run.regions] == [f"test_it.py::test_it[{n}-3]" for n in (1, 2, 3)]
    assert [r["retained_bytes"] for r in run.regions] == [3, 3, 3]


@pytest.mark.parametrize("options", [[], ["--asyncio-mode=auto"]], ids=["marked", "auto"])
def test_asyncio_coroutines_are_measured(with_plugin, options):
    """With pytest-asyncio a coroutine that leaks fails, and one that keeps its limit passes."""
    marker = "" if options else "@pytest.mark.asyncio\n"
    run = with_plugin(
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
    run.assert_outcomes(passed=1, failed=1)
    assert run.region_of("test_leaks")["retained_bytes"] == 7
    assert run.region_of("test_clean")["peak_increase_bytes"] == 7


def test_asyncio_coroutines_are_not_repeated(with_plugin):
    """A coroutine runs once with ``--cka-memory-repeat``, as without pytest-asyncio."""
    run = with_plugin(
        "async def test_it(meter): meter.allocate(7)",
        "asyncio",
        "--asyncio-mode=auto",
        "--cka-memory-report",
        "--cka-memory-repeat=5",
    )
    run.assert_outcomes(passed=1)
    assert [(r["label"], r["retained_bytes"]) for r in run.regions] == [("", 7)]


@pytest.mark.slow
def test_all_plugins_together_report_each_test_once(with_plugin):
    """With all plugins loaded at once, each test has one region and one verdict."""
    for plugin in ("pytest_cov", "pytest_repeat", "pytest_timeout", "pytest_rerunfailures"):
        pytest.importorskip(plugin)
    others = ["-p", "pytest_cov", "-p", "pytest_repeat", "--cov=.", "--count=2", "--timeout=60"]
    run = with_plugin(FIVE_PASS_ONE_FAILS, "randomly", *others, "--reruns=1", "-n2")
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
def test_pytest_options_still_print_their_output(scripted, options, shown):
    """Options of pytest print what they ask for, and the verdicts are the same."""
    run = scripted(FIVE_PASS_ONE_FAILS, *options, forked=True)
    run.assert_outcomes(passed=5, failed=1)
    assert sorted(r["verdict"] for r in run.regions) == ["BREACH", *["ok"] * 5]
    run.result.stdout.fnmatch_lines_random(shown)
