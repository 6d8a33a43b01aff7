"""Options and their ini keys: their precedence, what they apply to, and what they refuse."""

import pytest

from pytest_cka_memory.core import conditions
from pytest_cka_memory.meters.selection import meter_for

TWO = """
def test_a(meter): meter.allocate(3)
def test_b(meter): pass
"""


def test_unmarked_tests_are_not_measured_by_default(scripted):
    """Without options unmarked tests run as if the plugin were not installed."""
    run = scripted(TWO)
    run.assert_outcomes(passed=2)
    assert run.regions == []
    run.result.stdout.fnmatch_lines(["nothing was measured: give tests a memory marker or the*"])


@pytest.mark.parametrize("by", ["option", "ini"])
def test_report_option_measures_every_test(scripted, pytester, by):
    """--cka-memory-report measures unmarked tests but judges none of them."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_report = true\n")
    run = scripted(TWO, *(["--cka-memory-report"] if by == "option" else []))
    run.assert_outcomes(passed=2)
    assert [(r["retained_bytes"], r["verdict"]) for r in run.regions] == [
        (3, "no limit"),
        (0, "no limit"),
    ]
    run.result.stdout.fnmatch_lines(["region *batches *start *peak*", "  test_a *", "  test_b *"])


@pytest.mark.parametrize(
    ("option", "figure"),
    [("--cka-memory-max-retained-mb", "retained"), ("--cka-memory-max-peak-mb", "peak increase")],
)
@pytest.mark.parametrize(("size", "kept"), [(2**20, True), (2**20 + 1, False)])
def test_limit_of_an_option_applies_to_unmarked_tests(scripted, option, figure, size, kept):
    """A limit of an option applies to unmarked tests: equality
    keeps it, messages name the option.
    """
    run = scripted(f"def test_it(meter): meter.allocate({size})", f"{option}=1")
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    if not kept:
        run.result.stdout.fnmatch_lines([f"{option}=1 broken: {figure} 1,048,577 bytes*"])


def test_marker_replaces_the_option_with_the_same_figure(scripted):
    """A marker that limits another figure applies in addition to the option."""
    run = scripted(
        """
        import pytest

        @pytest.mark.max_retained_mb("10 B")
        def test_looser(meter): meter.allocate(10)

        @pytest.mark.zero_retention
        def test_tighter(meter): meter.allocate(1)

        @pytest.mark.max_peak_mb(1)
        def test_other(meter): meter.allocate(6)

        def test_none(meter): meter.allocate(5)
        """,
        "--cka-memory-max-retained-mb=5B",
    )
    run.assert_outcomes(passed=2, failed=2)
    verdicts = {r["nodeid"].partition("::")[2]: r["verdict"] for r in run.regions}
    assert verdicts == {
        "test_looser": "ok",
        "test_tighter": "BREACH",
        "test_other": "BREACH",
        "test_none": "ok",
    }


def test_command_line_overrides_the_ini_file(scripted, pytester):
    """An option on the command line overrides its own ini key and no other."""
    pytester.makeini(
        """
        [pytest]
        cka_memory_max_retained_mb = 0
        cka_memory_max_peak_mb = 0
        cka_memory_min_regions = 9
        cka_memory_device = nonsense
        cka_memory_json = from_ini.json
        """
    )
    options = ["--cka-memory-max-retained-mb=1", "--cka-memory-min-regions=1"]
    run = scripted("def test_it(meter): meter.allocate(1)", *options, "--cka-memory-device=cpu")
    run.assert_outcomes(failed=1)
    assert [breach["limit"] for breach in run.region["breaches"]] == ["--cka-memory-max-peak-mb=0"]
    assert not (pytester.path / "from_ini.json").exists()
    assert "cka-memory-min-regions" not in run.text


def test_ini_keys_apply_without_options(scripted, pytester):
    """Without options, ini keys that have a value apply."""
    pytester.makeini(
        """
        [pytest]
        cka_memory_max_retained_mb = 1 KB
        cka_memory_min_regions = 2
        cka_memory_json = deep/from_ini.json
        """
    )
    run = scripted("def test_it(meter): meter.allocate(1025)", writes_json=False)
    run.assert_outcomes(failed=1)
    assert (pytester.path / "deep" / "from_ini.json").is_file()
    run.result.stdout.fnmatch_lines(["FAILED: 1 region measured, but *min-regions=2; *"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--cka-memory-max-retained-mb=x", "--cka-memory-max-retained-mb: cannot read 'x' as a"),
        ("--cka-memory-max-retained-mb=", "--cka-memory-max-retained-mb: cannot read ''"),
        ("--cka-memory-max-peak-mb=-1", "--cka-memory-max-peak-mb: a memory size cannot be -1"),
        ("--cka-memory-max-peak-mb=nan", "--cka-memory-max-peak-mb: a memory size cannot be nan"),
        ("--cka-memory-max-peak-mb=inf", "--cka-memory-max-peak-mb: a memory size cannot be inf"),
        ("--cka-memory-max-peak-mb=1e308", "--cka-memory-max-peak-mb: "),
        ("--cka-memory-min-regions=x", "--cka-memory-min-regions: cannot read 'x' as a number"),
        ("--cka-memory-min-regions=-1", "--cka-memory-min-regions: cannot read '-1'"),
        ("--cka-memory-min-regions=1.5", "--cka-memory-min-regions: cannot read '1.5'"),
        ("--cka-memory-min-regions=", "--cka-memory-min-regions: cannot read ''"),
    ],
)
def test_invalid_value_is_refused_and_names_its_option(scripted, option, message):
    """A usage error names the option, the invalid value, and what to write."""
    scripted(TWO, option).assert_refused(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("min_regions = many", "cka_memory_min_regions in tox.ini: cannot read 'many' as a number"),
        ("max_peak_mb = 2KBanana", "cka_memory_max_peak_mb in tox.ini: cannot read '2KBanana'"),
        ("report = maybe", "cka_memory_report in "),
        (
            "report = maybe",
            "tox.ini: cannot use 'maybe' for the table; write how many rows it shows",
        ),
        ("explain = maybe", "tox.ini: invalid truth value 'maybe'; write true or false"),
        ("device = gpu", "cka_memory_device in tox.ini: unknown device 'gpu'; write one of"),
        ("json = .", "cka_memory_json in tox.ini: "),
        ("baseline = gone.json", "cka_memory_baseline in tox.ini: "),
    ],
)
def test_invalid_ini_value_is_refused_and_names_its_key(session, pytester, line, message):
    """An invalid ini value is refused by its key, not by the option that nobody has written."""
    pytester.makeini(f"[pytest]\ncka_memory_{line}\n")
    run = session("def test_it(cka_memory): pass", writes_json=False)
    run.assert_refused(message)
    assert f"--cka-memory-{line.split()[0]}:" not in run.text + run.errors


def test_option_that_replaces_a_wrong_ini_value_is_named(scripted, pytester):
    """If an option replaces a wrong ini value, that is not read, and the option is named."""
    pytester.makeini("[pytest]\ncka_memory_min_regions = many\n")
    scripted(TWO, "--cka-memory-min-regions=x").assert_refused("--cka-memory-min-regions: cannot")


def test_help_lists_every_option_marker_and_fixture(session):
    """Pytest's --help, --markers and --fixtures describe what the plugin adds."""
    names = ("report", "device", "json", "max-retained-mb", "max-peak-mb", "min-regions")
    shown = session(None, "--help").text
    for name in names:
        assert f"--cka-memory-{name}" in shown
        assert f"cka_memory_{name.replace('-', '_')}" in shown
    shown = session(None, "--markers").text
    for line in (
        "@pytest.mark.max_retained_mb(1): at most `limit` MB (or a text such as '512 KiB')*",
        "@pytest.mark.zero_retention: nothing that the measured code allocates may*",
        "@pytest.mark.max_peak_mb(512): the memory in use may rise at most `limit` MB*",
        "@pytest.mark.max_reserved_mb(1024): the memory that torch's allocator reserves may*",
        "@pytest.mark.flat_per_batch(tolerance_mb=0.0, warmup=1): after `warmup` batches, the*",
    ):
        assert any(line.rstrip("*") in printed for printed in shown.splitlines()), line
    shown = session(None, "--fixtures").text
    assert "cka_memory -- " in shown
    assert "Measure regions of the test" in shown


