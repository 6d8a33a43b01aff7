"""Where markers may stand, which of them counts, and how they go with other markers."""

import pytest

MB = 2**20
LEAK = "    meter.allocate(2 * 2**20)\n"


def test_the_closest_marker_wins(scripted):
    """Function over class over module; a closer one may be looser or tighter."""
    run = scripted(
        """
        import pytest

        pytestmark = pytest.mark.max_retained_mb(0)

        def test_module(meter): meter.allocate(1)

        @pytest.mark.max_retained_mb("10 B")
        class TestClass:
            def test_class_kept(self, meter): meter.allocate(10)
            def test_class_broken(self, meter): meter.allocate(11)

            @pytest.mark.max_retained_mb("20 B")
            def test_function_kept(self, meter): meter.allocate(20)
            @pytest.mark.max_retained_mb("5 B")
            def test_function_broken(self, meter): meter.allocate(6)

        @pytest.mark.max_retained_mb("3 B")
        def test_function(meter): meter.allocate(3)
        """
    )
    run.outcomes(passed=3, failed=3)
    assert {r["nodeid"].rpartition("::")[2]: r["limits"] for r in run.regions} == {
        "test_module": ["max_retained_mb(0)"],
        "test_class_kept": ["max_retained_mb('10 B')"],
        "test_class_broken": ["max_retained_mb('10 B')"],
        "test_function_kept": ["max_retained_mb('20 B')"],
        "test_function_broken": ["max_retained_mb('5 B')"],
        "test_function": ["max_retained_mb('3 B')"],
    }


def test_different_markers_add_up_over_the_levels(scripted):
    """A function's marker replaces only the outer ones of its own name."""
    run = scripted(
        """
        import pytest

        pytestmark = [pytest.mark.zero_retention, pytest.mark.max_peak_mb(1)]

        @pytest.mark.max_peak_mb(2)
        def test_it(meter): pass
        """
    )
    assert sorted(run.region["limits"]) == ["max_peak_mb(2)", "zero_retention"]


@pytest.mark.parametrize(
    ("limit", "kept"), [("'10 B'", True), ("'9 B'", False)], ids=["looser", "tighter"]
)
def test_a_parameter_overrides_its_function(scripted, limit, kept):
    """A marker in pytest.param is closer than one on the function that takes the parameter."""
    run = scripted(
        f"""
        import pytest

        @pytest.mark.max_retained_mb({"0" if kept else "1"})
        @pytest.mark.parametrize(
            "size", [0, pytest.param(10, marks=pytest.mark.max_retained_mb({limit}))]
        )
        def test_it(meter, size): meter.allocate(size)
        """
    )
    run.outcomes(passed=1 + kept, failed=1 - kept)
    assert run.of("test_it[10]")["limits"] == [f"max_retained_mb({limit})"]


def test_a_parameter_alone_may_be_marked(scripted):
    """Its siblings are not measured."""
    run = scripted(
        """
        import pytest

        @pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.zero_retention)])
        def test_it(meter, size): meter.allocate(size)
        """
    )
    run.outcomes(passed=1, failed=1)
    assert run.region["nodeid"].endswith("[2]")


def test_a_subclass_overrides_its_base(scripted):
    """An inherited marker is farther away than the subclass's own."""
    run = scripted(
        """
        import pytest

        @pytest.mark.max_retained_mb(0)
        class Base:
            def test_it(self, meter): meter.allocate(1)

        @pytest.mark.max_retained_mb(1)
        class TestLooser(Base): pass

        class TestSame(Base): pass
        """
    )
    run.outcomes(passed=1, failed=1)
    assert [r["limits"] for r in run.regions] == [["max_retained_mb(1)"], ["max_retained_mb(0)"]]


def test_markers_added_before_the_call_count(scripted):
    """A marker that a fixture applies is one like any other, and overrides the written one."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def strict(request): request.applymarker(pytest.mark.zero_retention)

        @pytest.fixture
        def loose(request): request.node.add_marker(pytest.mark.max_retained_mb(1))

        def test_unmarked(strict, meter): meter.allocate(1)

        @pytest.mark.max_retained_mb(0)
        def test_loosened(loose, meter): meter.allocate(1)
        """
    )
    run.outcomes(passed=1, failed=1)
    assert run.of("test_unmarked")["verdict"] == "BREACH"
    assert run.of("test_loosened")["verdict"] == "ok"


def test_a_marker_added_while_the_test_runs_counts_where_the_fixture_measures(scripted):
    """Regions are judged when the call has ended, by the markers there are then."""
    run = scripted(
        """
        import pytest

        def test_it(request, cka_memory, meter):
            with cka_memory.measure():
                meter.allocate(1)
            request.applymarker(pytest.mark.zero_retention)
        """
    )
    run.outcomes(failed=1)


