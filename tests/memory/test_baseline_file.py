"""Baseline files are read back as they were written; errors name the line that is wrong."""

import json
from pathlib import Path

import pytest
from reports_made import CPU, GPU

from pytest_cka_memory.errors import BaselineError
from pytest_cka_memory.stored import baselines as baseline_file
from pytest_cka_memory.stored.baselines import BaselineKey

FIGURES = {
    "peak_increase_bytes": 4096,
    "retained_bytes": 0,
    "growth_bytes_per_batch": None,
    "reserved_increase_bytes": None,
}
GOOD = (
    '[ {"schema": "pytest-cka-memory-baseline/1"}\n'
    ', {"nodeid": "a.py::t", "label": "x", "device": "NVIDIA H200", "meter": "allocator", '
    '"torch": "2.15", "cuda": "13.2", "peak_increase_bytes": 4096, "retained_bytes": 0, '
    '"growth_bytes_per_batch": 0, "reserved_increase_bytes": 2097152}\n'
    ', {"nodeid": "a.py::t", "label": "x", "device": "cpu", "meter": "exact", '
    '"torch": "2.15", "cuda": null, "peak_increase_bytes": 4096, "retained_bytes": 0, '
    '"growth_bytes_per_batch": null, "reserved_increase_bytes": null}\n'
    "]\n"
)
ENTRIES = {
    BaselineKey("a.py::t", "x", CPU): FIGURES,
    BaselineKey("a.py::t", "x", GPU): {
        **FIGURES,
        "growth_bytes_per_batch": 0,
        "reserved_increase_bytes": 2097152,
    },
}


def test_file_is_sorted_and_has_one_line_per_region() -> None:
    """A baseline file has one sorted line per region, in whatever order they were measured."""
    assert baseline_file.render(ENTRIES) == GOOD
    assert baseline_file.render(dict(reversed(ENTRIES.items()))) == GOOD


def test_written_file_is_read_back() -> None:
    """All regions and figures of a baseline file that was written are read back."""
    assert baseline_file.parse(GOOD) == ENTRIES


def test_file_is_json() -> None:
    """A baseline file is a JSON list of a header and the regions, so other tools can read it."""
    header, *regions = json.loads(GOOD)
    assert header == {"schema": baseline_file.SCHEMA}
    assert [region["device"] for region in regions] == ["NVIDIA H200", "cpu"]


@pytest.mark.parametrize("indent", [None, 2], ids=["one-line", "indented"])
def test_any_json_layout_is_read(indent: int | None) -> None:
    """A baseline is read in any JSON layout, because a formatter may have changed it."""
    assert baseline_file.parse(json.dumps(json.loads(GOOD), indent=indent)) == ENTRIES


def test_file_with_windows_line_ends_is_read() -> None:
    """A baseline file is read with Windows line ends, which version control may write."""
    assert baseline_file.parse(GOOD.replace("\n", "\r\n")) == ENTRIES


def test_file_without_regions_is_read() -> None:
    """A baseline file from which a user has deleted all regions is read."""
    assert baseline_file.parse(baseline_file.render({})) == {}


def test_new_region_adds_one_line_and_changes_no_other() -> None:
    """A new region adds a line to a baseline and changes no other, so branches merge cleanly."""
    for nodeid in ("a.py::a", "a.py::tt", "z.py::t"):
        more = baseline_file.render({**ENTRIES, BaselineKey(nodeid, "", CPU): FIGURES}).splitlines()
        (line,) = set(more) - set(GOOD.splitlines())
        more.remove(line)
        assert more == GOOD.splitlines()


