"""``--cka-memory-baseline`` and its kin: written, held to, refused, and never lost."""

import json

import pytest

FILE = "cka-memory-baseline.json"
UPDATE = "--cka-memory-update-baseline"
GATE = f"--cka-memory-baseline={FILE}"
TEST = """
import pytest

@pytest.mark.memory_baseline{arguments}
def test_it(cka_memory, meter):
    with cka_memory.measure("part"):
        {action}
"""


def _test(peak=0, arguments="", action="meter.free(meter.allocate({}))"):
    """A marked test whose region has this peak."""
    return TEST.format(arguments=arguments, action=action.format(peak))


@pytest.fixture
def file(pytester):
    """The baseline file of the default name."""
    return pytester.path / FILE


def _regions(file):
    return json.loads(file.read_text("utf-8"))[1:]


def test_an_update_writes_what_passed(scripted, file):
    """One line a region, to the letter, at the root of the tests; the summary says how many."""
    run = scripted(_test(1000), UPDATE)
    run.outcomes(passed=1)
    torch = json.dumps(".".join(run.report["session"]["torch"].split(".")[:2]))
    assert file.read_text("utf-8") == (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n'
        ', {"nodeid": "test_it.py::test_it", "label": "part", "device": "cpu", '
        f'"meter": "scripted figures", "torch": {torch}, "cuda": null, '
        '"peak_increase_bytes": 1000, "retained_bytes": 0, "growth_bytes_per_batch": null, '
        '"reserved_increase_bytes": null}\n'
        "]\n"
    )
    assert f"baseline: 1 regions added, 0 changed, 0 unchanged in {file}" in run.text


BATCHES = "[({}, cka_memory._open[0].batch_done(8)) for _ in range(5)]"
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
def test_a_figure_may_rise_by_the_tolerance_and_no_byte_more(
    scripted_reserve, figure, size, outcome
):
    """5% of 1000 bytes, unless told otherwise; every figure that is kept is held to."""
    action = ACTIONS[figure]
    scripted_reserve(_test(1000, action=action), UPDATE).outcomes(passed=1)
    scripted_reserve(_test(1000, action=action)).outcomes(passed=1)
    scripted_reserve(_test(size, action=action)).outcomes(**{outcome: 1})


def test_a_breach_says_what_rose_and_above_what(scripted):
    """As the failure of the test, and in the report."""
    scripted(_test(1000), UPDATE)
    run = scripted(_test(1060), GATE)
    run.outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        [
            "memory_baseline broken: peak increase 1,060 bytes, allowed 1,050 bytes (5% above the "
            "baseline's",
            "1,000 bytes): 10 bytes too much",
            "  in region 'part', on cpu by scripted figures",
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
def test_the_nearest_tolerance_counts(scripted, pytester, file, arguments, options, ini, allowed):
    """Marker over command line over ini over 5%; a share, a size, or both."""
    pytester.makeini(f"[pytest]\ncka_memory_tolerance = {ini}")
    scripted(_test(1000), UPDATE)
    scripted(_test(allowed, arguments), *options).outcomes(passed=1)
    scripted(_test(allowed + 1, arguments), *options).outcomes(failed=1)


def test_the_closest_marker_counts(scripted):
    """Function over class, as for every limit."""
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
    run.outcomes(passed=1, failed=1)
    assert run.of("test_class")["verdict"] == "BREACH"


BOTH = """
import pytest
@pytest.mark.memory_baseline
def test_marked(meter): meter.allocate({0})
def test_fixture(cka_memory, meter): meter.allocate({0})
def test_plain(meter): meter.allocate({0})
"""


def test_a_marker_alone_holds_its_own_test(scripted):
    """To the file of the default name; the others are measured or not as ever."""
    scripted(BOTH.format(10), UPDATE).outcomes(passed=3)
    scripted(BOTH.format(20)).outcomes(passed=2, failed=1)


def test_the_option_holds_every_measured_test(scripted):
    """Marked or not."""
    scripted(BOTH.format(10), UPDATE)
    run = scripted(BOTH.format(20), GATE)
    run.outcomes(passed=1, failed=2)
    assert run.of("test_fixture")["limits"] == ["--cka-memory-baseline"]


def test_what_is_in_the_file_is_measured(scripted, file):
    """So a gate needs no --cka-memory-report to hold a test to what one wrote."""
    scripted(BOTH.format(10), UPDATE, "--cka-memory-report")
    assert len(_regions(file)) == 3
    scripted(BOTH.format(20), GATE).outcomes(failed=3)
    scripted(BOTH.format(20), UPDATE).outcomes(passed=3)
    assert {region["retained_bytes"] for region in _regions(file)} == {20}


def test_ini_keys_do_what_the_options_do(scripted, pytester):
    """Paths start from the root there."""
    pytester.makeini(
        "[pytest]\ncka_memory_baseline = kept/b.json\ncka_memory_require_baseline = true\n"
    )
    scripted(BOTH.format(10), UPDATE).outcomes(passed=3)
    assert len(_regions(pytester.path / "kept" / "b.json")) == 2
    scripted(BOTH.format(20)).outcomes(passed=1, failed=2)
    renamed = BOTH.format(10).replace("test_marked", "test_new")
    scripted(renamed).outcomes(passed=2, failed=1)


OTHER_DEVICE = """
METER.device, METER.device_name, METER.name = "cuda:0", "NVIDIA H200", "another"
"""


def _on_another_device(pytester):
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text() + OTHER_DEVICE)