def test_strict_configuration_accepts_every_key_and_marker(scripted, pytester):
    """With strict configuration pytest accepts every key and marker of the plugin."""
    pytester.makeini(
        """
        [pytest]
        addopts = --strict-markers --strict-config
        cka_memory_report = false
        cka_memory_device = cpu
        cka_memory_json = j.json
        cka_memory_max_retained_mb = 1
        cka_memory_max_peak_mb = 1
        cka_memory_min_regions = 1
        """
    )
    run = scripted("import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass")
    run.assert_outcomes(passed=1)


def test_header_lists_the_options_in_effect(scripted):
    """The header has one line with all limits in exact bytes; without options it has none."""
    options = ["--cka-memory-max-retained-mb=1", "--cka-memory-min-regions=1"]
    run = scripted(TWO, *options)
    run.result.stdout.fnmatch_lines(
        ["cka-memory: every test measured, max retained 1,048,576 bytes (1.00 MB), at least 1*"]
    )
    assert "cka-memory" not in scripted(TWO, writes_json=False).text.partition("plugins:")[0]


@pytest.mark.parametrize("options", [(), ("--cka-memory-report",)], ids=["marker", "option"])
def test_torch_version_that_was_not_tried_is_named_once(scripted, monkeypatch, options):
    """A torch version that was not tried is named once, in the header or in the summary.

    It is the summary if only a marker asks for the plugin.
    """
    monkeypatch.setattr(conditions, "installed_torch", lambda: "2.99.0.dev20270110+cu132")
    test = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass"
    run = scripted(test, *options, writes_json=False)
    run.assert_outcomes(passed=1)
    header = run.text.partition("collected")[0]
    said = "warning: emulated_cuda has not been tried with torch 2.99. torch's own allocator still"
    assert run.text.count(said) == 1
    assert (said in header) == bool(options)
    assert "not been tried" not in scripted("def test_it(): pass", writes_json=False).text


