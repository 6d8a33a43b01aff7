"""``--cka-memory-baseline`` and related options: figures are checked, unusable files refused."""

import pytest
from baseline_sessions import FILE, GATE, OTHER_DEVICE, UPDATE, baseline_test, regions_in

BATCHES = "[({}, region.batch_done(8)) for _ in range(5)]"


ACTIONS = {
    "peak": "meter.free(meter.allocate({}))",
    "retained": "meter.allocate({}); meter.allocate(0)",
    "growth": BATCHES.format("meter.allocate({})"),
    "reserved": "meter.free(meter.allocate({}))",
}


@pytest.mark.parametrize("figure", ACTIONS)
@pytest.mark.parametrize(
    ("size", "outcome"), [(1050, "passed"), (1051, "failed")], ids=["equal", "one-byte-above"]
)
def test_figure_may_rise_by_the_tolerance_and_no_more(scripted_reserve, figure, size, outcome):
    """A figure may rise by the default tolerance, 5 % of 1000
    bytes; all in the file are checked.
    """
    action = ACTIONS[figure]
    scripted_reserve(baseline_test(1000, action=action), UPDATE).assert_outcomes(passed=1)
    scripted_reserve(baseline_test(1000, action=action)).assert_outcomes(passed=1)
    scripted_reserve(baseline_test(size, action=action)).assert_outcomes(**{outcome: 1})


def test_breach_names_the_figure_and_the_baseline(scripted):
    """A broken baseline has the same figures in the failure of the test and in the report."""
    scripted(baseline_test(1000), UPDATE)
    run = scripted(baseline_test(1060), GATE)
    run.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        [
            "memory_baseline broken: peak increase 1,060 bytes, allowed 1,050 bytes (5% above the "
            "baseline's",
            "1,000 bytes): 10 bytes too much",
            "  in region 'part', measured on cpu (scripted figures)",
        ]
    )
    (breach,) = run.region["breaches"]
    assert breach["limit"] == "memory_baseline"
    assert (breach["measured_bytes"], breach["allowed_bytes"]) == (1060, 1050)


@pytest.mark.parametrize(
    ("arguments", "options", "ini", "allowed"),
    [
        ("", [], "", 1050),
        ("", [], "20%", 1200),
        ("", ["--cka-memory-tolerance=10%"], "20%", 1100),
        ('("64 B")', ["--cka-memory-tolerance=10%"], "20%", 1064),
        ('(tolerance="1% + 3 B")', [], "20%", 1013),
        ('(tolerance="0%")', [], "", 1000),
    ],
    ids=["default", "ini", "option", "marker", "by name", "zero"],
)
def test_closest_tolerance_applies(
    scripted, pytester, baseline_path, arguments, options, ini, allowed
):
    """Of marker, command line, ini file and the default of 5 %, the closest tolerance applies."""
    pytester.makeini(f"[pytest]\ncka_memory_tolerance = {ini}")
    scripted(baseline_test(1000), UPDATE)
    scripted(baseline_test(allowed, arguments), *options).assert_outcomes(passed=1)
    scripted(baseline_test(allowed + 1, arguments), *options).assert_outcomes(failed=1)


def test_closest_marker_applies(scripted):
    """A function's baseline marker overrides its class's, as for every limit."""
    source = """
        import pytest
        @pytest.mark.memory_baseline("0%")
        class Test:
            def test_class(self, meter): meter.allocate({0})
            @pytest.mark.memory_baseline("9%")
            def test_function(self, meter): meter.allocate({0})
        """
    scripted(source.format(100), UPDATE)
    run = scripted(source.format(109))
    run.assert_outcomes(passed=1, failed=1)
    assert run.region_of("test_class")["verdict"] == "BREACH"


BOTH = """
import pytest
@pytest.mark.memory_baseline
def test_marked(meter): meter.allocate({0})
def test_fixture(cka_memory, meter): meter.allocate({0})
def test_plain(meter): meter.allocate({0})
"""


def test_marker_without_options_checks_its_own_test(scripted):
    """A marker alone checks its own test against the file of the default name, and no other."""
    scripted(BOTH.format(10), UPDATE).assert_outcomes(passed=3)
    scripted(BOTH.format(20)).assert_outcomes(passed=2, failed=1)