def test_another_device_has_no_baseline(scripted, pytester):
    """Not judged and said so, with what makes one."""
    scripted(_test(10), UPDATE)
    _on_another_device(pytester)
    run = scripted(_test(10**6))
    run.outcomes(passed=1)
    assert run.region["verdict"] == "not judged"
    (line,) = [line for line in run.result.outlines if line.startswith("not judged")]
    assert "memory_baseline, no baseline for this device (NVIDIA H200, another, torch" in line
    assert line.endswith("; write one with --cka-memory-update-baseline (regions: 1)")


def test_a_new_region_has_no_baseline(scripted):
    """On a device that has one for others."""
    scripted(_test(10), UPDATE)
    run = scripted(_test(10).replace("part", "new"))
    run.outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this region; write one with" in run.text


def test_without_any_file_a_marked_test_is_not_judged(scripted):
    """The first run of a project passes, visibly unjudged."""
    run = scripted(_test(10))
    run.outcomes(passed=1)
    assert "not judged: memory_baseline, no baseline for this device (cpu, scripted" in run.text


def test_a_baseline_can_be_required(scripted, pytester):
    """Then what has none fails, by device or by region."""
    required = "--cka-memory-require-baseline"
    scripted(_test(10), required).outcomes(failed=1)
    scripted(_test(10), UPDATE, required).outcomes(passed=1)
    scripted(_test(10), required).outcomes(passed=1)
    run = scripted(_test(10).replace("part", "new"), required)
    run.outcomes(failed=1)
    assert "memory_baseline broken: cannot be judged, and --cka-memory-require-base" in run.text


def test_both_devices_keep_their_lines(scripted, pytester, file):
    """An update on one machine leaves the other's figures."""
    scripted(_test(10), UPDATE)
    before = _regions(file)
    _on_another_device(pytester)
    scripted(_test(20), UPDATE).outcomes(passed=1)
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


def test_only_what_ran_and_passed_is_taken_in(scripted, file):
    """Everything else keeps the line it has."""
    scripted(MANY.format(10), UPDATE).outcomes(passed=6, xpassed=1)
    before = {region["nodeid"][17:]: region for region in _regions(file)}
    assert "is_expected_to_fail" not in before  # it did not pass as a test should
    run = scripted(MANY.format(11), UPDATE, "-k", "not left_out")
    run.outcomes(passed=2, failed=2, skipped=1, errors=1, xfailed=1, deselected=1)
    changed = {region["nodeid"][17:] for region in _regions(file)} - before.keys()
    changed |= {r["nodeid"][17:] for r in _regions(file) if before[r["nodeid"][17:]] != r}
    assert changed == {"passes"}
    assert "baseline: 0 regions added, 1 changed, 0 unchanged in" in run.text


def test_an_update_holds_nothing_to_the_old_baseline(scripted, file):
    """Or a change that is meant could never be taken in."""
    scripted(_test(10), UPDATE)
    scripted(_test(10**6), UPDATE, GATE).outcomes(passed=1)
    assert _regions(file)[0]["peak_increase_bytes"] == 10**6


def test_an_update_without_change_leaves_the_file(scripted, file):
    """Byte for byte, whoever laid it out."""
    scripted(_test(10), UPDATE)
    laid_out = json.dumps(json.loads(file.read_text()), indent=2)
    file.write_text(laid_out)
    run = scripted(_test(10), UPDATE)
    assert "0 regions added, 0 changed, 1 unchanged" in run.text
    assert file.read_text() == laid_out


def test_an_update_that_measured_nothing_writes_nothing(scripted, file):
    """And says so."""
    run = scripted("def test_plain(): pass", UPDATE)
    run.outcomes(passed=1)
    assert "baseline: nothing to write, no measured test passed" in run.text
    assert not file.exists()


def test_collecting_only_writes_nothing(scripted, file):
    """Nothing was measured."""
    assert scripted(_test(10), UPDATE, "--collect-only").result.ret == pytest.ExitCode.OK
    assert not file.exists()


def test_regions_of_one_label_are_told_apart(scripted, file):
    """By the number they get in the report."""
    source = _test(10) + '    with cka_memory.measure("part"): meter.allocate(7)\n'
    scripted(source, UPDATE)
    assert [(r["label"], r["retained_bytes"]) for r in _regions(file)] == [
        ("part", 0),
        ("part #2", 7),
    ]
    scripted(source.replace("allocate(7)", "allocate(8)")).outcomes(failed=1)


@pytest.mark.parametrize("options", [["-n2"], ["-n2", "--dist=each"]], ids=["load", "each"])
def test_workers_write_the_file_of_a_serial_run(scripted, file, options):
    """The controller alone, from what they report; they hold their tests to it."""
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