def test_plugin_emits_no_warnings(scripted):
    """A session that turns warnings into errors passes, because the plugin emits none."""
    # The inner session runs in this process, which has already imported the plugin.
    shared = "ignore:Module already imported"
    run = scripted(TWO, "-W", "error", "-W", shared, "-p", "no:asyncio", "--cka-memory-report")
    run.assert_outcomes(passed=2)


def test_plugin_chooses_the_meter_if_the_hook_returns_none(session, pytester):
    """A conftest's hook that returns None leaves the choice of the meter to the plugin."""
    pytester.makeconftest("def pytest_cka_memory_meter(config, device): return None")
    source = "import torch\ndef test_it(cka_memory): x = torch.ones(256)\n"
    run = session(source, "--cka-memory-device=cpu")
    assert run.region["peak_increase_bytes"] == 1024
    assert run.report["session"]["meter"] == meter_for("cpu").name


@pytest.mark.parametrize("key", ["cka_memory_maxpeak", "cka_memory_max_peak", "cka_memory_"])
def test_unknown_key_of_the_ini_file_stops_the_session(scripted, pytester, key):
    """Pytest only warns of it, and the limit that somebody meant would not hold."""
    pytester.makeini(f"[pytest]\n{key} = 64\n")
    run = scripted(TWO)
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR
    run.result.stderr.fnmatch_lines([f"*there is no key '{key}' (tox.ini); did you mean cka_memo*"])
    if key != "cka_memory_":
        run.result.stderr.fnmatch_lines(["*did you mean cka_memory_max_peak_mb? All keys: *"])


def test_key_of_another_plugin_is_known(scripted, pytester):
    """Its name may begin as ours do."""
    pytester.makeini("[pytest]\ncka_memory_own = 64\n")
    pytester.makepyfile(own="def pytest_addoption(parser): parser.addini('cka_memory_own', 'x')")
    pytester.syspathinsert()
    scripted(TWO, "-p", "own").assert_outcomes(passed=2)
