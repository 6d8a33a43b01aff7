"""Options and their ini keys: which wins, what they apply to, and what they refuse."""

import pytest

TWO = """
def test_a(meter): meter.allocate(3)
def test_b(meter): pass
"""


def test_only_what_asks_for_it_is_measured(scripted):
    """Without options, unmarked tests run as if the plugin were not there."""
    run = scripted(TWO)
    run.outcomes(passed=2)
    assert run.regions == []
    run.result.stdout.fnmatch_lines(["nothing was measured: give tests a memory marker or the*"])


@pytest.mark.parametrize("by", ["option", "ini"])
def test_the_report_measures_every_test(scripted, pytester, by):
    """--cka-memory-report measures unmarked tests, and judges none of them."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_report = true\n")
    run = scripted(TWO, *(["--cka-memory-report"] if by == "option" else []))
    run.outcomes(passed=2)
    assert [(r["retained_bytes"], r["verdict"]) for r in run.regions] == [
        (3, "no limit"),
        (0, "no limit"),
    ]
    run.result.stdout.fnmatch_lines(["region *batches *start *peak*", "test_a *", "test_b *"])


@pytest.mark.parametrize(
    ("option", "figure"),
    [("--cka-memory-max-retained-mb", "retained"), ("--cka-memory-max-peak-mb", "peak increase")],
)
@pytest.mark.parametrize(("size", "kept"), [(2**20, True), (2**20 + 1, False)])
def test_a_session_limit_holds_for_unmarked_tests(scripted, option, figure, size, kept):
    """The boundary is the markers' own: equality keeps it; the message names the option."""
    run = scripted(f"def test_it(meter): meter.allocate({size})", f"{option}=1")
    run.outcomes(passed=int(kept), failed=int(not kept))
    if not kept:
        run.result.stdout.fnmatch_lines([f"{option}=1 broken: {figure} 1,048,577 bytes*"])


def test_a_session_limit_leaves_tests_with_their_own(scripted):
    """A marker on the same figure replaces the session's limit; one on another adds to it."""
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
    run.outcomes(passed=2, failed=2)
    verdicts = {r["nodeid"].partition("::")[2]: r["verdict"] for r in run.regions}
    assert verdicts == {
        "test_looser": "ok",
        "test_tighter": "BREACH",
        "test_other": "BREACH",
        "test_none": "ok",
    }


def test_the_command_line_beats_the_ini_file(scripted, pytester):
    """Each option replaces its ini key, an unset one leaves it."""
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
    run.outcomes(failed=1)
    assert [breach["limit"] for breach in run.region["breaches"]] == ["--cka-memory-max-peak-mb=0"]
    assert not (pytester.path / "from_ini.json").exists()
    assert "cka-memory-min-regions" not in run.text


def test_ini_keys_alone_are_obeyed(scripted, pytester):
    """Every valued key of the ini file is read."""
    pytester.makeini(
        """
        [pytest]
        cka_memory_max_retained_mb = 1 KB
        cka_memory_min_regions = 2
        cka_memory_json = deep/from_ini.json
        """
    )
    run = scripted("def test_it(meter): meter.allocate(1025)", writes_json=False)
    run.outcomes(failed=1)
    assert (pytester.path / "deep" / "from_ini.json").is_file()
    run.result.stdout.fnmatch_lines(["FAILED: 1 regions measured, --cka-memory-min-regions=2"])


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
def test_a_value_that_cannot_be_used_is_refused_by_its_option(scripted, option, message):
    """A usage error says the option, what was given, and what to write."""
    scripted(TWO, option).refused(message)


def test_a_wrong_ini_value_is_refused(scripted, pytester):
    """The ini file is held to the same rules."""
    pytester.makeini("[pytest]\ncka_memory_min_regions = many\n")
    scripted(TWO).refused("cannot read 'many' as a number of regions")


def test_help_names_every_option_marker_and_fixture(session):
    """What a user looks for with --help, --markers and --fixtures is there, with a sentence."""
    names = ("report", "device", "json", "max-retained-mb", "max-peak-mb", "min-regions")
    shown = session(None, "--help").text
    for name in names:
        assert f"--cka-memory-{name}" in shown
        assert f"cka_memory_{name.replace('-', '_')}" in shown
    shown = session(None, "--markers").text
    for line in (
        "@pytest.mark.max_retained_mb(1): At most `limit` MB, or e.g. ``'512 KiB'``, born in*",
        "@pytest.mark.zero_retention: Nothing born in the region may be alive at its end.",
        "@pytest.mark.max_peak_mb(512): The peak may rise at most `limit` MB above*",
        "@pytest.mark.max_reserved_mb(1024): The allocator's reserve may rise at most*",
        "@pytest.mark.flat_per_batch(tolerance_mb=0.0, warmup=1): Live memory may grow at most*",
    ):
        assert any(line.rstrip("*") in had for had in shown.splitlines()), line
    shown = session(None, "--fixtures").text
    assert "cka_memory -- " in shown
    assert "Measure regions of the test" in shown


def test_every_ini_key_is_known_to_a_strict_configuration(scripted, pytester):
    """--strict-config and --strict-markers know all our keys and markers."""
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
    run.outcomes(passed=1)


def test_the_header_says_what_was_asked_for(scripted):
    """One line, with the limits to the byte; nothing where nothing was asked for."""
    options = ["--cka-memory-max-retained-mb=1", "--cka-memory-min-regions=1"]
    run = scripted(TWO, *options)
    run.result.stdout.fnmatch_lines(
        ["cka-memory: every test measured, max retained 1,048,576 bytes (1.00 MB), at least 1*"]
    )
    assert "cka-memory" not in scripted(TWO, writes_json=False).text.partition("plugins:")[0]


def test_warnings_as_errors_find_none(scripted):
    """The plugin warns of nothing in a healthy session."""
    # The session under test shares this process, where the plugin is imported already.
    shared = "ignore:Module already imported"
    run = scripted(TWO, "-W", "error", "-W", shared, "-p", "no:asyncio", "--cka-memory-report")
    run.outcomes(passed=2)


def test_a_meter_hook_that_declines_leaves_the_device_to_the_plugin(session, pytester):
    """A conftest may answer for some devices and leave the others."""
    pytester.makeconftest("def pytest_cka_memory_meter(config, device): return None")
    run = session("import torch\ndef test_it(cka_memory): x = torch.ones(256)\n")
    assert run.region["peak_increase_bytes"] == 1024
    assert run.report["session"]["meter"] == "exact accounting of tensor storages"
