"""The table in the terminal summary."""

import re

import pytest

SOURCE = """
import pytest

@pytest.mark.parametrize("name", ["short", "a-very-long-parameter-" * 6])
@pytest.mark.max_retained_mb(1)
def test_training_of_a_network_with_a_long_name(cka_memory, meter, name):
    with cka_memory.measure("epoch over the whole training set, with validation") as region:
        meter.allocate(56_345_678_901)
        for _ in range(6):
            region.batch_done(64)

@pytest.mark.zero_retention
def test_clean(meter): meter.free(meter.allocate(2**20 * 43))

def test_unlimited(meter): meter.allocate(17)

@pytest.mark.max_reserved_mb(1)
def test_reserve(meter): pass

@pytest.mark.zero_retention
def test_fails(meter): assert 0
"""


def _table(run):
    lines = run.result.outlines
    start = next(n for n, line in enumerate(lines) if re.fullmatch(r"=+ cka-memory =+", line))
    end = next(n for n, line in enumerate(lines) if n > start and line.startswith("==="))
    return lines[start + 1 : end]


@pytest.mark.parametrize("reserve", [False, True], ids=["no-reserve", "reserve"])
def test_no_line_is_wider_than_100_columns(request, reserve):
    """Each row is one line of at most 100 columns, however long names and figures are."""
    run_scripted = request.getfixturevalue("scripted_reserve" if reserve else "scripted")
    run = run_scripted(SOURCE, "--cka-memory-report")
    table = _table(run)
    rows = table[: table.index("")]
    assert len(rows) == 2 + 1 + 6 + 1
    assert max(map(len, rows)) <= 100
    assert ("reserved" in rows[0]) is reserve
    head, left_out = rows[0].split(), rows[-1] if rows[-1].startswith("(no room for: ") else ""
    for column in ("region", "peak", "increase", "retained", "verdict"):
        assert column in head
    for column in ("batches", "start", "timeline"):
        assert (column in head) is not (column in left_out)


def test_every_verdict_is_in_the_table(scripted):
    """The table has every verdict: limits that are kept, broken, missing, or not judged."""
    run = scripted(SOURCE, "--cka-memory-report")
    run.assert_outcomes(passed=3, failed=3)
    run.result.stdout.fnmatch_lines(
        [
            "*BREACH*",
            "*BREACH*",
            "  test_clean * 43.00 * 0 *ok*",
            "  test_unlimited *17 B*no limit*",
            "  test_reserve *not judged*",
            "  test_fails *not judged*",
        ]
    )


def test_legend_names_device_meter_and_unit(scripted):
    """The legend names device, meter and unit, and says what the figures include."""
    run = scripted("def test_it(meter): pass", "--cka-memory-report")
    run.result.stdout.fnmatch_lines(
        [
            "device: cpu (no device), *",
            "meter: scripted figures",
            "*nothing was measured: a test wrote these figures by hand",
            "Sizes are in MB (2*20 bytes) unless a unit is given.*",
        ]
    )


@pytest.mark.native
def test_legend_of_the_cpu_says_what_peaks_include(session):
    """The legend of the CPU says that peaks are those of torch's allocator."""
    run = session("def test_it(): pass", "--cka-memory-report", "--cka-memory-device=cpu")
    run.result.stdout.fnmatch_lines(["device: cpu (*), torch *", "meter: torch's CPU allocator"])
    assert "the peak includes temporaries inside operators" in run.text


def test_legend_of_the_ledger_says_why_it_counts_and_that_peaks_are_a_lower_bound(
    session, monkeypatch
):
    """The legend of counted tensors says why, and that peaks are lower bounds.

    The session runs in a process of its own.
    """
    monkeypatch.setenv("CKA_MEMORY_NATIVE", "0")
    run = session(
        "def test_it(): pass", "--cka-memory-report", "--cka-memory-device=cpu", forked=True
    )
    run.result.stdout.fnmatch_lines(
        ["device: cpu (*), torch *", "meter: exact accounting of tensor storages"]
    )
    assert "lower bound" in run.text


