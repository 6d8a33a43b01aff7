"""Tables and failures fit the terminal, and names in them stay different."""

import re
from dataclasses import replace

import pytest
from reports_made import LOSSES, ZERO, broken, kept, many, record

from pytest_cka_memory.core.two_reports import compare
from pytest_cka_memory.core.verdicts import judge, parse_tolerance
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import comparison, failure, fitted, terminal, wrapped
from pytest_cka_memory.reports.terminal import row_name
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB

LONG = "test_training_step_of_a_large_network"


def texts(results, width):
    return [line.text for line in terminal.table(results, width)[0]]


@pytest.mark.parametrize("width", [80, 100, 132])
def test_table_fits_and_its_names_stay_different(width):
    """A table fits the terminal, and the names of thousands of similar tests stay different."""
    results = many(600).results
    lines = texts(results, width)
    assert max(map(len, lines)) <= width
    rows = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert len(set(rows)) == len({row_name(result).row for result in results}) == 600


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (99, []),
        (98, ["timeline"]),
        (88, ["timeline", "start"]),
        (80, ["timeline", "start", "batches"]),
        (70, ["timeline", "start", "batches", "peak"]),
        (20, ["timeline", "start", "batches", "peak", "increase"]),
    ],
)
def test_columns_are_left_out_by_importance_but_never_a_broken_figure(width, left_out):
    """Columns are left out by importance, but a broken figure is shown even in 20 columns."""
    lines = texts([broken(f"t.py::{LONG}[64]")], width)
    columns = ["batches", "start", "peak", "increase", "retained", "growth/b", "timeline"]
    shown = [column for column in columns if column not in left_out]
    assert lines[0].split() == ["region", *shown, "verdict"]
    last = " ".join(line.strip() for line in lines[4:])
    assert last == (f"(no room for: {', '.join(left_out)})" if left_out else "")


def test_columns_without_a_value_are_left_out_first():
    """A column without values is left out first: without batches, growth gives way to the level."""
    lines = texts([kept(f"t.py::{LONG}", batches=0)], 80)
    assert lines[0].split() == [
        *("region", "start", "peak", "increase", "retained", "growth/b", "verdict")
    ]
    assert not lines[-1].startswith("(no room for")


def test_column_of_the_reserve_stays_if_the_limit_on_its_increase_broke():
    """The column of the reserve stays if the limit on its increase broke, which has no column."""
    reserve = {"reserved_start_bytes": 0, "reserved_peak_bytes": 9 * MB, "reserved_end_bytes": 0}
    limit = limit_from_marker("max_reserved_mb", (1,), {})
    result = judge(f"t.py::{LONG}", record(**reserve), [limit])
    assert texts([result], 40)[0].split() == ["region", "reserved", "verdict"]
    assert texts([replace(result, breaches=())], 40)[0].split() == ["region", "verdict"]


@pytest.mark.parametrize(
    ("names", "room", "shown"),
    [
        (["short", "a"], 8, ["short", "a"]),
        ([f"{LONG}[sgd-1] epoch", f"{LONG}[adamw-10] epoch"], 28,
         ["test_training…k[sgd-1] epoch", "test_traini…[adamw-10] epoch"]),
        (["a" * 30 + "1" + "b" * 30, "a" * 30 + "2" + "b" * 30], 12, None),
        (["a" * 40, "a" * 41, "a" * 40 + "~2"], 12, None),
        ([f"{'a' * n}{'b' * (60 - n)}" for n in range(61)], 9, None),
        ([f"{LONG}[{n:04}]" for n in range(2000)], 8, None),
        ([f"{LONG}[x]"] * 2, 12, ["test_…ork[x]"] * 2),
    ],
    ids=["short", "parameters", "middle", "one-longer", "steps", "thousands", "equal"],
)  # fmt: skip
def test_shortened_names_stay_different(names, room, shown):
    """Shortened names stay different, and equal names stay equal."""
    found = fitted(names, room)
    assert max(map(len, found)) <= room
    assert len(set(found)) == len(set(names))
    assert shown is None or found == shown


