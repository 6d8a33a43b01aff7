"""Damaged baseline files are read or refused with a line number; refused files are not changed.

Each test tries a hundred files. To try thousands, run
``CKA_MEMORY_FUZZ=5000 pytest tests/memory/test_baseline_fuzz.py``.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports_made import GPU

from pytest_cka_memory import RegionRecord
from pytest_cka_memory.core.conditions import Fingerprint, fingerprint_of
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.errors import BaselineError
from pytest_cka_memory.stored import BaselinePlan
from pytest_cka_memory.stored import baselines as baseline_file
from pytest_cka_memory.stored.baselines import BaselineKey, Entries
from pytest_cka_memory.stored.update import BaselineOutput

fuzz = settings(max_examples=int(os.environ.get("CKA_MEMORY_FUZZ", "100")), deadline=None)

FACTS = {"device": "cpu", "device_name": "a CPU", "meter": "exact", "torch": "2.15", "cuda": None}
CPU = fingerprint_of(FACTS)
MEASURED = Result(
    "new.py::test",
    RegionRecord(
        label="", completed=True, start_bytes=0, end_bytes=0, peak_bytes=7, retained_bytes=0
    ),
)
REPORT = Report(
    {}, (MEASURED,), collected=frozenset([MEASURED.nodeid]), facts={MEASURED.worker: FACTS}
)

sizes = st.integers(0, 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
fingerprints = st.builds(Fingerprint, names, names, st.none() | names, st.none() | names)
figures = st.fixed_dictionaries(
    {
        "peak_increase_bytes": sizes,
        "retained_bytes": sizes,
        "growth_bytes_per_batch": st.none() | sizes,
        "reserved_increase_bytes": st.none() | sizes,
    }
)
facts = st.dictionaries(names, names, min_size=1, max_size=3)
conditions = st.none() | facts.map(lambda found: tuple(sorted(found.items())))
keys = st.builds(BaselineKey, names, names, fingerprints, conditions)
baselines = st.dictionaries(keys, figures, max_size=4)

GOOD = baseline_file.render(
    {
        BaselineKey("a.py::t", "x", CPU): dict.fromkeys(
            ("peak_increase_bytes", "retained_bytes", "growth_bytes_per_batch"), 4096
        )
        | {"reserved_increase_bytes": None},
        BaselineKey("größe.py::t[1]", "", GPU): {
            "peak_increase_bytes": 2**40,
            "retained_bytes": 0,
            "growth_bytes_per_batch": None,
            "reserved_increase_bytes": 2**21,
        },
    }
)
LAYOUTS = (
    GOOD,
    GOOD.replace("\n", "\r\n"),
    json.dumps(json.loads(GOOD), indent=2),
    baseline_file.render({}),
)
HOSTILE = (
    *(
        b"",
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b'"',
        b"\\",
        b"\n",
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"0.5", b"null", b"true", b"1" * 5000, b"[" * 5000),
    *(b'{"a":' * 5000, b'"\\ud800"', b"\n<<<<<<< HEAD\n", b"\n=======\n", b"\n>>>>>>> main\n"),
    *(b"pytest-cka-memory-baseline/2", b'"nodeid": "twice", ', b'{"schema": 1}', b"\xe2\x80\xa8"),
)


@st.composite
def damaged_bytes(draw: st.DrawFn) -> bytes:
    """A good file in which one to three ranges of bytes are replaced."""
    content = draw(st.sampled_from(LAYOUTS)).encode()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(
            st.integers(start, min(len(content), start + draw(st.sampled_from((0, 9, 999)))))
        )
        replacement = draw(st.sampled_from(HOSTILE) | st.binary(max_size=8))
        content = content[:start] + replacement + content[end:]
    return content


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def replaced_value(draw: st.DrawFn) -> bytes:
    """A good file in which one JSON value is replaced by another."""
    header, *regions = json.loads(GOOD)
    region = draw(st.sampled_from(regions))
    key = draw(st.sampled_from([*region, *header]) | names)
    place = draw(st.sampled_from(("value", "key", "region", "header", "file")))
    other = draw(anything)
    if place == "value":
        region[key] = other
    elif place == "key":
        region.pop(key, None)
    elif place == "region":
        regions.append(other)
    whole: Any = other if place == "file" else [other if place == "header" else header, *regions]
    return json.dumps(whole, indent=draw(st.none() | st.just(1))).encode()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "baseline.json"


def update(path: Path) -> BaselineOutput:
    """The output of a session that runs with --cka-memory-update-baseline."""
    return BaselineOutput(BaselinePlan(path, path.parent, updating=True))


def read_or_refused(path: Path, content: bytes) -> Entries | None:
    """Return the entries that a session reads from `content`, or None if it refuses them."""
    path.write_bytes(content)
    try:
        update(path).check()
    except BaselineError as error:
        message = str(error)
        line = re.match(rf"cannot use {re.escape(str(path))}, line (\d+): .", message)
        assert line is not None, message
        assert 1 <= int(line[1]) <= content.count(b"\n") + 1
        assert "\n" not in message
        assert len(message) < 200 + len(str(path))
        return None
    return baseline_file.read(path)


def check_update(path: Path, content: bytes) -> None:
    """Check that an update keeps refused files unchanged and all regions of other files."""
    entries = read_or_refused(path, content)
    if entries is None:
        with pytest.raises(BaselineError):
            update(path).write(REPORT)
        assert path.read_bytes() == content
    else:
        update(path).write(REPORT)
        after = baseline_file.read(path)
        new = BaselineKey(MEASURED.nodeid, "", CPU)
        assert after[new]["peak_increase_bytes"] == 7
        assert {key: after[key] for key in entries if key != new} == {
            key: entries[key] for key in entries if key != new
        }
        assert path.read_text("utf-8") == baseline_file.render(after)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@fuzz
@given(content=damaged_bytes())
def test_damaged_file_is_read_or_refused(path: Path, content: bytes) -> None:
    """A file in which bytes were removed, overwritten or inserted is read, or refused with an
    error.
    """
    check_update(path, content)


@fuzz
@given(content=replaced_value())
def test_file_with_a_replaced_value_is_read_or_refused(path: Path, content: bytes) -> None:
    """A file in which any value was replaced by another is read, or refused with an error."""
    check_update(path, content)


@fuzz
@given(
    content=st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_random_content_is_refused(path: Path, content: bytes) -> None:
    """Random bytes and random text are never read as a baseline."""
    assert read_or_refused(path, content) is None


@fuzz
@given(entries=baselines)
def test_written_baseline_is_read_back(path: Path, entries: Entries) -> None:
    """A baseline whose tests and labels have any characters is read back as it was written."""
    content = baseline_file.render(entries)
    assert baseline_file.parse(content) == entries
    assert content.count("\n") == len(entries) + 2
    assert read_or_refused(path, content.encode()) == entries
