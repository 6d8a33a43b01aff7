"""What an update of a baseline file prints: figures that rose or fell, and renamed tests."""

import pytest
from reports_made import CPU, GPU

from pytest_cka_memory.stored import update
from pytest_cka_memory.stored.baselines import BaselineKey, Figures
from pytest_cka_memory.stored.update import BaselineChange, as_lines, changes
from pytest_cka_memory.units import MB


def figures(
    peak: int = 0, retained: int = 0, growth: int | None = None, reserved: int | None = None
) -> Figures:
    return {
        "peak_increase_bytes": peak,
        "retained_bytes": retained,
        "growth_bytes_per_batch": growth,
        "reserved_increase_bytes": reserved,
    }


def test_changes_are_listed_with_the_largest_rise_first() -> None:
    """Changes are listed by size, with the old and new figure, the share and the direction."""
    old = {
        BaselineKey("t.py::test_a", "part", CPU): figures(100 * MB, 4, 0),
        BaselineKey("t.py::test_b", "", CPU): figures(growth=4),
        BaselineKey("t.py::test_same", "", CPU): figures(9),
        BaselineKey("t.py::test_gone", "", CPU): figures(9),
    }
    new = {
        BaselineKey("t.py::test_a", "part", CPU): figures(96 * MB, 0, 0),
        BaselineKey("t.py::test_b", "", CPU): figures(3 * MB, growth=None),
        BaselineKey("t.py::test_same", "", CPU): figures(9),
        BaselineKey("t.py::test_new", "", CPU): figures(9),
    }
    assert as_lines(changes(old, new)) == [
        "  t.py::test_b       peak increase             0  ->   3.00 MB           up",
        "  t.py::test_a part  retained                4 B  ->         0  -100.0%  down",
        "  t.py::test_b       growth per batch        4 B  ->         -           not known now",
        "  t.py::test_a part  peak increase     100.00 MB  ->  96.00 MB    -4.0%  down",
    ]


def test_middle_of_many_changes_is_left_out() -> None:
    """Of many changes, the largest rises and falls are shown and those between are counted."""
    keys = [BaselineKey(f"t.py::test_{n:02}", "", CPU) for n in range(40)]
    new = {key: figures(20 - n if n < 20 else 19 - n + 100) for n, key in enumerate(keys)}
    lines = as_lines(changes(dict.fromkeys(keys, figures(50)), new))
    assert len(lines) == 31
    assert "test_20" in lines[0]
    assert lines[15] == "  ... and 10 more"
    assert "test_19" in lines[30]


@pytest.mark.parametrize(
    ("count", "lines"),
    [(30, 30), (31, 31)],  # one line stands for what is left out
)
def test_thirty_changes_are_shown_and_one_more_is_not(count: int, lines: int) -> None:
    """The middle is left out from 31 changes on."""
    keys = [BaselineKey(f"t.py::test_{n:02}", "", CPU) for n in range(count)]
    shown = as_lines(changes(dict.fromkeys(keys, figures()), dict.fromkeys(keys, figures(1))))
    assert len(shown) == lines
    assert ("  ... and 1 more" in shown) is (count == 31)


def test_figure_that_becomes_known_is_shown_with_its_rise_from_nothing() -> None:
    """A figure without a baseline is shown as known now, and sorted by its whole size."""
    keys = [BaselineKey("t.py::test_a", "", CPU), BaselineKey("t.py::test_b", "", CPU)]
    old = {keys[0]: figures(retained=3), keys[1]: figures()}
    found = changes(old, {keys[0]: figures(retained=6), keys[1]: figures(growth=4)})
    assert as_lines(found) == [
        "  t.py::test_b  growth per batch    -  ->  4 B           known now",
        "  t.py::test_a  retained          3 B  ->  6 B  +100.0%  up",
    ]
    assert [change.rise_bytes for change in found] == [4, 3]
    assert BaselineChange(keys[0], "growth_bytes_per_batch", 4, None).rise_bytes == -4


def test_change_that_two_decimals_hide_is_shown_in_bytes() -> None:
    key = BaselineKey("t.py::t", "", CPU)
    (line,) = as_lines(changes({key: figures(100 * MB)}, {key: figures(100 * MB + 1)}))
    assert line == "  t.py::t  peak increase  104,857,600 B  ->  104,857,601 B  +0.0%  up"


def test_nothing_changed_prints_nothing() -> None:
    key = BaselineKey("t.py::test_a", "", CPU)
    assert as_lines(changes({key: figures(1)}, {key: figures(1)})) == []


