"""Pictures of what keeps memory: boxes, arrows, and a text for those who do not see them."""

import re
from dataclasses import replace

from reports_made import HOSTILE, LOSSES, SESSION, record
from test_html import Page

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Link
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports.html import charts
from pytest_cka_memory.reports.html import page as html_page

PATH = (Link("", "module net"), Link("CACHE", "dict"), Link("['x']", "Tensor (250,)"))
OTHER = (Link("", "a variable in train (loop.py:12)"), Link("x", "Tensor (250,)"))


def page_of(*holdings):
    """Return the page of a region that retained these groups."""
    return html_page.render(Report(SESSION, (judge("t.py::test", record(retained=holdings), []),)))


def test_picture_has_a_box_for_each_object_and_an_arrow_for_each_reference():
    """Names are in boxes, references beside arrows, and all of it is in the text alternative."""
    svg = "".join(charts.picture(PATH))
    assert svg.count("<rect") == 3
    assert svg.count("class='head'") == 2
    assert re.findall(r"<text[^>]*>([^<]*)<", svg) == [
        *("module net", "CACHE", "dict", "[&#x27;x&#x27;]", "Tensor (250,)")
    ]
    label = re.search(r"role='img' aria-label='([^']*)'", svg)
    assert label is not None
    expected = "From module net, then CACHE to dict, then [&#x27;x&#x27;] to Tensor (250,)"
    assert label[1] == expected


def test_long_text_is_written_in_lines_that_fit_a_phone():
    """No line is wider than the picture, which is 336 pixels wide."""
    svg = "".join(charts.picture([Link("", "module " + "m" * 100), Link("k" * 100, "list")]))
    lines = re.findall(r"<text[^>]* x='(\d+)'[^>]*>([^<]*)<", svg)
    assert len(lines) == 3 + 3 + 1
    assert all(int(left) + 7.9 * len(text) < 336 for left, text in lines)


def test_page_shows_each_holder_and_that_both_must_go():
    """Two paths are two pictures with a sentence; the page has the section and a link to it."""
    text = page_of(replace(LOSSES, paths=(PATH, OTHER)))
    Page(text)
    assert text.count("<svg viewBox='0 0 336") == 2
    assert "Two things keep it: both references must be removed to free it." in text
    assert 'href="#holders"' in text
    assert "id='holders'" in text


def test_page_without_paths_has_no_section():
    """Without paths neither the section nor its style is in the page."""
    text = page_of(LOSSES)
    assert "holders-title" not in text
    assert ".paths figcaption" not in text


def test_texts_of_a_program_are_escaped():
    """Names and keys come from the program, so that they may contain anything."""
    hostile = (Link("", HOSTILE), Link(HOSTILE, HOSTILE))
    text = page_of(replace(LOSSES, paths=(hostile,)))
    assert "<img" not in text
    assert "\x1b" not in text
    Page(text)


def test_paths_travel_with_the_record():
    """Plain data has paths, and only if there are any."""
    found = record(retained=(LOSSES, replace(LOSSES, paths=(PATH,))))
    plain = found.to_dict()
    assert "paths" not in plain["retained"][0]
    assert RegionRecord.from_dict(plain) == found