def test_a_rerun_counts_once(scripted, file):
    """The last run of a test, which passed."""
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
    "corrupt": ("[ {", "line 1: no JSON: "),
    "empty": ("", "line 1: no baseline file"),
    "newer": ('[ {"schema": "pytest-cka-memory-baseline/9"}\n]', "line 1: schema pytest-cka-mem"),
    "a report": ('{\n "schema": "pytest-cka-memory/1"\n}', "line 1: no baseline file"),
    "merge": (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n<<<<<<< HEAD\n]',
        "line 2: an unresolved merge ('<<<<<<< HEAD')",
    ),
}


@pytest.mark.parametrize("options", [[], [GATE], [UPDATE], ["-n2", UPDATE]], ids=" ".join)
@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_used_stops_the_session(scripted, file, content, message, options):
    """Before any test, by file and line; an update does not write over it either."""
    file.write_text(content)
    run = scripted(_test(10), *options)
    run.refused("--cka-memory-baseline: cannot use", f"{FILE}, {message}")
    assert file.read_text() == content


def test_a_file_that_breaks_while_tests_run_is_not_written_over(scripted, file):
    """It is read again before it is replaced; the session fails."""
    scripted(_test(10), UPDATE)
    breaks = _test(20, action=f"open({str(file)!r}, 'a').write('x'); meter.allocate({{}})")
    run = scripted(breaks, UPDATE)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED: cannot use {file}, line 4: something follows the last ']'" in run.text
    assert file.read_text().endswith("]\nx")


def test_a_named_file_must_be_there(scripted):
    """A gate with a wrong path would judge nothing; an update makes it."""
    scripted(_test(10), "--cka-memory-baseline=no.json").refused(
        "--cka-memory-baseline: there is no", "no.json; write one with --cka-memory-update-baseline"
    )
    scripted(_test(10), "--cka-memory-baseline=new/no.json", UPDATE).outcomes(passed=1)
    scripted(_test(10), "--cka-memory-baseline=new/no.json").outcomes(passed=1)


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
def test_a_wrong_tolerance_is_refused(scripted, source, options, message):
    """Before any test runs, with what to write."""
    scripted(source, *options).refused(message)


def test_an_expected_failure_may_be_a_breach(scripted):
    """A breach is a failure like any other."""
    source = _test("{0}").replace("@pytest.mark", "@pytest.mark.{1}\n@pytest.mark", 1)
    scripted(source.format(10, "filterwarnings"), UPDATE)
    scripted(source.format(99, "xfail")).outcomes(xfailed=1)


def test_a_breach_is_a_failure_in_junit_xml(scripted, pytester):
    """With the sentence of the terminal."""
    scripted(_test(1000), UPDATE)
    scripted(_test(1060), "--junitxml=j.xml").outcomes(failed=1)
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
    """A baseline of three regions in one file, and of one in another, which is gone."""
    pytester.makepyfile(test_other="def test_other(cka_memory): pass")
    scripted(TWO, UPDATE, "test_it.py", "test_other.py")
    (pytester.path / "test_other.py").unlink()
    assert len(_regions(file)) == 4


def _gone(run):
    found = run.text.partition(" are gone; delete their lines:\n")[2]
    return [line[2:] for line in found.splitlines() if line.startswith("  test_")]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("options", [[], ["-n2"]], ids=["serial", "workers"])
def test_lines_without_a_test_are_named(scripted, options):
    """A region, a test and a file that are gone: what a cleaned file would not have."""
    run = scripted(ONE, GATE, *options)
    run.outcomes(passed=1)
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
@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "workers"])
def test_tests_that_were_left_out_are_not_called_gone(scripted, options, workers):
    """Only what this session can tell: here a region of the test that ran, and a lost file."""
    run = scripted(ONE + "\ndef test_goes(cka_memory): pass", GATE, *options, *workers)
    assert _gone(run) == ["test_it.py::test_stays goes", "test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_a_test_that_failed_says_nothing_of_its_regions(scripted):
    """It may have been left before it came to them."""
    run = scripted(ONE + "    assert False\ndef test_goes(cka_memory): pass", GATE)
    run.outcomes(passed=1, failed=1)
    assert _gone(run) == ["test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_an_update_drops_the_regions_of_tests_that_ran(scripted, file):
    """Tests that are gone are only named: another branch may still have them."""
    run = scripted(ONE, UPDATE)
    assert "baseline: 0 regions added, 0 changed, 1 unchanged, 1 dropped in" in run.text
    assert _gone(run) == ["test_it.py::test_goes", "test_other.py::test_other"]
    assert len(_regions(file)) == 3


@pytest.mark.usefixtures("written")
def test_another_devices_lines_are_not_called_gone(scripted, pytester):
    """Its tests may be others."""
    _on_another_device(pytester)
    assert _gone(scripted(ONE, GATE)) == []


def test_the_header_says_what_is_done(scripted, file):
    """Held to, or written."""
    assert f"cka-memory: writing {file}" in scripted(_test(10), UPDATE).text
    assert f"cka-memory: held to {file}" in scripted(_test(10), GATE).text
    assert "cka-memory: " not in scripted(_test(10), writes_json=False).text
