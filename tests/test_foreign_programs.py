"""How ``foreign_programs.py`` counts the tests of other projects, and why they fail."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

FOUND = """<testsuites><testsuite>
<testcase classname="a.TestA" name="passes"/>
<testcase classname="a.TestA" name="skipped"><skipped message="no"/></testcase>
<testcase classname="a.TestA" name="fails"><failure message="E  /x/y.so: missing"/></testcase>
<testcase classname="a.TestA" name="at_the_end"/>
<testcase classname="a.TestA" name="at_the_end"><error message="Timeout (&gt;60.0s)"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def programs(monkeypatch):
    """Return the module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import foreign_programs

    return foreign_programs


def test_each_test_has_one_outcome_and_errors_name_no_folder(programs, tmp_path):
    """A test with an error at its end is counted once, as failed."""
    file = tmp_path / "found.xml"
    file.write_text(FOUND, encoding="utf-8")
    assert programs.tests_in(file) == {
        "passed": 1,
        "skipped": 1,
        "failures": [
            {"test": "TestA::fails", "why": "E y.so: missing"},
            {"test": "TestA::at_the_end", "why": "Timeout (>60.0s)"},
        ],
    }


@pytest.mark.parametrize(
    ("test", "why", "kind"),
    [
        ("TestA::a", "Timeout (>60.0s) from pytest-timeout.", "machine"),
        ("TestCuda::test_record_stream", "AssertionError not raised", "device"),
        ("a::b", "cudnnCTCLoss is not supported by the emulated device, because", "refused"),
        ("a::b", "assert 1 == 2", "open"),
    ],
)
def test_failure_whose_cause_is_not_known_is_not_examined(programs, test, why, kind):
    """A failure has the kind of the first row that fits its name or its error."""
    assert programs.reason_of(test, why)[0] == kind


def test_sample_is_the_same_in_each_process(monkeypatch):
    """Tests are drawn by their names, whatever their order, and stay in it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "foreign"))
    import sampling

    class Item:
        def __init__(self, nodeid):
            self.nodeid = nodeid

    monkeypatch.setenv("FOREIGN_SAMPLE", "3")
    monkeypatch.setenv("FOREIGN_WORDS", "cuda")
    names = [f"test_{i}_{device}" for i in range(9) for device in ("cpu", "cuda")]
    drawn = []
    for order in (names, names[::-1]):
        items = [Item(name) for name in order]
        sampling.pytest_collection_modifyitems(items)
        drawn.append([item.nodeid for item in items])
    assert drawn[0] == drawn[1][::-1]
    assert len(drawn[0]) == 3
    assert all("cuda" in name for name in drawn[0])
