"""Report files are written whole or not at all; the text of the JSON report."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cka_memory import RegionRecord, ReportError
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result, judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import files
from pytest_cka_memory.stored import json_report as json_writer


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    """A report is written whole, in UTF-8; missing folders are made, and nothing else is left."""
    path = tmp_path / "deep" / "er" / "report.json"
    files.write_whole(path, "größer ▁█\n")
    assert path.read_text(encoding="utf-8") == "größer ▁█\n"
    assert names_in(path.parent) == ["report.json"]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    """A new report replaces the old one, and is not appended to it."""
    path = tmp_path / "report.json"
    path.write_text("old, and much longer than the new one")
    files.write_whole(path, "new")
    assert path.read_text() == "new"


def test_an_old_file_is_kept_if_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not destroy the last good report, so it is kept if writing fails."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ReportError, match=r"cannot write .*report\.json: No space left on device"):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["report.json"]


def test_an_old_file_is_kept_if_writing_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while writing keeps the old report, and leaves no temporary file."""

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["report.json"]


def test_text_that_cannot_be_encoded_is_escaped(tmp_path: Path) -> None:
    """File names may have any bytes, which are escaped; a JSON reader restores them."""
    path = tmp_path / "report.json"
    files.write_whole(path, json.dumps("\udc80", ensure_ascii=False))
    assert json.loads(path.read_text(encoding="utf-8")) == "\udc80"


@pytest.mark.parametrize("use", [files.check_writable, lambda p: files.write_whole(p, "x")])
def test_a_path_below_a_file_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """A path below a file is refused with the path and the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write .*report\.json: (Not a dir|File exists)"):
        use(tmp_path / "file" / "report.json")


def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    """A path that is a folder is refused, and no temporary file is left beside it."""
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ReportError, match=r"cannot write .*report\.json: Is a directory"):
        files.write_whole(tmp_path / "report.json", "x")
    assert names_in(tmp_path) == ["report.json"]


def test_checking_a_path_creates_its_folder_but_no_file(tmp_path: Path) -> None:
    """Before any test, a path is checked and its folder created, but the old report is kept."""
    files.check_writable(tmp_path / "new" / "report.json")
    assert names_in(tmp_path / "new") == []


def test_the_json_report_has_its_keys_in_order_and_is_readable(
    record: Callable[..., RegionRecord],
) -> None:
    """A JSON report has its keys in a fixed order, is indented, and keeps non-ASCII characters."""
    result = judge("t.py::t", record(label="größer"), [limit_from_marker("zero_retention", (), {})])
    text = json_writer.render(
        Report({"device": "cpu"}, (result,), ("t.py::lost",), {"odd items": 2})
    )
    assert text.startswith(
        '{\n "schema": "pytest-cka-memory/1",\n "session": {\n  "device": "cpu"\n },\n'
        ' "regions": [\n'
    )
    assert text.endswith(
        ' "missing": [\n  "t.py::lost"\n ],\n "unmeasured": {\n  "odd items": 2\n }\n}\n'
    )
    assert '"label": "größer"' in text
    read = json.loads(text)
    assert [Result.from_dict(region) for region in read["regions"]] == [result]


def test_a_report_without_regions_has_every_key() -> None:
    """A session that measured nothing writes a valid report with every key."""
    assert json.loads(json_writer.render(Report({}, ()))) == {
        "schema": "pytest-cka-memory/1",
        "session": {},
        "regions": [],
        "problems": [],
        "missing": [],
        "unmeasured": {},
    }


def test_a_figure_of_nan_is_refused(record: Callable[..., RegionRecord]) -> None:
    """NaN is not valid JSON, so a figure of NaN is refused."""
    result = judge("t.py::t", record(retained_bytes=float("nan")), [])
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        json_writer.render(Report({}, (result,)))