def test_option_checks_every_measured_test(scripted):
    """The option checks every measured test, also those without the marker."""
    scripted(BOTH.format(10), UPDATE)
    run = scripted(BOTH.format(20), GATE)
    run.assert_outcomes(passed=1, failed=2)
    assert run.region_of("test_fixture")["limits"] == ["--cka-memory-baseline"]


def test_option_measures_every_test_in_the_file(scripted, baseline_path):
    """The option measures all tests in the file, also if --cka-memory-report is not given."""
    scripted(BOTH.format(10), UPDATE, "--cka-memory-report")
    assert len(regions_in(baseline_path)) == 3
    scripted(BOTH.format(20), GATE).assert_outcomes(failed=3)
    scripted(BOTH.format(20), UPDATE).assert_outcomes(passed=3)
    assert {region["retained_bytes"] for region in regions_in(baseline_path)} == {20}


def test_ini_keys_have_the_effect_of_the_options(scripted, pytester):
    """Keys in the ini file have the effect of options; their paths are relative to the root."""
    pytester.makeini(
        "[pytest]\ncka_memory_baseline = kept/b.json\ncka_memory_require_baseline = true\n"
    )
    scripted(BOTH.format(10), UPDATE).assert_outcomes(passed=3)
    assert len(regions_in(pytester.path / "kept" / "b.json")) == 2
    scripted(BOTH.format(20)).assert_outcomes(passed=1, failed=2)
    renamed = BOTH.format(10).replace("test_marked", "test_new")
    scripted(renamed).assert_outcomes(passed=2, failed=1)


def test_region_on_another_device_is_not_judged(scripted, extend_conftest):
    """A region whose baseline is of another device is not judged; the report says what to do."""
    scripted(baseline_test(10), UPDATE)
    extend_conftest(OTHER_DEVICE)
    run = scripted(baseline_test(10**6))
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "not judged"
    lines = run.result.outlines
    (start,) = [n for n, line in enumerate(lines) if line.startswith("not judged")]
    sentence = f"{lines[start]} {lines[start + 1].strip()}"
    assert "memory_baseline, no baseline for this device (NVIDIA H200, another, torch" in sentence
    assert sentence.endswith("; write one with --cka-memory-update-baseline (regions: 1)")


def test_new_region_is_not_judged(scripted):
    """A new region is not judged, although the device has a baseline for other regions."""
    scripted(baseline_test(10), UPDATE)
    run = scripted(baseline_test(10).replace("part", "new"))
    run.assert_outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this region; write one with" in run.text


def test_marked_test_without_a_file_is_not_judged(scripted):
    """Without a file the first run of a project passes, and the report says why."""
    run = scripted(baseline_test(10))
    run.assert_outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this device (cpu, scripted" in run.text


def test_required_baseline_that_is_missing_fails_the_test(scripted, pytester):
    """If an option requires baselines, a test without one for its device or region fails."""
    required = "--cka-memory-require-baseline"
    scripted(baseline_test(10), UPDATE, required).assert_outcomes(passed=1)
    scripted(baseline_test(10), required).assert_outcomes(passed=1)
    run = scripted(baseline_test(10).replace("part", "new"), required)
    run.assert_outcomes(failed=1)
    assert "memory_baseline broken: no baseline for this region" in run.text


BROKEN = {
    "corrupt": ("[ {", "line 1: not valid JSON: "),
    "empty": ("", "line 1: the file is not a baseline file"),
    "newer": ('[ {"schema": "pytest-cka-memory-baseline/9"}\n]', "line 1: its schema is pytest-"),
    "a report": (
        '{\n "schema": "pytest-cka-memory/1"\n}',
        "line 1: the file is not a baseline file",
    ),
    "merge": (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n<<<<<<< HEAD\n]',
        "line 2: the file has an unresolved merge conflict ('<<<<<<< HEAD')",
    ),
}


