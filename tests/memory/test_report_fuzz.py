"""Damaged report files: every command exits with 0, 1 or 2 and does not change the file.

To try thousands: ``FUZZ_EXAMPLES=5000 pytest tests/memory/test_report_fuzz.py``.
"""

import io
import json
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports_made import hostile, one_of_each

from pytest_cka_memory.cli.main import OK, REGRESSION, UNUSABLE, main
from pytest_cka_memory.stored import json_report as json_writer

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
WHOLE = [json_writer.render(one_of_each()), json_writer.render(hostile())]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), 10**400, -1, 0]),
    st.floats(),
    st.text(),
    st.sampled_from(
        ["pytest-cka-memory/1", "pytest-cka-memory/2", "\ud800", "\x1b[2J", "</script>"]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@st.composite
def damaged_values(draw):
    """A report with some values replaced, removed or added."""
    data = json.loads(draw(st.sampled_from(WHOLE)))
    for _ in range(draw(st.integers(1, 4))):
        inner, depth = data, draw(st.integers(1, 7))
        for step in range(depth):
            if not isinstance(inner, (dict, list)) or not inner:
                break
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw(st.sampled_from(keys))
            if step == depth - 1 or not isinstance(inner[key], (dict, list)):
                _damage(draw, inner, key)
                break
            inner = inner[key]
    return json.dumps(data).encode()


def _damage(draw, inner, key):
    kind = draw(st.sampled_from(["replace", "drop", "add"]))
    if kind == "replace":
        inner[key] = draw(values)
    elif kind == "drop":
        del inner[key]
    elif isinstance(inner, dict):
        inner[draw(st.text())] = draw(values)
    else:
        inner.append(draw(values))


@st.composite
def damaged_bytes(draw):
    """A report with a piece cut out, overwritten or repeated."""
    content = draw(st.sampled_from(WHOLE)).encode(errors="backslashreplace")
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 200)))
    piece = draw(st.one_of(st.binary(max_size=20), st.just(content[start:end] * 2)))
    tail = content[end:] if draw(st.booleans()) else b""
    return content[:start] + piece + tail


damaged = st.one_of(damaged_values(), damaged_bytes(), values.map(lambda v: json.dumps(v).encode()))


def commands(path, good):
    yield ["show", path]
    yield ["show", path, "--format=markdown"]
    yield ["compare", path, good, "--format=table"]
    yield ["compare", good, path, "--format=markdown"]
    yield ["compare", path, path, "--format=json", "--tolerance=0%"]
    yield ["html", path, "-o", f"{path}.html"]
    yield ["html", path, "-o", path]


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(content=damaged)
def test_every_command_handles_every_damaged_file_without_a_traceback(content):
    """Each command reads a damaged file, or exits with status 2 and a message, but no traceback.

    The files are unchanged.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, good = Path(folder, "damaged.json"), Path(folder, "good.json")
        good.write_text(WHOLE[0], encoding="utf-8")
        file.write_bytes(content)
        for command in commands(str(file), str(good)):
            out, errors = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(errors):
                status = main(command)
            assert status in (OK, REGRESSION, UNUSABLE)
            assert (status == UNUSABLE) == bool(errors.getvalue())
            assert "\x1b" not in out.getvalue() + errors.getvalue()
            assert file.read_bytes() == content
            assert good.read_text(encoding="utf-8") == WHOLE[0]


@pytest.mark.parametrize("whole", WHOLE, ids=["each", "hostile"])
def test_the_undamaged_files_are_read(whole, tmp_path):
    """The files are read before they are damaged, so that the fuzz tests test the damage."""
    path = tmp_path / "r.json"
    path.write_text(whole, encoding="utf-8")
    with redirect_stdout(io.StringIO()):
        assert main(["show", str(path)]) == OK