A, B = figures(1000, 8), figures(2000)
RENAMES = {
    "test renamed": ({"a.py::test_old": A}, {"a.py::test_new": A}, True),
    "test moved to another file": ({"a.py::test_x": A}, {"b/c.py::test_x": A}, True),
    "both": ({"a.py::test_old": A}, {"b.py::test_new": A}, True),
    "other figures": ({"a.py::test_old": A}, {"a.py::test_new": B}, False),
    "all figures 0, name and file changed": (
        {"a.py::test_old": figures()},
        {"b.py::test_new": figures()},
        False,
    ),
    "two new tests that could be it": (
        {"a.py::test_old": A},
        {"a.py::test_new": A, "a.py::test_newer": A},
        False,
    ),
    "two old tests that could be it": (
        {"a.py::test_old": A, "a.py::test_older": A},
        {"a.py::test_new": A},
        False,
    ),
}


@pytest.mark.parametrize(("gone", "new", "found"), RENAMES.values(), ids=RENAMES)
def test_renamed_test_is_recognised_by_equal_figures(
    gone: dict[str, Figures], new: dict[str, Figures], found: bool
) -> None:
    """A renamed test is recognised by its figures; if several could be meant, none is named."""
    old = {BaselineKey(nodeid, "", CPU): sizes for nodeid, sizes in gone.items()}
    measured = {BaselineKey(nodeid, "", CPU): sizes for nodeid, sizes in new.items()}
    expected = {next(iter(gone)): next(iter(new))} if found else {}
    assert update.renames(old, gone.keys(), measured) == expected


def test_moved_test_is_found_among_tests_with_equal_figures() -> None:
    """Among tests with equal figures, the name decides which one was moved, then the file."""
    names = {"a.py::test_x": "b.py::test_x", "a.py::test_y": "b.py::test_y", "c.py::t": "c.py::u"}
    old = {BaselineKey(nodeid, "", CPU): figures() for nodeid in names}
    measured = {BaselineKey(nodeid, "", CPU): figures() for nodeid in names.values()}
    assert update.renames(old, names.keys(), measured) == names


def test_renamed_test_must_have_the_same_regions() -> None:
    """A renamed test must have all of the regions; regions on other devices do not matter."""
    old = {
        BaselineKey("a.py::test_old", "one", CPU): A,
        BaselineKey("a.py::test_old", "two", CPU): B,
        BaselineKey("a.py::test_old", "one", GPU): B,
    }
    one = {BaselineKey("a.py::test_new", "one", CPU): A}
    both = {**one, BaselineKey("a.py::test_new", "two", CPU): B}
    gone = {"a.py::test_old"}
    assert update.renames(old, gone, one) == {}
    assert update.renames(old, gone, both) == {"a.py::test_old": "a.py::test_new"}
    assert update.moved(old, {"a.py::test_old": "b.py::t"}).keys() == {
        key._replace(nodeid="b.py::t") for key in old
    }


def test_test_that_had_a_baseline_is_not_a_new_name() -> None:
    """A test that existed beside the one that is gone is not a new name for it."""
    old = {BaselineKey("a.py::test_old", "", CPU): A, BaselineKey("a.py::test_new", "", CPU): B}
    measured = {BaselineKey("a.py::test_new", "", CPU): A}
    assert update.renames(old, {"a.py::test_old"}, measured) == {}


def test_renamed_test_is_recognised_beside_lines_of_other_machines() -> None:
    """Its figures of this machine are compared, and the lines of all machines move."""
    one, two = (("threads", "1"),), (("threads", "2"),)
    figures = {"peak_increase_bytes": 5, "retained_bytes": 1}
    other = {**figures, "peak_increase_bytes": 9}
    before, after = "a.py::test_old", "a.py::test_new"
    old = {BaselineKey(before, "", CPU, one): figures, BaselineKey(before, "", CPU, two): other}
    found = update.renames(old, {before}, {BaselineKey(after, "", CPU, one): figures})
    assert found == {before: after}
    assert update.moved(old, found) == {
        BaselineKey(after, "", CPU, one): figures,
        BaselineKey(after, "", CPU, two): other,
    }
    of_older_version = {BaselineKey(before, "", CPU): figures}
    assert update.renames(of_older_version, {before}, {BaselineKey(after, "", CPU, one): figures})


def test_peak_without_scratch_memory_is_shown_only_if_the_peak_is_the_same() -> None:
    """One cause is one line."""
    key = BaselineKey("t", "", CPU)
    old = {key: {"peak_increase_bytes": 5, "increase_without_scratch_bytes": 3}}
    both = {key: {"peak_increase_bytes": 6, "increase_without_scratch_bytes": 4}}
    alone = {key: {"peak_increase_bytes": 5, "increase_without_scratch_bytes": 4}}
    assert [change.figure for change in changes(old, both)] == ["peak_increase_bytes"]
    assert [change.figure for change in changes(old, alone)] == ["increase_without_scratch_bytes"]
