"""``--cka-memory-baseline`` and related options: the file is written, checked or refused."""

import json

import pytest

FILE = "cka-memory-baseline.json"
UPDATE = "--cka-memory-update-baseline"
GATE = f"--cka-memory-baseline={FILE}"
TEST = """
import pytest

@pytest.mark.memory_baseline{arguments}
def test_it(cka_memory, meter):
    with cka_memory.measure("part") as region:
        {action}
"""


def _test(peak=0, arguments="", action="meter.free(meter.allocate({}))"):
    """Return a marked test whose region has this peak."""
    return TEST.format(arguments=arguments, action=action.format(peak))


@pytest.fixture
def file(pytester):
    """Path of the baseline file with the default name."""
    return pytester.path / FILE


def _regions(file):
    return json.loads(file.read_text("utf-8"))[1:]


def test_update_writes_one_line_per_region(scripted, file):
    """The file is in the root of the tests; the summary counts its regions."""
    run = scripted(_test(1000), UPDATE)
    run.assert_outcomes(passed=1)
    torch = json.dumps(".".join(run.report["session"]["torch"].split(".")[:2]))
    assert file.read_text("utf-8") == (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n'
        ', {"nodeid": "test_it.py::test_it", "label": "part", "device": "cpu", '
        f'"meter": "scripted figures", "torch": {torch}, "cuda": null, '
        '"peak_increase_bytes": 1000, "retained_bytes": 0, "growth_bytes_per_batch": null, '
        '"reserved_increase_bytes": null}\n'
        "]\n"
    )
    assert f"baseline: 1 region added, 0 changed, 0 unchanged in {file}" in run.text


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
    """The default is 5 % of 1000 bytes; every figure in the file is checked."""
    action = ACTIONS[figure]
    scripted_reserve(_test(1000, action=action), UPDATE).assert_outcomes(passed=1)
    scripted_reserve(_test(1000, action=action)).assert_outcomes(passed=1)
    scripted_reserve(_test(size, action=action)).assert_outcomes(**{outcome: 1})


def test_breach_names_the_figure_and_the_baseline(scripted):
    """The failure of the test and the report say the same."""
    scripted(_test(1000), UPDATE)
    run = scripted(_test(1060), GATE)
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
def test_closest_tolerance_applies(scripted, pytester, file, arguments, options, ini, allowed):
    """Marker, command line, ini file, 5 %: a share, a size, or both."""
    pytester.makeini(f"[pytest]\ncka_memory_tolerance = {ini}")
    scripted(_test(1000), UPDATE)
    scripted(_test(allowed, arguments), *options).assert_outcomes(passed=1)
    scripted(_test(allowed + 1, arguments), *options).assert_outcomes(failed=1)


def test_closest_marker_applies(scripted):
    """A function's marker overrides its class's, as for every limit."""
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
    """It is checked against the file of the default name; other tests are not checked."""
    scripted(BOTH.format(10), UPDATE).assert_outcomes(passed=3)
    scripted(BOTH.format(20)).assert_outcomes(passed=2, failed=1)


def test_option_checks_every_measured_test(scripted):
    """It need not have the marker."""
    scripted(BOTH.format(10), UPDATE)
    run = scripted(BOTH.format(20), GATE)
    run.assert_outcomes(passed=1, failed=2)
    assert run.region_of("test_fixture")["limits"] == ["--cka-memory-baseline"]


def test_option_measures_every_test_in_the_file(scripted, file):
    """Checking a file that --cka-memory-report helped to write does not need that option."""
    scripted(BOTH.format(10), UPDATE, "--cka-memory-report")
    assert len(_regions(file)) == 3
    scripted(BOTH.format(20), GATE).assert_outcomes(failed=3)
    scripted(BOTH.format(20), UPDATE).assert_outcomes(passed=3)
    assert {region["retained_bytes"] for region in _regions(file)} == {20}


def test_ini_keys_have_the_effect_of_the_options(scripted, pytester):
    """Paths in the ini file are relative to the root."""
    pytester.makeini(
        "[pytest]\ncka_memory_baseline = kept/b.json\ncka_memory_require_baseline = true\n"
    )
    scripted(BOTH.format(10), UPDATE).assert_outcomes(passed=3)
    assert len(_regions(pytester.path / "kept" / "b.json")) == 2
    scripted(BOTH.format(20)).assert_outcomes(passed=1, failed=2)
    renamed = BOTH.format(10).replace("test_marked", "test_new")
    scripted(renamed).assert_outcomes(passed=2, failed=1)


