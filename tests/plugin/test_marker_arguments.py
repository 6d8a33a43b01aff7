"""Wrong marker arguments are refused before any test runs; the error names the test."""

import pytest

WRONG = {
    "max_retained_mb(-1)": "a memory size cannot be -1",
    "max_retained_mb(float('nan'))": "a memory size cannot be nan",
    "max_peak_mb(float('inf'))": "a memory size cannot be inf",
    "max_retained_mb('2KBanana')": "cannot read '2KBanana' as a memory size; write e.g.",
    "max_retained_mb('512')": "cannot read '512' as a memory size",
    "max_retained_mb('')": "cannot read '' as a memory size",
    "max_peak_mb(True)": "cannot read True as a memory size",
    "max_peak_mb(None)": "cannot read None as a memory size",
    "max_peak_mb([1])": "cannot read [1] as a memory size",
    "max_peak_mb(1, 2)": "write e.g. @pytest.mark.max_peak_mb(512)",
    "max_peak_mb()": "write e.g. @pytest.mark.max_peak_mb(512)",
    "max_retained_mb": "write e.g. @pytest.mark.max_retained_mb(1)",
    "max_reserved_mb(mb=1)": "max_reserved_mb(mb=1): wrong arguments",
    "max_reserved_mb(1e308)": "max_reserved_mb(1e+308)",
    "max_reserved_mb(10**400)": "max_reserved_mb(1000",
    "zero_retention(0)": "zero_retention(0): wrong arguments",
    "zero_retention(strict=True)": "zero_retention(strict=True): wrong arguments",
    "flat_per_batch(-1)": "a memory size cannot be -1",
    "flat_per_batch(tolerance_mb='x')": "cannot read 'x' as a memory size",
    "flat_per_batch(warmup=-1)": "warmup=-1 is not a whole number of at least 0; write a number",
    "flat_per_batch(warmup=1.5)": "warmup=1.5 is not a whole number",
    "flat_per_batch(warmup=True)": "warmup=True is not a whole number",
    "flat_per_batch(0, 1, 2)": "flat_per_batch(0, 1, 2): wrong arguments",
    "flat_per_batch(tolerance=1)": "flat_per_batch(tolerance=1): wrong arguments",
    "zero_retention\n@pytest.mark.allow_no_allocations(False)": (
        "allow_no_allocations(False): this marker takes no arguments; write @pytest.mark.allow_no"
    ),
}
ONE_TEST_PER_WRONG_MARKER = "import pytest\n" + "".join(
    f"\n@pytest.mark.{marker}\ndef test_{number}(): pass\n" for number, marker in enumerate(WRONG)
)


def test_every_wrong_argument_is_refused_and_names_its_test(scripted):
    """Wrong markers end the session before the first test, with one line for each."""
    run = scripted(ONE_TEST_PER_WRONG_MARKER)
    run.assert_refused()
    lines = [
        line for line in [*run.result.outlines, *run.result.errlines] if line.startswith("ERROR: ")
    ]
    for number, (marker, message) in enumerate(WRONG.items()):
        (line,) = [line for line in lines if f"test_it.py::test_{number}: " in line]
        assert message in line, marker
    assert len(lines) == len(WRONG)


def test_valid_arguments_are_accepted(scripted):
    """A size in a marker is a number of MB, or text with a unit."""
    valid = (
        "max_retained_mb(1)",
        "max_retained_mb(0.0)",
        "max_retained_mb('512 KiB')",
        "max_retained_mb(limit='1.5 mb')",
        "max_peak_mb('1GB')",
        "max_reserved_mb(1e3)",
        "zero_retention",
        "zero_retention()",
    )
    run = scripted(
        "import pytest\n"
        + "".join(f"\n@pytest.mark.{m}\ndef test_{n}(): pass\n" for n, m in enumerate(valid))
    )
    run.assert_outcomes(passed=len(valid))


@pytest.mark.parametrize(
    "place",
    [
        "pytestmark = pytest.mark.max_peak_mb(-1)\ndef test_it(): pass",
        "@pytest.mark.max_peak_mb(-1)\nclass Test:\n  def test_it(self): pass",
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.max_peak_mb(-1))])\n"
        "def test_it(x): pass",
        "@pytest.mark.skip\n@pytest.mark.max_peak_mb(-1)\ndef test_it(): pass",
        "@pytest.mark.xfail\n@pytest.mark.max_peak_mb(-1)\ndef test_it(): pass",
    ],
    ids=["module", "class", "param", "skipped", "xfail"],
)
def test_wrong_marker_is_refused_wherever_it_is_written(scripted, place):
    """A wrong marker is refused also on a test that is skipped or expected to fail."""
    scripted(f"import pytest\n{place}").assert_refused(
        "test_it", "max_peak_mb(-1): a memory size cannot"
    )


def test_wrong_marker_of_a_deselected_test_is_ignored(scripted):
    """Markers of tests that do not run are not checked; pytest treats fixtures the same way."""
    source = "import pytest\n@pytest.mark.max_peak_mb(-1)\ndef test_a(): pass\ndef test_b(): pass\n"
    scripted(source, "-k", "test_b").assert_outcomes(passed=1, deselected=1)


def test_collect_only_lists_tests_with_wrong_markers(scripted):
    """With --collect-only, tests with wrong markers are listed and nothing is refused."""
    run = scripted(ONE_TEST_PER_WRONG_MARKER, "--collect-only", "-q")
    assert run.result.ret == pytest.ExitCode.OK
    assert f"{len(WRONG)} tests collected" in run.text
    assert run.report is None


def test_wrong_marker_in_a_worker_is_an_error_of_its_test(scripted):
    """A worker cannot refuse to start: each test with a wrong marker is an error, others run."""
    pytest.importorskip("xdist")
    xfail = "\n@pytest.mark.xfail\n@pytest.mark.max_peak_mb(-7)\ndef test_xfail(): pass\n"
    skip = "\n@pytest.mark.skip\n@pytest.mark.max_peak_mb(-8)\ndef test_skip(): pass\n"
    run = scripted(
        ONE_TEST_PER_WRONG_MARKER + xfail + skip + "\ndef test_right(): pass\n",
        "-n1",
        forked=True,
    )
    run.assert_outcomes(passed=1, errors=len(WRONG) + 2)
    for number, message in enumerate(WRONG.values()):
        run.result.stdout.fnmatch_lines_random([f"test_it.py::test_{number}: *"])
        assert message in run.text
    assert "Traceback" not in run.text
