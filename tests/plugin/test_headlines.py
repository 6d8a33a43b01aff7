"""A failure has one line for summaries, and its whole text once, in its own section."""

import pytest

from pytest_cka_memory.plugin import pytest_private

WHOLE = "broken: retained 4 bytes, allowed 0 bytes"
HEADLINE = "Failed: zero_retention broken: retained 4 B, 4 B too much"
RETAINING = """
import pytest
kept = []

@pytest.mark.zero_retention
def test_it(meter): kept.append(meter.allocate(4))
"""


@pytest.mark.parametrize("style", ["auto", "short", "line", "native"])
def test_summary_on_ci_has_the_headline_and_the_section_the_whole_text(
    scripted, monkeypatch, worker, style
):
    """With CI set, pytest cuts no message: still each line of it is printed once."""
    monkeypatch.setenv("CI", "true")
    session = scripted(RETAINING, "-rA", f"--tb={style}", *worker)
    assert session.text.count(WHOLE) == 1 or style == "line"  # pytest 8 has no section then
    assert f"FAILED test_it.py::test_it - {HEADLINE}\n" in session.text


def test_test_that_is_run_again_keeps_its_headline(scripted, monkeypatch):
    """With pytest-rerunfailures each run's message stands once, and the summary has one line."""
    pytest.importorskip("pytest_rerunfailures")
    monkeypatch.setenv("CI", "true")
    session = scripted(RETAINING, "--reruns=1", "-p", "rerunfailures")
    assert f"FAILED test_it.py::test_it - {HEADLINE}\n" in session.text
    assert session.text.count(WHOLE) == 1


def test_testcase_and_class_have_headlines(scripted, monkeypatch):
    """Methods of a TestCase and limits over a class have one line in the summary, too."""
    monkeypatch.setenv("CI", "true")
    session = scripted(
        """
        import pytest, unittest
        from conftest import METER
        kept = []

        class TestOne(unittest.TestCase):
            @pytest.mark.zero_retention
            def test_it(self): kept.append(METER.allocate(4))

        @pytest.mark.zero_retention(scope="class")
        class TestTwo:
            def test_it(self): kept.append(METER.allocate(4))
        """
    )
    assert f"FAILED test_it.py::TestOne::test_it - {HEADLINE}\n" in session.text
    scoped = HEADLINE.replace("zero_retention", "zero_retention(scope='class')")
    assert f"ERROR test_it.py::TestTwo::test_it - {scoped}\n" in session.text


def test_headline_is_one_short_line():
    """A long sentence is cut, and several lines become one."""
    for text in ("word " * 100, "first\nsecond"):
        with pytest.raises(pytest_private.Failed) as error:
            pytest_private.fail("whole\ntext", text)
        assert len(error.value.headline) <= 100
        assert "\n" not in error.value.headline
        assert str(error.value) == "whole\ntext"


def test_first_line_is_the_headline_if_none_is_given():
    """A text of several lines without a headline of its own is cut to its first one."""
    with pytest.raises(pytest_private.Failed) as error:
        pytest_private.fail("first line\nsecond line")
    assert error.value.headline == "first line"
