"""Which rows tables of many regions have: what needs attention, then the largest."""

import pytest
from reports_made import SESSION, ZERO, record

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import terminal
from pytest_cka_memory.reports.tables import MOST, RowChoice, by_alarm, choice_of, chosen
from pytest_cka_memory.units import MB

WARNS = limit_from_marker("zero_retention", (), {"warn": True})
RESERVE = limit_from_marker("max_reserved_mb", (1,), {})


def region(name, peak_mb=100, retained=0, limits=()):
    return judge(
        f"tests/test_a.py::{name}",
        record(batches=0, peak_bytes=peak_mb * MB, retained_bytes=retained),
        limits,
    )


def names(results):
    return [result.nodeid.rpartition("::")[2] for result in results]


def many(count):
    return [region(f"test_{number}", peak_mb=100 + number) for number in range(count)]


@pytest.mark.parametrize(
    ("text", "most", "column", "is_sorted"),
    [
        ("20", 20, "peak", True),
        ("retained", MOST, "retained", True),
        ("20:growth/b", 20, "growth/b", True),
        ("7:retained_bytes", 7, "retained", True),
        ("all", None, "peak", False),
        ("all:retained", None, "retained", True),
    ],
)
def test_choice_is_a_number_a_column_or_both(text, most, column, is_sorted):
    """A number of rows, the column that sorts them, or both; without a column it is the peak."""
    choice = choice_of(text)
    assert (choice.most, choice.figure.column, choice.is_sorted) == (most, column, is_sorted)


@pytest.mark.parametrize("text", ["0", "-1", "20:", ":retained:", "20:size", "tests", "1.5", " "])
def test_other_text_is_no_choice(text):
    """The error says what to write, and names the columns."""
    with pytest.raises(ReportError, match=r"write how many rows it shows.*growth/b"):
        choice_of(text)


def test_broken_limits_come_first_and_then_the_largest():
    """The order is that of the verdicts, then of the figure; regions without one are last."""
    results = [
        region("small", 60),
        region("unjudged", 60, limits=[RESERVE]),
        region("large", 90),
        region("warned", 60, 1, [WARNS]),
        region("broken", 60, 1, [ZERO]),
    ]
    assert names(by_alarm(results)) == ["broken", "warned", "unjudged", "large", "small"]


def test_table_of_a_hundred_regions_is_whole_and_in_order():
    """By default up to 100 rows are shown in their order, and none is left out."""
    rows = chosen(many(MOST), RowChoice(), "elsewhere")
    assert (len(rows.results), rows.is_sorted, rows.left_out) == (MOST, False, "")
    assert names(rows.results)[0] == "test_0"


def test_larger_table_has_the_largest_and_says_how_many_are_left_out():
    """Of more regions the 100 with the highest peaks are shown, and one line counts the others."""
    rows = chosen(many(MOST + 1_500), RowChoice(), "all are in r.json")
    assert (len(rows.results), names(rows.results)[0]) == (MOST, "test_1599")
    assert rows.left_out == (
        "1,500 of 1,600 regions with a lower peak are left out: all are in r.json"
    )


def test_regions_that_were_not_judged_are_not_before_larger_ones():
    """Tests that failed have small peaks; they would hide the regions that were measured."""
    unjudged = [region(f"failed_{number}", 1, limits=[RESERVE]) for number in range(80)]
    rows = chosen([*unjudged, *many(80)], RowChoice(), "")
    assert names(rows.results)[:80] == [f"test_{number}" for number in range(79, -1, -1)]
    assert names(rows.results)[80].startswith("failed_")
    assert rows.left_out.startswith("60 of 160 regions with a lower peak")


def test_broken_limits_and_warnings_are_never_left_out():
    """If more limits broke than there are rows, all of them are shown, and nothing else."""
    broken = [region(f"broken_{n}", 50, 1, [ZERO if n % 2 else WARNS]) for n in range(30)]
    rows = chosen([*many(50), *broken], choice_of("20"), "")
    assert all(name.startswith("broken") for name in names(rows.results))
    assert len(rows.results) == 30


def test_sorted_table_has_whole_names_and_any_column():
    """Rows sorted by a column have their files in their names, because they are not together."""
    results = [region(f"test_{n}", retained=n * MB) for n in range(5)]
    lines = terminal.figures(Report(SESSION, tuple(results)), 100, choice_of("2:retained"), "see x")
    texts = [line.text for line in lines]
    assert texts[2].startswith("tests/test_a.py::test_4 ")
    assert texts[3].startswith("tests/test_a.py::test_3 ")
    assert texts[4] == "3 of 5 regions with a lower retained are left out: see x"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_legend_explains_the_printed_columns_only(width):
    """A column for which there is no room is not explained."""
    lines = terminal.figures(Report(SESSION, tuple(many(3))), width)
    columns = lines[0].text.split()
    legend = " ".join(line.text for line in lines).partition("Sizes are in")[2]
    meanings = {part.strip().partition(":")[0].split()[-1] for part in legend.split(";")}
    assert meanings <= set(columns)
    assert ("increase" in meanings) == ("increase" in columns)


def test_regions_that_were_not_judged_are_counted_after_ten():
    """What was not judged for one reason names ten regions; broken limits name all of them."""
    unjudged = [region(f"test_{n}", limits=[RESERVE]) for n in range(30)]
    texts = [line.text for line in terminal.findings(unjudged)]
    assert len(texts) == 12
    assert texts[10] == "not judged in 20 more regions"
