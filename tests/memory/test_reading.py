"""JSON reports are read back unchanged, or refused with the file's name and the place in it."""

import json
import re
from dataclasses import replace

import pytest
from reports_made import LOSSES, SESSION, hostile, many, one_of_each

from pytest_cka_memory import ReportError
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.stored import json_report as json_reader
from pytest_cka_memory.stored import json_report as json_writer


@pytest.fixture
def file(tmp_path):
    return tmp_path / "r.json"


@pytest.mark.parametrize(
    "report",
    [Report(SESSION, ()), one_of_each(), hostile(), many(20)],
    ids=["empty", "each", "hostile", "many"],
)
def test_a_written_report_is_read_back_unchanged(file, report):
    """A report that was written is read back with every field equal."""
    file.write_text(json_writer.render(report), encoding="utf-8")
    assert json_reader.read(file) == report


def test_a_byte_order_mark_is_ignored(file):
    """A byte order mark, which editors and shells on Windows write, is ignored."""
    file.write_text(json_writer.render(one_of_each()), encoding="utf-8-sig")
    assert json_reader.read(file) == one_of_each()


def test_unknown_keys_of_newer_versions_are_accepted(file):
    """Unknown keys of newer versions are kept in a session and ignored in a region."""
    plain = json.loads(json_writer.render(one_of_each()))
    plain["regions"][0]["new_bytes"] = plain["session"]["new"] = 1
    plain["regions"][0]["timeline"][0]["new"] = None
    file.write_text(json.dumps(plain), encoding="utf-8")
    assert json_reader.read(file) == replace(one_of_each(), session={**SESSION, "new": 1})


def test_groups_of_an_older_version_have_defaults_for_what_it_did_not_write(file):
    """Older reports do not know a group's expression, nor if it is older than its region."""
    plain = json.loads(json_writer.render(one_of_each()))
    for name in ("retained", "grown"):
        (group,) = plain["regions"][1][name]
        del group["code"], group["before_region"], group["inside"]
    file.write_text(json.dumps(plain), encoding="utf-8")
    read = json_reader.read(file).results[1].record
    assert read.retained == read.grown == (replace(LOSSES, code=None),)


def test_missing_session_keys_are_read_as_none(file):
    """A missing key of the session is read as None, because the meter may be unknown to us."""
    file.write_text('{"schema": "pytest-cka-memory/1", "session": {}, "regions": []}')
    assert json_reader.read(file).session == {
        **dict.fromkeys(SESSION),
        "notes": [],
        "conditions": {},
    }


def damaged(place, value):
    """Return a report with one value replaced or removed."""
    plain = json.loads(json_writer.render(one_of_each()))
    inner = plain
    for step in place[:-1]:
        inner = inner[step]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return json.dumps(plain).encode()


