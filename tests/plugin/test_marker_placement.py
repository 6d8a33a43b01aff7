"""Where markers may be written, which of them applies, and how they combine with others."""

import pytest

MB = 2**20
ALLOCATE_TWO_MB = "    meter.allocate(2 * 2**20)\n"


def test_the_closest_marker_wins(scripted):
    """A function's marker overrides its class's, and that the
    module's, whether looser or tighter.
    """
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
    run.assert_outcomes(passed=3, failed=3)
    assert {r["nodeid"].rpartition("::")[2]: r["limits"] for r in run.regions} == {
        "test_module": ["max_retained_mb(0)"],
        "test_class_kept": ["max_retained_mb('10 B')"],
        "test_class_broken": ["max_retained_mb('10 B')"],
        "test_function_kept": ["max_retained_mb('20 B')"],
        "test_function_broken": ["max_retained_mb('5 B')"],
        "test_function": ["max_retained_mb('3 B')"],
    }


def test_different_markers_of_all_levels_apply(scripted):
    """A function's marker replaces only outer markers of the same name."""
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
def test_marker_of_a_parameter_overrides_that_of_its_function(scripted, limit, kept):
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
    run.assert_outcomes(passed=1 + kept, failed=1 - kept)
    assert run.region_of("test_it[10]")["limits"] == [f"max_retained_mb({limit})"]


def test_marker_of_one_parameter_measures_only_that_parameter(scripted):
    """A marker on one parameter measures the test with that parameter only."""
    run = scripted(
        """
        import pytest

        @pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.zero_retention)])
        def test_it(meter, size): meter.allocate(size)
        """
    )
    run.assert_outcomes(passed=1, failed=1)
    assert run.region["nodeid"].endswith("[2]")


def test_marker_of_a_subclass_overrides_that_of_its_base(scripted):
    """A marker of a subclass wins over the one inherited from its base."""
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
    run.assert_outcomes(passed=1, failed=1)
    assert [r["limits"] for r in run.regions] == [["max_retained_mb(1)"], ["max_retained_mb(0)"]]


def test_markers_added_by_fixtures_apply(scripted):
    """A marker that a fixture adds overrides the one that is written at the test."""
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

        @pytest.fixture
        def replaced(request):
            request.node.own_markers[:] = [pytest.mark.max_retained_mb(2).mark]

        @pytest.mark.max_retained_mb(0)
        def test_replaced(replaced, meter): meter.allocate(1)

        @pytest.fixture
        def of_class(request): request.node.parent.add_marker(pytest.mark.max_retained_mb(3))

        class TestIt:
            def test_of_class(self, of_class, meter): meter.allocate(1)
        """
    )
    run.assert_outcomes(passed=3, failed=1)
    assert run.region_of("test_unmarked")["verdict"] == "BREACH"
    assert run.region_of("test_loosened")["verdict"] == "ok"
    assert run.region_of("test_replaced")["limits"] == ["max_retained_mb(2)"]
    assert run.region_of("TestIt::test_of_class")["limits"] == ["max_retained_mb(3)"]


def test_marker_added_inside_a_measured_test_applies(scripted):
    """Regions are judged after the call, by the markers that the test has then."""
    run = scripted(
        """
        import pytest

        def test_it(request, cka_memory, meter):
            with cka_memory.measure():
                meter.allocate(1)
            request.applymarker(pytest.mark.zero_retention)
        """
    )
    run.assert_outcomes(failed=1)


def test_marker_added_inside_an_unmeasured_test_fails_it(scripted):
    """A limit that is added inside an unmeasured test cannot be checked, so the test fails."""
    run = scripted(
        """
        import pytest

        def test_it(request, meter):
            request.applymarker(pytest.mark.zero_retention)
            meter.allocate(1)
        """
    )
    run.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["zero_retention: not checked*"])


def test_wrong_marker_added_by_a_fixture_fails_the_test_in_one_line(scripted):
    """A fixture's wrong marker is unknown at collection; the test fails with one line instead."""
    run = scripted(
        """
        import pytest

        @pytest.fixture
        def wrong(request): request.applymarker(pytest.mark.max_retained_mb(-1))

        def test_it(wrong): pass
        """
    )
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(["*max_retained_mb(-1): a memory size cannot be -1*"])
    assert "pytest_cka_memory/" not in run.text  # no traceback of the plugin


