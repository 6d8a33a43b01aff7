"""``compare --html``: what is new at the peak, by line, module and kind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reports_made import HOSTILE, SESSION, record

from pytest_cka_memory.cli.main import main
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.two_reports import PeakDifference, compare, peak_differences
from pytest_cka_memory.core.verdicts import Result, parse_tolerance
from pytest_cka_memory.reports import comparison
from pytest_cka_memory.stored import json_report
from pytest_cka_memory.units import MB

HIDDEN = Holding(
    bytes=8 * MB,
    count=1,
    created_at=("net.py:11 in Block.forward",),
    code="relu(hidden)",
    module="net.0",
    kind="activations",
)
NEW = replace(HIDDEN, bytes=4 * MB, code="hidden * 2", created_at=("net.py:12 in Block.forward",))
OLDER = Holding(bytes=MB, count=0, kind="parameters", before_region=True)


def report_of(*at_peak: Holding, **figures: int) -> Report:
    return Report(SESSION, (Result("t.py::test_one", record(at_peak=at_peak, **figures)),))


def differences(old: Report, new: Report) -> tuple[tuple[PeakDifference, ...], int]:
    return peak_differences(old, new, compare(old, new, parse_tolerance("5%")))


def test_a_line_that_has_moved_is_the_same() -> None:
    """The same expression on another line of its function is no difference."""
    moved = replace(HIDDEN, created_at=("net.py:99 in Block.forward",))
    assert differences(report_of(HIDDEN), report_of(moved)) == ((), 0)


def test_what_is_new_comes_first_and_what_is_gone_last() -> None:
    """Changes are sorted by their rise: new lines first, then larger ones, then what is gone."""
    old = report_of(HIDDEN, replace(NEW, code="gone"), OLDER)
    new = report_of(replace(HIDDEN, bytes=9 * MB), NEW, OLDER)
    (found,), unknown = differences(old, new)
    assert unknown == 0
    shown = [(it.origin.code, it.old_bytes, it.new_bytes) for it in found.changes]
    assert shown == [
        ("hidden * 2", 0, 4 * MB),
        ("relu(hidden)", 8 * MB, 9 * MB),
        ("gone", 4 * MB, 0),
    ]
    assert found.changes[0].line == "net.py:12 in Block.forward"


def test_changes_add_up_to_the_change_of_the_peak() -> None:
    """If the groups of both reports add up to their peaks, the changes add up to the difference."""
    old = report_of(HIDDEN, OLDER, start_bytes=MB, peak_bytes=9 * MB)
    new = report_of(
        HIDDEN, NEW, replace(OLDER, bytes=2 * MB), start_bytes=2 * MB, peak_bytes=14 * MB
    )
    (found,), _ = differences(old, new)
    assert sum(change.rise_bytes for change in found.changes) == found.new_bytes - found.old_bytes


def test_regions_without_a_list_are_counted_as_not_known() -> None:
    """A region of which one report has no list of its peak is counted, not shown as all new."""
    assert differences(report_of(), report_of(NEW)) == ((), 1)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Report], str]:
    def write(name: str, report: Report) -> str:
        path = tmp_path / name
        path.write_text(json_report.render(report), encoding="utf-8")
        return str(path)

    return write


def test_compare_writes_a_page_beside_what_it_prints(written, tmp_path: Path, capsys) -> None:
    """``compare --html`` prints the table as always, and writes the page."""
    old, new = written("a.json", report_of(HIDDEN)), written("b.json", report_of(HIDDEN, NEW))
    page = tmp_path / "page.html"
    assert main(["compare", old, new, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("compared: none of 1 region")
    text = page.read_text(encoding="utf-8")
    assert "<code>net.py:12 in Block.forward</code><br><code>hidden * 2</code>" in text
    assert "in <code>net.0</code>" in text
    assert "+4.00 <span class='verdict breach'>new</span>" in text


def test_compare_does_not_overwrite_its_input(written, capsys) -> None:
    """A page cannot replace one of the reports that are compared."""
    old, new = written("a.json", report_of(HIDDEN)), written("b.json", report_of(NEW))
    assert main(["compare", old, new, "--html", new]) == 2
    assert "--html: " in capsys.readouterr().err


def test_page_escapes_what_tests_and_code_say() -> None:
    """No text of a report is taken for HTML."""
    bad = replace(NEW, created_at=(HOSTILE,), code=HOSTILE, module=HOSTILE)
    old, new = report_of(HIDDEN), report_of(bad)
    found = compare(old, new, parse_tolerance("5%"))
    page = comparison.as_html(found, *peak_differences(old, new, found))
    assert "<img" not in page
    assert "&lt;img" in page