OTHER_DEVICE = """
METER.device, METER.device_name, METER.name = "cuda:0", "NVIDIA H200", "another"
"""


def test_region_on_another_device_is_not_judged(scripted, extend_conftest):
    """The report says so, and how to write a baseline."""
    scripted(_test(10), UPDATE)
    extend_conftest(OTHER_DEVICE)
    run = scripted(_test(10**6))
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "not judged"
    (line,) = [line for line in run.result.outlines if line.startswith("not judged")]
    assert "memory_baseline, no baseline for this device (NVIDIA H200, another, torch" in line
    assert line.endswith("; write one with --cka-memory-update-baseline (regions: 1)")


def test_new_region_is_not_judged(scripted):
    """The device has a baseline for other regions."""
    scripted(_test(10), UPDATE)
    run = scripted(_test(10).replace("part", "new"))
    run.assert_outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this region; write one with" in run.text


def test_marked_test_without_a_file_is_not_judged(scripted):
    """The first run of a project passes, and the report says that nothing was judged."""
    run = scripted(_test(10))
    run.assert_outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this device (cpu, scripted" in run.text


def test_required_baseline_that_is_missing_fails_the_test(scripted, pytester):
    """The option fails tests without a baseline for their device or region."""
    required = "--cka-memory-require-baseline"
    scripted(_test(10), required).assert_outcomes(failed=1)
    scripted(_test(10), UPDATE, required).assert_outcomes(passed=1)
    scripted(_test(10), required).assert_outcomes(passed=1)
    run = scripted(_test(10).replace("part", "new"), required)
    run.assert_outcomes(failed=1)
    assert "memory_baseline broken: cannot be judged although --cka-memory-require-base" in run.text


def test_update_keeps_the_lines_of_other_devices(scripted, extend_conftest, file):
    """An update on one machine does not change figures of the other."""
    scripted(_test(10), UPDATE)
    before = _regions(file)
    extend_conftest(OTHER_DEVICE)
    scripted(_test(20), UPDATE).assert_outcomes(passed=1)
    after = _regions(file)
    assert [region for region in after if region["device"] == "cpu"] == before
    assert [r["peak_increase_bytes"] for r in after if r["device"] == "NVIDIA H200"] == [20]


MANY = """
import pytest
pytestmark = pytest.mark.memory_baseline
def test_passes(meter): meter.allocate({0})
def test_fails(meter): meter.allocate({0}); assert {0} == 10
def test_is_skipped(meter): meter.allocate({0}); {0} == 10 or pytest.skip()
def test_in_error(meter, request):
    meter.allocate({0})
    request.addfinalizer(lambda: 10 // ({0} == 10))
@pytest.mark.xfail
def test_is_expected_to_fail(meter): meter.allocate({0}); assert {0} == 10
@pytest.mark.zero_retention
def test_breaks_another_limit(meter): {0} == 10 or meter.allocate({0})
def test_is_left_out(meter): meter.allocate({0})
"""


def test_update_only_writes_tests_that_passed(scripted, file):
    """All other tests keep their lines."""
    scripted(MANY.format(10), UPDATE).assert_outcomes(passed=6, xpassed=1)
    before = {region["nodeid"][17:]: region for region in _regions(file)}
    assert "is_expected_to_fail" not in before  # it did not pass as a test should
    run = scripted(MANY.format(11), UPDATE, "-k", "not left_out")
    run.assert_outcomes(passed=2, failed=2, skipped=1, errors=1, xfailed=1, deselected=1)
    changed = {region["nodeid"][17:] for region in _regions(file)} - before.keys()
    changed |= {r["nodeid"][17:] for r in _regions(file) if before[r["nodeid"][17:]] != r}
    assert changed == {"passes"}
    assert "baseline: 0 regions added, 1 changed, 0 unchanged in" in run.text


def test_update_does_not_check_the_old_baseline(scripted, file):
    """Otherwise an intended change could not be written."""
    scripted(_test(10), UPDATE)
    scripted(_test(10**6), UPDATE, GATE).assert_outcomes(passed=1)
    assert _regions(file)[0]["peak_increase_bytes"] == 10**6


def test_update_without_changes_does_not_write_the_file(scripted, file):
    """The file keeps its bytes, even if its layout is not the plugin's."""
    scripted(_test(10), UPDATE)
    laid_out = json.dumps(json.loads(file.read_text()), indent=2)
    file.write_text(laid_out)
    run = scripted(_test(10), UPDATE)
    assert "0 regions added, 0 changed, 1 unchanged" in run.text
    assert file.read_text() == laid_out


def test_update_that_measured_nothing_writes_nothing(scripted, file):
    """The summary says so."""
    run = scripted("def test_plain(): pass", UPDATE)
    run.assert_outcomes(passed=1)
    assert "baseline: not written, because no measured test passed" in run.text
    assert not file.exists()


def test_collect_only_writes_nothing(scripted, file):
    """--collect-only measures nothing."""
    assert scripted(_test(10), UPDATE, "--collect-only").result.ret == pytest.ExitCode.OK
    assert not file.exists()


def test_regions_of_the_same_label_are_numbered(scripted, file):
    """They have the same numbers as in the report."""
    source = _test(10) + '    with cka_memory.measure("part"): meter.allocate(7)\n'
    scripted(source, UPDATE)
    assert [(r["label"], r["retained_bytes"]) for r in _regions(file)] == [
        ("part", 0),
        ("part #2", 7),
    ]
    scripted(source.replace("allocate(7)", "allocate(8)")).assert_outcomes(failed=1)


@pytest.mark.parametrize("options", [["-n2"], ["-n2", "--dist=each"]], ids=["load", "each"])
def test_workers_write_the_same_file_as_a_serial_run(scripted, file, options):
    """The controller writes it from the workers' reports; workers check their tests against it."""
    pytest.importorskip("xdist")
    many = "import pytest\npytestmark = pytest.mark.memory_baseline\n" + "".join(
        f"def test_{n}(meter): meter.allocate({n}{{0}})\n" for n in range(1, 6)
    )
    scripted(many.format(0), UPDATE)
    serial = file.read_bytes()
    file.unlink()
    scripted(many.format(0), UPDATE, *options)
    assert file.read_bytes() == serial
    run = scripted(many.format(5), *options)
    assert {region["verdict"] for region in run.regions} == {"BREACH"}
    assert len({region["nodeid"] for region in run.regions}) == 5


def test_update_writes_the_last_run_of_a_rerun_test(scripted, file):
    """The last run passed."""
    pytest.importorskip("pytest_rerunfailures")
    source = """
        import pytest
        RUNS = []
        @pytest.mark.memory_baseline
        def test_it(meter):
            RUNS.append(1)
            meter.allocate(10 // len(RUNS))
            assert len(RUNS) == 2
        """
    scripted(source, UPDATE, "--reruns=1", subprocess=True)
    assert [region["retained_bytes"] for region in _regions(file)] == [5]


BROKEN = {
    "corrupt": ("[ {", "line 1: not valid JSON: "),
    "empty": ("", "line 1: not a baseline file"),
    "newer": ('[ {"schema": "pytest-cka-memory-baseline/9"}\n]', "line 1: schema pytest-cka-mem"),
    "a report": ('{\n "schema": "pytest-cka-memory/1"\n}', "line 1: not a baseline file"),
    "merge": (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n<<<<<<< HEAD\n]',
        "line 2: an unresolved merge conflict ('<<<<<<< HEAD')",
    ),
}


