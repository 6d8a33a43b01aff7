"""The file of a history: what a session adds, and how lines that are wrong are refused."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from reports_made import SESSION, kept, record

from pytest_cka_memory.cli.main import UNUSABLE, main
from pytest_cka_memory.core.conditions import fingerprint_of
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.reports import files
from pytest_cka_memory.stored import history as history_file
from pytest_cka_memory.stored.history import SCHEMA, HistoryOutput, HistorySession

SESSIONS = [
    HistorySession("a" * 40, False, "2026-01-02T00:00:00+00:00", ()),
    HistorySession(None, False, "2026-01-01T00:00:00+00:00", ()),
]
OTHER_CARD = {**SESSION, "device_name": "H200"}
REPORT = Report(
    SESSION,
    (
        kept("t.py::test_a", "part", retained_bytes=7),
        replace(kept("t.py::test_b"), worker="gw1"),
        Result("t.py::test_fails", record(completed=False), outcome="failed"),
    ),
    facts={"main": SESSION, "gw1": OTHER_CARD},
)


def test_session_is_one_line_with_the_figures_of_each_device() -> None:
    """A session is one line with figures per device, without those of aborted regions."""
    session = history_file.session_of(REPORT, "c" * 40, uncommitted=True)
    line = session.to_line()
    assert "\n" not in line
    data = json.loads(line)
    assert data["schema"] == SCHEMA
    assert (data["commit"], data["uncommitted"]) == ("c" * 40, True)
    assert data["date"] == SESSION["started"]
    assert [device["device"] for device in data["devices"]] == ["A100", "H200"]
    assert data["devices"][0]["torch"] == fingerprint_of(SESSION).torch
    (region,) = data["devices"][0]["regions"]
    assert (region["nodeid"], region["label"]) == ("t.py::test_a", "part")
    assert region["figures"]["retained_bytes"] == 7
    assert region["figures"]["reserved_increase_bytes"] is None


def test_written_lines_are_read_back_by_date(tmp_path: Path) -> None:
    """Lines are read in order of date; merged branches may have mixed them, or left empty lines."""
    path = tmp_path / "h.jsonl"
    session = history_file.session_of(REPORT, None, uncommitted=False)
    for each in (*SESSIONS, session):
        files.append_line(path, each.to_line())
    path.write_text(path.read_text("utf-8") + "\n", "utf-8")
    assert history_file.read(path) == [SESSIONS[1], *sorted([SESSIONS[0], session], key=_date)]


def _date(session: HistorySession) -> str:
    return session.date


GOOD = SESSIONS[0].to_line()
WRONG = {
    "cut off": (GOOD[:30], "not valid JSON: "),
    "foreign": (
        '{"a": 1}',
        "is not a line of a history file, because its schema is not 'pytest-cka-",
    ),
    "a report": ('{"schema": "pytest-cka-memory/1"}', "is not a line of a history file"),
    "a number": ("1", "1 is not a line of a history file"),
    "newer": (
        '{"schema": "pytest-cka-memory-history/9"}',
        "its schema is pytest-cka-memory-history/9, but this plugin reads "
        "pytest-cka-memory-history/1",
    ),
    "no date": (json.dumps({"schema": SCHEMA, "commit": None}), "uncommitted is missing; expected"),
    "text as figure": (
        GOOD.replace('"devices": []', '"devices": [{"device": 5}]'),
        "devices[0].device is 5; expected a text",
    ),
    "negative figure": (
        GOOD.replace(
            '"devices": []',
            '"devices": [{"device": "cpu", "meter": "m", "torch": null, "cuda": null, "regions": '
            '[{"nodeid": "t", "label": "", "figures": {"retained_bytes": -1}}]}]',
        ),
        "retained_bytes is -1; expected a whole number of bytes of at least 0",
    ),
    "key given twice": (GOOD.replace('"devices"', '"date": "2026", "devices"'), "given twice"),
    "merge": (
        "<<<<<<< HEAD",
        "the file has an unresolved merge conflict ('<<<<<<< HEAD'); keep the lines of",
    ),
    "merge on Windows": ("=======\r", "the file has an unresolved merge conflict ('=======')"),
    "nested": ("[" * 100_000, "the line has values that no session writes"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG)
def test_wrong_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    """A file with a line that is not a session is not used: the error names the line."""
    path = tmp_path / "h.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n", "utf-8")
    with pytest.raises(ReportError) as error:
        HistoryOutput(path, tmp_path).check()
    assert str(error.value).startswith(f"cannot use {path}, line 2: ")
    assert message in str(error.value)
    assert main(["trend", str(path)]) == UNUSABLE
    assert "line 2: " in capsys.readouterr().err
    assert path.read_bytes().decode("utf-8") == f"{GOOD}\n{line}\n{GOOD}\n"


def test_line_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(b"\xff\n")
    with pytest.raises(ReportError, match="line 1: not UTF-8"):
        history_file.read(path)
    with pytest.raises(ReportError, match=r"cannot read .*no\.jsonl: No such file"):
        history_file.read(tmp_path / "no.jsonl")
    with pytest.raises(ReportError, match="not a regular file"):
        history_file.read(tmp_path)


def test_lines_of_sessions_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    """Processes that write at the same time each add a whole line."""
    path = tmp_path / "new" / "h.jsonl"
    lines = [f"{number}:" + "x" * 10_000 for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda line: files.append_line(path, line), lines))
    assert sorted(path.read_text("utf-8").splitlines()) == sorted(lines)


def test_line_is_added_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the file is as before; a line that was cut off earlier stays."""
    path = tmp_path / "h.jsonl"
    path.write_text("cut off", "utf-8")
    files.append_line(path, "whole")
    assert path.read_text("utf-8") == "cut off\nwhole\n"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match=r"cannot write .*h\.jsonl: No space left on device"):
        files.append_line(path, "lost")
    assert path.read_text("utf-8") == "cut off\nwhole\n"


def test_session_that_measured_nothing_adds_no_line(tmp_path: Path) -> None:
    """A session that measured nothing adds no line to the history."""
    output = HistoryOutput(tmp_path / "h.jsonl", tmp_path)
    output.check()
    assert output.write(Report(SESSION, ())) == (
        "history: not written, because no region was measured"
    )
    assert not output.path.exists()