@pytest.mark.parametrize(
    ("nodeid", "heading", "row"),
    [
        ("a/test_x.py::test_it[a::b]", "a/test_x.py", "test_it[a::b] train"),
        ("test_x.py::TestA::TestB::test_it", "test_x.py::TestA::TestB", "test_it train"),
        ("README.md", "", "README.md train"),
        ("t.py::test\x1b", "t.py", "test\\x1b train"),
    ],
    ids=["parameter", "classes", "no-colons", "escape"],
)
def test_heading_is_file_and_class(nodeid, heading, row):
    """The heading of a table is a file and a class; colons of a parameter do not count."""
    assert row_name(kept(nodeid, "train")) == (heading, row)


def test_failure_of_80_columns_keeps_code_and_places_whole():
    """In 80 columns, a failure's lines end between words, at best before an expression or a file.

    The second limit refers to the group by the line that allocated it.
    """
    frames = ("models/encoder_layers.py:112 in EncoderLayer.forward", "tests/t.py:9 in test_it")
    code = "torch.nn.functional.scaled_dot_product_attention(q, k, v)"
    held = "training.experiments.HISTORY['validation'].batches[0].outputs.hidden_states[11].grad_fn"
    group = replace(LOSSES, created_at=frames, code=code, held_by=held)
    leaking = record(retained_bytes=36, retained=(group,), grown=(group,))
    result = judge("t.py::t", leaking, [ZERO, limit_from_marker("flat_per_batch", (), {})])
    lines = failure.render([result], ScriptedMeter().facts(), 80).splitlines()
    assert max(map(len, lines)) <= 80
    for whole in (f"`{code}`", *frames):
        assert sum(whole in line for line in lines) == 1
    assert sum("models/encoder_layers.py:112" in line for line in lines) == 2
    assert re.sub(r"\s", "", held) in re.sub(r"\s", "", "".join(lines))


def test_word_that_is_longer_than_a_line_is_broken_at_its_joints():
    """Longer than a line, a path is broken after a slash, an expression before a dot or bracket."""
    assert wrapped("see tests/" + "folder/" * 8 + "test_it.py", 40) == [
        "see tests/folder/folder/folder/",
        "  folder/folder/folder/folder/",
        "  folder/test_it.py",
    ]
    assert wrapped("held by " + "net.layers[0]" * 5, 40) == [
        "held by net.layers[0]net.layers",
        "  [0]net.layers[0]net.layers[0]net",
        "  .layers[0]",
    ]


def test_same_sentence_of_several_regions_is_printed_once():
    """A sentence that several regions share is printed once, after the names of all of them."""
    limit = limit_from_marker("max_peak_mb", (1,), {})
    peaks = [judge(f"t.py::test_{n}", record(), [limit]) for n in range(3)]
    lines = [line.text for line in terminal.findings(peaks)]
    assert lines[:3] == [f"BREACH t.py::test_{n}" for n in range(3)]
    assert lines[3].startswith("  max_peak_mb(1): peak increase 60,817,408 bytes (58.00 MB), ")
    assert not any(line.startswith("BREACH") for line in lines[3:])


def test_comparison_fits_80_columns():
    """A comparison shortens the names of regions, so that it fits 80 columns."""
    old = [kept(f"tests/test_net.py::{LONG}[{n}]") for n in range(3)]
    new = [kept(result.nodeid, retained_bytes=900) for result in old]
    text = comparison.as_table(_compared(old, new), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert len({line.split("  ")[0] for line in text.splitlines() if "retained" in line}) == 3


def _compared(old, new):
    first = many(0)
    reports = [replace(first, results=tuple(results)) for results in (old, new)]
    return compare(*reports, parse_tolerance("5%"))