@pytest.mark.parametrize("options", [[], [GATE], [UPDATE], ["-n2", UPDATE]], ids=" ".join)
@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_unusable_file_ends_the_session_before_any_test(scripted, file, content, message, options):
    """The error names file and line; an update does not overwrite the file either."""
    file.write_text(content)
    run = scripted(_test(10), *options)
    run.assert_refused("--cka-memory-baseline: cannot use", f"{FILE}, {message}")
    assert file.read_text() == content


def test_file_that_becomes_unusable_during_the_run_is_not_overwritten(scripted, file):
    """The file is read again before it is replaced; the session fails."""
    scripted(_test(10), UPDATE)
    breaks = _test(20, action=f"open({str(file)!r}, 'a').write('x'); meter.allocate({{}})")
    run = scripted(breaks, UPDATE)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED: cannot use {file}, line 4: text after the last ']'" in run.text
    assert file.read_text().endswith("]\nx")


def test_named_file_must_exist_unless_it_is_updated(scripted):
    """With a wrong path, nothing would be judged; an update creates the file."""
    scripted(_test(10), "--cka-memory-baseline=no.json").assert_refused(
        "--cka-memory-baseline: ",
        "no.json does not exist; write one with --cka-memory-update-baseline",
    )
    scripted(_test(10), "--cka-memory-baseline=new/no.json", UPDATE).assert_outcomes(passed=1)
    scripted(_test(10), "--cka-memory-baseline=new/no.json").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            _test(1, "(5)"),
            [],
            "memory_baseline(5): cannot read 5 as a tolerance; write '5%'",
        ),
        (_test(1, "('5')"), [UPDATE], "memory_baseline('5'): cannot read '5' as a tolerance"),
        (
            _test(1, "('5%', 1)"),
            [],
            "memory_baseline('5%', 1): wrong arguments; write e.g.",
        ),
        (
            _test(1),
            ["--cka-memory-tolerance=5"],
            "--cka-memory-tolerance: cannot read '5'",
        ),
    ],
    ids=["number", "number as text", "two", "option"],
)
def test_invalid_tolerance_is_refused(scripted, source, options, message):
    """The session ends before any test; the error says what to write."""
    scripted(source, *options).assert_refused(message)