REGION = GOOD.splitlines()[2][2:]
BYTES = "expected a whole number"
WRONG = {
    "empty": ("", "line 1: the file is not a baseline file; such a file begins with"),
    "a report": (
        '{\n "schema": "pytest-cka-memory/1"\n}',
        "line 1: the file is not a baseline file",
    ),
    "no list": ("null", "line 1: the file is not a baseline file"),
    "empty list": ("[]", "line 1: not valid JSON: Expecting value"),
    "no header": (f"[{REGION}]", "line 1: the file is not a baseline file"),
    "foreign schema": ('[ {"schema": "other/1"}\n]', "line 1: the file is not a baseline file"),
    "newer schema": (
        GOOD.replace("baseline/1", "baseline/2"),
        "line 1: its schema is pytest-cka-memory-baseline/2, but this plugin reads "
        "pytest-cka-memory-baseline/1; upgrade the plugin",
    ),
    "cut off after a region": (GOOD[:-3], "line 3: cut off: the last ']' is missing"),
    "cut off within a text": (GOOD[:60], "line 2: not valid JSON: Unterminated string"),
    "cut off within a region": (GOOD[:-30], "line 3: not valid JSON: "),
    "comma lost": (
        GOOD.replace("\n, ", "\n  "),
        "line 2: not valid JSON: expected ',' or the last ']' here",
    ),
    "comma too many": (GOOD.replace("}\n]", "},\n]"), "line 4: not valid JSON: Expecting value"),
    "two files": (GOOD + GOOD, "line 5: text after the last ']'"),
    "merge": (
        GOOD.replace("\n]", "\n<<<<<<< HEAD\n]"),
        "line 4: the file has an unresolved merge conflict ('<<<<<<< HEAD'); keep the lines of one "
        "side, then measure again with --cka-memory-update-baseline",
    ),
    "merge middle": (
        GOOD + "=======\n",
        "line 5: the file has an unresolved merge conflict ('=======')",
    ),
    "merge on Windows": (
        GOOD + "=======\r\n",
        "line 5: the file has an unresolved merge conflict ('=======')",
    ),
    "nested": (GOOD.replace("4096", "[" * 100_000, 1), "line 2: nested too deeply"),
    "nested, closed": (f"[{'[' * 200}{']' * 200}]", "line 1: the file is not a baseline file"),
    "huge number": (
        GOOD.replace("4096", "9" * 5000, 1),
        "line 2: 999999999999... has too many digits",
    ),
    "too many bytes": (GOOD.replace("4096", str(2**63 + 1), 1), f"; {BYTES}"),
    "negative": (
        GOOD.replace("4096", "-1", 1),
        f"line 2: peak_increase_bytes is -1; {BYTES} of bytes of at least 0",
    ),
    "fraction": (GOOD.replace("4096", "0.5", 1), f"peak_increase_bytes is 0.5; {BYTES}"),
    "beyond floats": (GOOD.replace("4096", "1e999", 1), f"is inf; {BYTES}"),
    "NaN": (GOOD.replace("4096", "NaN", 1), "line 2: NaN is not a number of bytes"),
    "Infinity": (
        GOOD.replace("4096", "-Infinity", 1),
        "line 2: -Infinity is not a number of bytes",
    ),
    "text for bytes": (GOOD.replace("4096", '"4096"', 1), f"is '4096'; {BYTES}"),
    "true for bytes": (GOOD.replace("4096", "true", 1), f"is True; {BYTES}"),
    "no peak": (GOOD.replace("4096", "null", 1), f"peak_increase_bytes is None; {BYTES}"),
    "number for text": (GOOD.replace('"allocator"', "7"), "line 2: meter is 7; expected a text"),
    "null for text": (GOOD.replace('"x"', "null", 1), "line 2: label is None; expected a text"),
    "key missing": (GOOD.replace('"torch": "2.15", ', "", 1), "line 2: 'torch' is missing"),
    "key unknown": (
        GOOD.replace('"torch": "2.15"', '"torch": "2.15", "os": 1', 1),
        "line 2: 'os' is not a key of a region",
    ),
    "key twice": (
        GOOD.replace('"torch": "2.15"', '"torch": "2.15", "torch": "2.9"', 1),
        "line 2: 'torch' is given twice",
    ),
    "region twice": (
        GOOD.replace("\n]", f"\n, {REGION}\n]"),
        "line 4: the same region as line 3; keep one of the two lines",
    ),
    "no region": (GOOD.replace("\n]", "\n, [1]\n]"), "line 4: [1] is not a region"),
    "byte order mark": ("\ufeff" + GOOD, "line 1: the file is not a baseline file"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_error_in_a_file_is_reported_with_its_line(content: str, message: str) -> None:
    """An error in a baseline file is one short sentence with the
    line, and never another exception.
    """
    with pytest.raises(BaselineError) as caught:
        baseline_file.parse(content)
    assert str(caught.value).startswith("line ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_error_names_the_file(tmp_path: Path) -> None:
    """An error in a baseline file begins with its path, and then the line number."""
    path = tmp_path / "baseline.json"
    path.write_text(GOOD + "x")
    with pytest.raises(BaselineError, match=r"cannot use .*baseline\.json, line 5: text after"):
        baseline_file.read(path)


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    """If a baseline file is not UTF-8, the error says in which line."""
    path = tmp_path / "baseline.json"
    path.write_bytes(GOOD.replace("a.py", "ä.py").encode("latin-1"))
    with pytest.raises(BaselineError, match=r"baseline\.json, line 2: not UTF-8"):
        baseline_file.read(path)


def test_missing_file_error_names_the_file(tmp_path: Path) -> None:
    """If a baseline file is missing, the error quotes the reason of the operating system."""
    with pytest.raises(BaselineError, match=r"cannot read .*baseline\.json: No such file"):
        baseline_file.read(tmp_path / "baseline.json")


def test_devices_and_folders_are_not_read(tmp_path: Path) -> None:
    """A device or a folder is not read as a baseline, because that could go on forever."""
    with pytest.raises(BaselineError, match="cannot use /dev/zero: not a regular file"):
        baseline_file.read(Path("/dev/zero"))
    with pytest.raises(BaselineError, match="not a regular file"):
        baseline_file.read(tmp_path)


def test_names_are_written_readably_on_one_line() -> None:
    """In a baseline file, quotes and line ends of names are escaped,
    and non-ASCII letters are not.
    """
    key = BaselineKey('größe.py::t["a\n"]', "ü", CPU)
    content = baseline_file.render({key: FIGURES})
    assert "größe.py" in content
    assert content.count("\n") == 3
    assert baseline_file.parse(content) == {key: FIGURES}