def test_a_marker_that_comes_too_late_is_refused(scripted):
    """A test that was not measured from its start cannot keep a limit added inside it."""
    run = scripted(
        """
        import pytest

        def test_it(request, meter):
            request.applymarker(pytest.mark.zero_retention)
            meter.allocate(1)
        """
    )
    run.outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["zero_retention: not checked*"])


def test_a_wrong_marker_added_by_a_fixture_fails_in_a_line(scripted):
    """It cannot be found at collection, and is refused when it is read."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def wrong(request): request.applymarker(pytest.mark.max_retained_mb(-1))

        def test_it(wrong): pass
        """
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*max_retained_mb(-1): a memory size cannot be -1*"])
    assert "items.py" not in run.text


@pytest.mark.parametrize(
    ("marker", "outcome", "region_outcome"),
    [
        ("xfail", {"xfailed": 1}, "xfailed"),
        ("xfail(strict=True)", {"xfailed": 1}, "xfailed"),
        ("xfail(raises=ValueError)", {"failed": 1}, "failed"),
    ],
)
def test_a_breach_is_a_failure_to_xfail(scripted, marker, outcome, region_outcome):
    """An expected breach is an expected failure; a breach is no ValueError."""
    source = f"import pytest\n@pytest.mark.{marker}\n@pytest.mark.zero_retention\n"
    run = scripted(source + "def test_it(meter):\n" + LEAK)
    run.outcomes(**outcome)
    assert run.region["outcome"] == region_outcome
    assert run.region["verdict"] == "BREACH"


@pytest.mark.parametrize(
    ("marker", "outcome"),
    [("xfail", {"xpassed": 1}), ("xfail(strict=True)", {"failed": 1})],
)
def test_an_expected_breach_that_is_gone_is_told(scripted, marker, outcome):
    """A kept limit under xfail is an unexpected pass, and fails where that is strict."""
    source = f"import pytest\n@pytest.mark.{marker}\n@pytest.mark.zero_retention\n"
    run = scripted(source + "def test_it(meter): pass\n")
    run.outcomes(**outcome)
    assert run.region["verdict"] == "ok"


def test_skips_measure_nothing_and_break_nothing(scripted):
    """However a test is skipped, no limit is judged."""
    run = scripted(
        """
        import pytest

        pytestmark = pytest.mark.zero_retention

        @pytest.mark.skip
        def test_skip(meter): meter.allocate(1)

        @pytest.mark.skipif("True", reason="always")
        def test_skipif(cka_memory, meter): meter.allocate(1)

        @pytest.mark.xfail(run=False)
        def test_not_run(meter): meter.allocate(1)

        def test_inside(meter):
            meter.allocate(1)
            pytest.skip("half way")

        @pytest.fixture
        def skipping(cka_memory): pytest.skip("in a fixture")

        def test_in_a_fixture(skipping, meter): meter.allocate(1)
        """,
        "--cka-memory-report",
    )
    run.outcomes(skipped=4, xfailed=1)
    assert run.region["nodeid"].endswith("test_inside")
    assert run.region["completed"] is False
    assert run.region["breaches"] == []
    run.result.stdout.fnmatch_lines(["not judged *test_inside*skipped"])
    assert "not measured: Function items" not in run.text


def test_a_failing_test_is_not_judged_and_that_is_said(scripted):
    """Its traceback holds its tensors; the failure that is told is its own."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_whole(meter):
            meter.allocate(1)
            assert not "its own failure"

        @pytest.mark.zero_retention
        def test_region(cka_memory, meter):
            with cka_memory.measure("left"):
                meter.allocate(1)
                raise ValueError("out of it")
        """,
        "--cka-memory-report",
    )
    run.outcomes(failed=2)
    assert [r["verdict"] for r in run.regions] == ["not judged"] * 2
    assert [r["outcome"] for r in run.regions] == ["failed"] * 2
    assert [r["breaches"] for r in run.regions] == [[], []]
    run.result.stdout.fnmatch_lines(
        [
            "*its own failure*",
            "*ValueError: out of it*",
            "not judged *test_whole: the test failed",
            "not judged *test_region left: the test failed",
        ]
    )
    assert "broken" not in run.text


def test_the_failure_stands_in_junit_xml(scripted, pytester):
    """A breach is a failure to every consumer of the reports, not only on the screen."""
    run = scripted(
        "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter):\n" + LEAK,
        "--junitxml=j.xml",
    )
    run.outcomes(failed=1)
    xml = (pytester.path / "j.xml").read_text("utf-8")
    assert 'failures="1"' in xml
    assert 'errors="0"' in xml
    assert "zero_retention broken: retained 2,097,152 bytes" in xml