WHOLE = json_writer.render(one_of_each()).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty; write a report with pytest --cka-memory-json=PATH"),
        (b" \n", "the file is empty"),
        (WHOLE[:-3], "line 31, column 3: Expecting ',' delimiter"),
        (b'{\n "a": "\xff"}', "line 2: not UTF-8 (invalid start byte)"),
        (b"[" * 100_000, "nested more deeply than any report"),
        (b"9" * 5_000, "a number with thousands of digits, which no figure has"),
        (
            b"[1]",
            "not a report: the key 'schema' is missing; a report has 'pytest-cka-memory/1' there",
        ),
        (b'{"schema": null}', "not a report: its schema is 'None', not"),
        (b'{"schema": "pytest-cka-memory/2"}', "a newer pytest-cka-memory wrote it; upgrade"),
        (b'{"schema": "pytest-cka-memory/1"}', "regions is None; expected a list"),
        (
            WHOLE.replace(b"4.0", b"NaN"),
            "NaN is not valid JSON; a figure is a finite number or null",
        ),
        (damaged(["regions"], {}), "regions is {}; expected a list"),
        (damaged(["regions", 1], None), "regions[1] is None; expected an object"),
        (
            damaged(["regions", 1, "peak_bytes"], KeyError),
            "regions[1].peak_bytes is missing; expected a value",
        ),
        (
            damaged(["regions", 1, "peak_bytes"], True),
            "regions[1].peak_bytes is True; expected a whole number",
        ),
        (
            damaged(["regions", 1, "peak_bytes"], 2**63),
            "regions[1].peak_bytes is 9223372036854775808; expected a whole number",
        ),
        (
            damaged(["regions", 1, "peak_bytes"], -1),
            "regions[1].peak_bytes is -1; expected a whole number of bytes of at least 0",
        ),
        (
            damaged(["regions", 1, "garbage_end_bytes"], -1),
            "regions[1].garbage_end_bytes is -1; expected a whole number of bytes of at least 0",
        ),
        (
            WHOLE.replace(b'"peak_bytes": ', b'"peak_bytes": 1, "peak_bytes": ', 1),
            "'peak_bytes' is given twice in the region of 't.py::test_kept'; write a report",
        ),
        (
            WHOLE.replace(b'"regions": ', b'"regions": [], "regions": ', 1),
            "'regions' is given twice; write a report",
        ),
        (
            damaged(["regions", 1, "timeline", 2, "size"], "64"),
            "regions[1].timeline[2].size is '64'; expected a whole number",
        ),
        (
            damaged(["regions", 1, "timeline", 2], None),
            "regions[1].timeline[2] is None; expected an object",
        ),
        (
            damaged(["regions", 1, "timeline", 2, "size"], KeyError),
            "regions[1].timeline[2].size is missing; expected a value",
        ),
        (
            damaged(["regions", 1, "timeline", 2, "peak_bytes"], 2**63),
            "regions[1].timeline[2].peak_bytes is 9223372036854775808",
        ),
        (
            damaged(["regions", 1, "retained", 0, "created_at", 1], 1),
            "regions[1].retained[0].created_at[1] is 1; expected a text",
        ),
        (
            damaged(["regions", 1, "breaches", 0, "measured_bytes"], "36"),
            "regions[1].breaches[0].measured_bytes is '36'; expected a number",
        ),
        (damaged(["session", "notes"], 1), "session.notes is 1; expected a list"),
        (damaged(["unmeasured", "odd items"], "2"), "unmeasured.odd items is '2'"),
        (damaged(["unmeasured"], [2]), "unmeasured is [2]; expected an object"),
    ],
    ids=[
        *("empty", "blank", "cut-off", "latin-1", "deep", "long-number", "list", "no-schema"),
        *("newer", "schema-alone", "nan", "regions", "region", "missing", "bool", "too-large"),
        *("negative", "negative-optional", "key-twice", "key-of-the-report-twice"),
        *("size", "no-sample", "no-size", "sample", "frame", "measured", "notes", "count"),
        "no-counts",
    ],
)
def test_a_file_that_is_not_a_report_is_refused(file, content, problem):
    """The error for a file that is not a report has its name, the place, and what is expected."""
    file.write_bytes(content)
    with pytest.raises(ReportError) as refused:
        json_reader.read(file)
    assert str(refused.value).startswith(f"cannot read {file}: ")
    assert problem in str(refused.value)
    assert file.read_bytes() == content


def test_a_number_that_overflows_is_refused(file):
    """JSON allows 1e999, which Python reads as infinity; such a number is refused."""
    file.write_bytes(re.sub(rb'"start_bytes": \d+', b'"start_bytes": 1e999', WHOLE, count=1))
    with pytest.raises(
        ReportError, match=r"regions\[0\]\.start_bytes is inf; expected a whole number"
    ):
        json_reader.read(file)


@pytest.mark.parametrize(
    ("place", "problem"),
    [("none.json", "No such file"), ("", "Is a directory"), ("a\0b", "null")],
    ids=["missing", "folder", "no-name"],
)
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, place, problem):
    """The error for a file that cannot be opened gives the system's reason."""
    with pytest.raises(ReportError, match=problem):
        json_reader.read(tmp_path / place)


def test_a_file_larger_than_any_report_is_refused(file, monkeypatch):
    """Reading stops at the limit, so that a file without an end, such as /dev/zero, is refused."""
    monkeypatch.setattr(json_reader, "MOST_BYTES", 2**20)
    file.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ReportError, match="larger than 1 MB; refusing to read it"):
        json_reader.read(file)