def test_breach_counts_as_an_expected_failure(scripted):
    """The xfail marker accepts it like any other failure."""
    source = _test("{0}").replace("@pytest.mark", "@pytest.mark.{1}\n@pytest.mark", 1)
    scripted(source.format(10, "filterwarnings"), UPDATE)
    scripted(source.format(99, "xfail")).assert_outcomes(xfailed=1)


def test_a_breach_is_a_failure_in_junit_xml(scripted, pytester):
    """Its message is the one in the terminal."""
    scripted(_test(1000), UPDATE)
    scripted(_test(1060), "--junitxml=j.xml").assert_outcomes(failed=1)
    written = (pytester.path / "j.xml").read_text("utf-8")
    assert "memory_baseline broken: peak increase 1,060 bytes, allowed 1,050 bytes" in written


TWO = """
import pytest
def test_stays(cka_memory, meter):
    with cka_memory.measure("stays"): pass
    with cka_memory.measure("goes"): pass
def test_goes(cka_memory): pass
"""
ONE = TWO.split('    with cka_memory.measure("goes")')[0]


@pytest.fixture
def written(scripted, pytester, file):
    """A baseline with three regions of one test file, and one of a file that was deleted."""
    pytester.makepyfile(test_other="def test_other(cka_memory): pass")
    scripted(TWO, UPDATE, "test_it.py", "test_other.py")
    (pytester.path / "test_other.py").unlink()
    assert len(_regions(file)) == 4


def _gone(run):
    """Return the lines that the summary lists as gone."""
    found = run.text.partition(" no longer exist; delete their lines:\n")[2]
    return [line[2:] for line in found.splitlines() if line.startswith("  test_")]


@pytest.mark.usefixtures("written")
def test_lines_without_a_test_are_listed(scripted, worker):
    """A region, a test and a test file were deleted."""
    run = scripted(ONE, GATE, *worker)
    run.assert_outcomes(passed=1)
    assert _gone(run) == [
        "test_it.py::test_goes",
        "test_it.py::test_stays goes",
        "test_other.py::test_other",
    ]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    "options",
    [["-k", "stays"], ["test_it.py::test_stays"], ["--deselect", "test_it.py::test_goes"]],
)
def test_lines_of_deselected_tests_are_not_listed_as_gone(scripted, options, worker):
    """Only a missing region of a test that ran and a missing file are listed."""
    run = scripted(ONE + "\ndef test_goes(cka_memory): pass", GATE, *options, *worker)
    assert _gone(run) == ["test_it.py::test_stays goes", "test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_regions_of_a_failed_test_are_not_listed_as_gone(scripted):
    """It may have failed before it reached them."""
    run = scripted(ONE + "    assert False\ndef test_goes(cka_memory): pass", GATE)
    run.assert_outcomes(passed=1, failed=1)
    assert _gone(run) == ["test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_update_drops_missing_regions_of_tests_that_ran(scripted, file):
    """Missing tests are only listed because another branch may still have them."""
    run = scripted(ONE, UPDATE)
    assert "baseline: 0 regions added, 0 changed, 1 unchanged, 1 dropped in" in run.text
    assert _gone(run) == ["test_it.py::test_goes", "test_other.py::test_other"]
    assert len(_regions(file)) == 3


@pytest.mark.usefixtures("written")
def test_lines_of_another_device_are_not_listed_as_gone(scripted, extend_conftest):
    """Another device may run other tests."""
    extend_conftest(OTHER_DEVICE)
    assert _gone(scripted(ONE, GATE)) == []


def test_header_says_whether_the_file_is_checked_or_written(scripted, file):
    """Without either option there is no header."""
    assert f"cka-memory: writing {file}" in scripted(_test(10), UPDATE).text
    assert f"cka-memory: compared with {file}" in scripted(_test(10), GATE).text
    assert "cka-memory: " not in scripted(_test(10), writes_json=False).text