@pytest.mark.parametrize("options", [[], [GATE], [UPDATE], ["-n2", UPDATE]], ids=" ".join)
@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_unusable_file_ends_the_session_before_any_test(
    scripted, baseline_path, content, message, options
):
    """A file with an error ends the session early, by file and line; updates keep it as it is."""
    baseline_path.write_text(content)
    run = scripted(baseline_test(10), *options)
    run.assert_refused("--cka-memory-baseline: cannot use", f"{FILE}, {message}")
    assert baseline_path.read_text() == content


def test_file_that_becomes_unusable_during_the_run_is_not_overwritten(scripted, baseline_path):
    """A file is read again before it is replaced; if it became unusable, the session fails."""
    scripted(baseline_test(10), UPDATE)
    breaks = baseline_test(
        20, action=f"open({str(baseline_path)!r}, 'a').write('x'); meter.allocate({{}})"
    )
    run = scripted(breaks, UPDATE)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED: cannot use {baseline_path}, line 4: text after the last ']'" in run.text
    assert baseline_path.read_text().endswith("]\nx")


def test_named_file_must_exist_unless_it_is_updated(scripted):
    """A baseline's file must exist, or nothing would be judged; an update creates it."""
    scripted(baseline_test(10), "--cka-memory-baseline=no.json").assert_refused(
        "--cka-memory-baseline: ",
        "no.json does not exist; write one with --cka-memory-update-baseline",
    )
    scripted(baseline_test(10), "--cka-memory-baseline=new/no.json", UPDATE).assert_outcomes(
        passed=1
    )
    scripted(baseline_test(10), "--cka-memory-baseline=new/no.json").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            baseline_test(1, "(5)"),
            [],
            "memory_baseline(5): cannot read 5 as a tolerance; write '5%'",
        ),
        (
            baseline_test(1, "('5')"),
            [UPDATE],
            "memory_baseline('5'): cannot read '5' as a tolerance",
        ),
        (
            baseline_test(1, "('5%', 1)"),
            [],
            "memory_baseline('5%', 1): wrong arguments; write e.g.",
        ),
        (
            baseline_test(1),
            ["--cka-memory-tolerance=5"],
            "--cka-memory-tolerance: cannot read '5'",
        ),
    ],
    ids=["number", "number as text", "two", "option"],
)
def test_invalid_tolerance_is_refused(scripted, source, options, message):
    """An invalid tolerance ends the session before any test, and the error says what to write."""
    scripted(source, *options).assert_refused(message)


def test_breach_counts_as_an_expected_failure(scripted):
    """An xfail marker accepts a breach of a baseline like any other failure."""
    source = baseline_test("{0}").replace("@pytest.mark", "@pytest.mark.{1}\n@pytest.mark", 1)
    scripted(source.format(10, "filterwarnings"), UPDATE)
    scripted(source.format(99, "xfail")).assert_outcomes(xfailed=1)


def test_a_breach_is_a_failure_in_junit_xml(scripted, pytester):
    """In JUnit XML a breach of a baseline has the message of the terminal."""
    scripted(baseline_test(1000), UPDATE)
    scripted(baseline_test(1060), "--junitxml=j.xml").assert_outcomes(failed=1)
    written = (pytester.path / "j.xml").read_text("utf-8")
    assert "memory_baseline broken: peak increase 1,060 bytes, allowed 1,050 bytes" in written


def test_header_says_whether_the_file_is_checked_or_written(scripted, baseline_path):
    """The header says whether a baseline is checked or written, if an option asks for either."""
    assert f"cka-memory: writing {baseline_path}" in scripted(baseline_test(10), UPDATE).text
    assert f"cka-memory: compared with {baseline_path}" in scripted(baseline_test(10), GATE).text
    assert "cka-memory: " not in scripted(baseline_test(10), writes_json=False).text


@pytest.mark.parametrize("named", [(), ("--cka-memory-baseline=other.json",)])
def test_required_baseline_without_a_file_is_a_usage_error(scripted, named):
    """If baselines are required and there is no file, the session ends with a usage error."""
    run = scripted("def test_it(): pass", "--cka-memory-require-baseline", *named)
    run.assert_refused("--cka-memory-require-baseline: there is no baseline file", "write it with")