@pytest.mark.parametrize(("colour", "escapes"), [("yes", True), ("no", False), ("auto", False)])
def test_colours_are_used_only_in_terminals_or_if_requested(scripted, monkeypatch, colour, escapes):
    """Escape sequences for colours are written to a terminal, or with --color=yes."""
    for name in ("FORCE_COLOR", "PY_COLORS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    run = scripted(SOURCE, "--cka-memory-report", f"--color={colour}")
    assert ("\x1b[31m" in run.text) is escapes
    assert ("\x1b[" in run.text) is escapes


def test_rows_follow_the_name_of_their_file(scripted, pytester):
    """Rows follow the name of their file, which tells tests of one name apart."""
    for name in ("test_a.py", "test_b.py"):
        (pytester.path / name).write_text("def test_same(meter): pass\n")
    run = scripted("def test_own(meter): pass", "--cka-memory-report")
    run.result.stdout.fnmatch_lines(
        ["test_a.py", "  test_same *", "test_b.py", "  test_same *", "test_it.py", "  test_own *"]
    )


def test_report_without_regions_says_that_nothing_was_measured(scripted):
    """A report without regions says that nothing was measured, and what to do."""
    run = scripted("", "--cka-memory-report")
    assert run.result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    run.result.stdout.fnmatch_lines(["nothing was measured: *"])


def test_session_without_options_prints_nothing(scripted):
    """Without options, marked tests that keep their limits print nothing."""
    source = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"
    run = scripted(source, writes_json=False)
    run.assert_outcomes(passed=1)
    assert "cka-memory" not in run.text.split("collected")[1]


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (60, 60), (20, 80)])
def test_table_and_failures_fit_the_terminal(scripted, monkeypatch, columns, width):
    """In a narrow terminal the table and failures are wrapped, except for names of tests. pytest
    takes a terminal under 40 columns for unknown.
    """
    monkeypatch.setenv("COLUMNS", str(columns))
    run = scripted(SOURCE, "--cka-memory-report")
    run.assert_outcomes(passed=3, failed=3)
    names = ("BREACH ", "not judged ", "figures written to ")
    rows = [line for line in _table(run) if not line.startswith(names)]
    assert max(map(len, rows)) <= width
    lines = run.result.outlines
    start = next(n for n, line in enumerate(lines) if line.startswith("max_retained_mb(1) broken"))
    end = next(n for n, line in enumerate(lines) if n > start and line.startswith("_"))
    failure = lines[start:end]
    assert any(line.startswith("    what to do: ") for line in failure)
    assert max(map(len, failure)) <= width


def test_negative_and_undetermined_growth_are_reported(scripted):
    """Growth is negative if batches free memory, and null for a single batch."""
    run = scripted(
        """
        def test_it(cka_memory, meter):
            blocks = [meter.allocate(10) for _ in range(10)]
            with cka_memory.measure("shrinks") as region:
                for block in blocks:
                    meter.free(block)
                    region.batch_done()
            with cka_memory.measure("one") as region:
                region.batch_done()
        """,
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=1)
    shrinks, one = run.regions
    assert shrinks["growth_bytes_per_batch"] == -10.0
    assert shrinks["net_bytes"] == -100
    assert one["growth_bytes_per_batch"] is None


MANY = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_many(number, meter):
    meter.allocate(number)
"""


@pytest.mark.parametrize("by", ["option", "ini", "addopts", "environment"])
def test_report_prints_the_largest_rows_by_a_column(scripted, pytester, monkeypatch, by):
    """A number and a column choose the rows, wherever the option is written."""
    value = "2:retained"
    lines = {
        "ini": f"cka_memory_report = {value}",
        "addopts": f"addopts=--cka-memory-report={value}",
    }
    pytester.makeini(f"[pytest]\n{lines.get(by, '')}\n")
    if by == "environment":
        monkeypatch.setenv("PYTEST_ADDOPTS", f"--cka-memory-report={value}")
    run = scripted(MANY, *([f"--cka-memory-report={value}"] if by == "option" else []))
    run.assert_outcomes(passed=6)
    assert len(run.regions) == 6
    run.result.stdout.fnmatch_lines(
        [
            "region *",
            "-*",
            "test_it.py::test_many[[]5] *",
            "test_it.py::test_many[[]4] *",
            "4 of 6 regions with a lower retained are left out: all are in r.json",
        ]
    )


def test_bare_report_takes_no_file_for_its_value(scripted, pytester):
    """A file behind the bare option is a file, also if its name could be a value."""
    (pytester.path / "20").mkdir()
    (pytester.path / "20" / "test_inner.py").write_text("def test_inner(meter): pass\n")
    run = scripted("def test_outer(meter): pass", "--cka-memory-report", "20")
    run.assert_outcomes(passed=1)
    assert [region["nodeid"] for region in run.regions] == ["20/test_inner.py::test_inner"]


def test_value_of_report_reaches_workers(scripted):
    """The rows are chosen for the tests of all workers."""
    pytest.importorskip("xdist")
    run = scripted(MANY, "--cka-memory-report=1", "-n1")
    run.assert_outcomes(passed=6)
    run.result.stdout.fnmatch_lines(["5 of 6 regions with a lower peak are left out: *"])


def test_value_that_chooses_no_rows_is_refused(scripted):
    """The error names the option and what to write."""
    scripted(MANY, "--cka-memory-report=size").assert_refused(
        "--cka-memory-report: cannot use 'size' for the table; write how many rows it shows"
    )


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 reads pytest.toml")
@pytest.mark.parametrize(("value", "rows"), [("true", 6), ('"2"', 2), ("false", 0)])
def test_report_can_be_a_boolean_or_a_text_in_toml(scripted, pytester, value, rows):
    """In pytest.toml the key takes true and false, and a text that chooses rows."""
    (pytester.path / "pytest.toml").write_text(f"[pytest]\ncka_memory_report = {value}\n")
    run = scripted(MANY)
    run.assert_outcomes(passed=6)
    assert len(re.findall(r"(?m)^.*test_many\[\d\] .*no limit$", run.text)) == rows
