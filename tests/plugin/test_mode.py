"""Limits that only warn: ``warn=True`` on a marker, and ``--cka-memory-mode=warn``."""

import pytest

RETAINS = """
import pytest

@pytest.mark.{marker}
def test_it(meter):
    meter.allocate({size})
"""


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("zero_retention(warn=True)", "zero_retention(warn=True)"),
        ("max_retained_mb(1, warn=True)", "max_retained_mb(1, warn=True)"),
        ("max_peak_mb(limit='4 B', warn=True)", "max_peak_mb('4 B', warn=True)"),
        ("flat_per_batch(warn=True)", "flat_per_batch(warn=True)"),
    ],
)
def test_broken_limit_of_a_marker_that_warns_is_a_warning_and_the_test_passes(
    scripted, worker, marker, text
):
    """The test passes; pytest's warnings and the report name the limit, serially and in workers."""
    run = scripted(RETAINS.format(marker=marker, size=2**21), "--cka-memory-report", *worker)
    run.assert_outcomes(passed=1, warnings=1)
    assert run.result.ret == 0
    assert f"LimitWarning: {text} broken: " in run.text
    assert run.region["verdict"] == "warning"
    assert [(each["limit"], each["warns"]) for each in run.region["breaches"]] == [(text, True)]
    assert "\nwarning test_it.py::test_it\n" in run.text


@pytest.mark.parametrize(
    ("mode", "outcome", "verdict"),
    [([], "failed", "BREACH"), (["fail"], "failed", "BREACH"), (["warn"], "passed", "warning")],
    ids=["default", "fail", "warn"],
)
def test_mode_decides_what_a_broken_limit_does(scripted, mode, outcome, verdict):
    """``fail`` is the default; with ``warn`` the limits of markers and options are warnings."""
    options = [f"--cka-memory-mode={name}" for name in mode]
    source = RETAINS.format(marker="zero_retention", size=4)
    run = scripted(source, "--cka-memory-max-peak-mb=0", *options)
    run.assert_outcomes(**{outcome: 1, "warnings": int(verdict == "warning")})
    assert run.region["verdict"] == verdict
    assert [each["limit"] for each in run.region["breaches"]] == [
        "zero_retention",
        "--cka-memory-max-peak-mb=0",
    ]


def test_limit_that_fails_beside_one_that_warns_fails_the_test(scripted):
    """Of two broken limits only the one that does not warn is in the failure; both are reported."""
    source = RETAINS.format(marker="zero_retention\n@pytest.mark.max_peak_mb(0, warn=True)", size=4)
    run = scripted(source, "--cka-memory-report")
    run.assert_outcomes(failed=1, warnings=1)
    assert "E   zero_retention broken" not in run.text  # no traceback, the text alone
    assert "\nzero_retention broken: retained 4 bytes" in run.text
    assert "\nmax_peak_mb(0, warn=True) broken" not in run.text
    assert run.region["verdict"] == "BREACH"
    assert "\nwarning test_it.py::test_it\n  max_peak_mb(0, warn=True)" in run.text


def test_limit_that_is_kept_does_not_warn(scripted):
    """A limit that warns and is kept is like any other that is kept."""
    source = RETAINS.format(marker="max_retained_mb(1, warn=True)", size=2**20)
    run = scripted(source, "--cka-memory-mode=warn", "-W", "error")
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "ok"


def test_warnings_can_be_turned_into_errors(scripted):
    """Filters of warnings apply: ``-W error`` fails a test whose limit warns."""
    source = RETAINS.format(marker="zero_retention(warn=True)", size=4)
    run = scripted(source, "-W", "error::pytest_cka_memory.LimitWarning")
    run.assert_outcomes(failed=1)


def test_baseline_that_warns(scripted, baseline_path):
    """``memory_baseline(warn=True)`` warns about a rise above the baseline."""
    source = RETAINS.format(marker="memory_baseline(warn=True)", size="{size}")
    scripted(source.format(size=4), "--cka-memory-update-baseline").assert_outcomes(passed=1)
    run = scripted(source.format(size=8))
    run.assert_outcomes(passed=1, warnings=1)
    assert "memory_baseline(warn=True) broken: " in run.text
    assert baseline_path.is_file()


@pytest.mark.parametrize(
    ("options", "marker", "message"),
    [
        (["--cka-memory-mode=loud"], "zero_retention", "--cka-memory-mode: cannot use 'loud'"),
        ([], "zero_retention(warn='yes')", "warn='yes' is neither True nor False"),
    ],
    ids=["option", "marker"],
)
def test_values_that_are_neither_are_usage_errors(scripted, options, marker, message):
    """A mode or argument that does not exist stops the session before any test runs."""
    run = scripted(RETAINS.format(marker=marker, size=4), *options)
    run.assert_refused(message)


def test_annotations_of_warnings_are_warnings(scripted, job_summary):
    """On GitHub a broken limit that warns is a warning, not an error."""
    source = RETAINS.format(marker="zero_retention(warn=True)", size=4)
    run = scripted(source)
    run.assert_outcomes(passed=1, warnings=1)
    assert "::warning " in run.text
    assert "::error " not in run.text
    assert "1 warning" in job_summary.read_text("utf-8")
