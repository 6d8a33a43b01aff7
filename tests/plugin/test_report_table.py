"""The table in the terminal summary, as a user sees it."""

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
def test_no_line_is_wider_than_a_terminal_of_100(scripted, scripted_reserve, pytester, reserve):
    """However long names and figures are, each row is one line of at most 100 columns."""
    if not reserve:
        conftest = pytester.path / "conftest.py"
        conftest.write_text(
            conftest.read_text("utf-8").replace("has_reserve=True", "has_reserve=False")
        )
    run = scripted(SOURCE, "--cka-memory-report")
    table = _table(run)
    rows = table[: table.index("")]
    assert len(rows) == 2 + 6
    assert max(map(len, rows)) <= 100
    assert ("reserved" in rows[0]) is reserve
    head = rows[0].split()
    for column in ("region", "batches", "start", "peak", "increase", "retained", "verdict"):
        assert column in head


def test_every_verdict_is_in_the_table(scripted):
    """Kept, broken, without limit, not judged."""
    run = scripted(SOURCE, "--cka-memory-report")
    run.outcomes(passed=3, failed=3)
    run.result.stdout.fnmatch_lines(
        [
            "*BREACH*",
            "*BREACH*",
            "test_clean * 43.00 * 0 *ok*",
            "test_unlimited *17 B*no limit*",
            "test_reserve *not judged*",
            "test_fails *not judged*",
        ]
    )


def test_the_legend_says_what_measured(scripted):
    """Device, meter, unit, and what its figures can and cannot see."""
    run = scripted("def test_it(meter): pass", "--cka-memory-report")
    run.result.stdout.fnmatch_lines(
        [
            "device: cpu (no device), *",
            "meter: scripted figures; sizes in MB (2*20 bytes) where no unit is given",
            "*nothing was measured: a test wrote these figures by hand",
        ]
    )


def test_the_legend_of_the_cpu_says_what_it_cannot_see(session):
    """A tensor peak is a lower bound; the legend says so."""
    run = session("def test_it(): pass", "--cka-memory-report", "--cka-memory-device=cpu")
    run.result.stdout.fnmatch_lines(
        ["device: cpu (*), torch *", "meter: exact accounting of tensor storages;*"]
    )
    assert "lower bound" in run.text


@pytest.mark.parametrize(("colour", "escapes"), [("yes", True), ("no", False), ("auto", False)])
def test_colours_are_for_terminals(scripted, monkeypatch, colour, escapes):
    """No escape sequence reaches a file or a pipe unless it was asked for."""
    for name in ("FORCE_COLOR", "PY_COLORS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    run = scripted(SOURCE, "--cka-memory-report", f"--color={colour}")
    assert ("\x1b[31m" in run.text) is escapes
    assert ("\x1b[" in run.text) is escapes


def test_files_with_tests_of_one_name_are_told_apart(scripted, pytester):
    """Then, and only then, rows name the file."""
    for name in ("test_a.py", "test_b.py"):
        (pytester.path / name).write_text("def test_same(meter): pass\n")
    run = scripted("def test_own(meter): pass", "--cka-memory-report")
    run.result.stdout.fnmatch_lines(
        ["test_a.py::test_same *", "test_b.py::test_same *", "test_own *"]
    )


def test_nothing_measured_is_said_aloud(scripted):
    """A report without a row says why, and what to do."""
    run = scripted("", "--cka-memory-report")
    assert run.result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    run.result.stdout.fnmatch_lines(["nothing was measured: *"])


def test_a_session_that_asks_for_nothing_shows_nothing(scripted):
    """Marked tests that keep their limits leave no trace on the screen."""
    source = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"
    run = scripted(source, writes_json=False)
    run.outcomes(passed=1)
    assert "cka-memory" not in run.text.split("collected")[1]


def test_a_narrow_terminal_gets_the_same_table(scripted, monkeypatch):
    """Nothing crashes where there is less room than the table needs."""
    monkeypatch.setenv("COLUMNS", "20")
    run = scripted(SOURCE, "--cka-memory-report")
    run.outcomes(passed=3, failed=3)


def test_the_figures_of_nan_like_series_stay_plain(scripted):
    """Frees below zero growth, a single batch and no batch at all are all shown."""
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
    run.outcomes(passed=1)
    shrinks, one = run.regions
    assert shrinks["growth_bytes_per_batch"] == -10.0
    assert shrinks["net_bytes"] == -100
    assert one["growth_bytes_per_batch"] is None