@pytest.mark.parametrize(
    ("marker", "outcome", "region_outcome", "verdict"),
    [
        ("xfail", {"xfailed": 1}, "xfailed", "known (xfail)"),
        ("xfail(strict=True)", {"xfailed": 1}, "xfailed", "known (xfail)"),
        ("xfail(raises=ValueError)", {"failed": 1}, "failed", "BREACH"),
    ],
)
def test_breach_counts_as_a_failure_for_xfail(scripted, marker, outcome, region_outcome, verdict):
    """An expected breach is an expected failure, unless xfail expects another exception."""
    source = f"import pytest\n@pytest.mark.{marker}\n@pytest.mark.zero_retention\n"
    run = scripted(source + "def test_it(meter):\n" + ALLOCATE_TWO_MB)
    run.assert_outcomes(**outcome)
    assert run.region["outcome"] == region_outcome
    assert run.region["verdict"] == verdict


@pytest.mark.parametrize(
    ("marker", "outcome"),
    [("xfail", {"xpassed": 1}), ("xfail(strict=True)", {"failed": 1})],
)
def test_kept_limit_under_xfail_is_an_unexpected_pass(scripted, marker, outcome):
    """A limit that is kept under xfail is an unexpected pass, and a failure if xfail is strict."""
    source = f"import pytest\n@pytest.mark.{marker}\n@pytest.mark.zero_retention\n"
    run = scripted(source + "def test_it(meter): pass\n")
    run.assert_outcomes(**outcome)
    assert run.region["verdict"] == "ok"


def test_known_breach_is_no_broken_limit_in_any_report(scripted, job_summary, pytester):
    """A breach that xfail expects is no broken limit in any report."""
    source = """
        import pytest

        pytestmark = pytest.mark.zero_retention

        @pytest.mark.xfail(reason="issue 5")
        def test_known(meter): meter.allocate(7)

        def test_kept(meter): pass
        """
    run = scripted(source, "--cka-memory-report", "--cka-memory-html=r.html")
    run.assert_outcomes(passed=1, xfailed=1)
    run.result.stdout.fnmatch_lines(["  test_known *known (xfail)", "known (xfail) *::test_known"])
    summary = job_summary.read_text("utf-8")
    assert "1 of 2 regions kept every limit, 1 known (xfail)" in summary.splitlines()[0]
    assert "| known (xfail) | `test_it.py::test_known` |" in summary
    page = (pytester.path / "r.html").read_text("utf-8")
    assert "<span class='verdict known-xfail'>known (xfail)</span>" in page
    assert "broke a limit" not in summary + page
    assert "BREACH" not in run.text + summary
    assert "::error" not in run.text


def test_skipped_tests_are_not_judged(scripted):
    """A test that is skipped in any way is not judged."""
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
    run.assert_outcomes(skipped=4, xfailed=1)
    assert run.region["nodeid"].endswith("test_inside")
    assert run.region["completed"] is False
    assert run.region["breaches"] == []
    run.result.stdout.fnmatch_lines(["not judged *test_inside*skipped"])
    assert "not measured: Function items" not in run.text


def test_failing_test_is_reported_as_not_judged(scripted):
    """The traceback of a failing test holds its tensors, so limits are not judged."""
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
    run.assert_outcomes(failed=2)
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


def test_breach_is_a_failure_in_junit_xml(scripted, pytester):
    """In JUnit XML a broken limit is counted as a failure and not as an error."""
    run = scripted(
        "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter):\n" + ALLOCATE_TWO_MB,
        "--junitxml=j.xml",
    )
    run.assert_outcomes(failed=1)
    xml = (pytester.path / "j.xml").read_text("utf-8")
    assert 'failures="1"' in xml
    assert 'errors="0"' in xml
    assert "zero_retention broken: retained 2,097,152 bytes" in xml
