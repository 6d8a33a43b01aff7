"""The HTML page in a real browser: 1280 and 390 pixels wide, light and dark, without a click."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from reports_made import LOSSES, SESSION, ZERO, broken, hostile, kept, record

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.units import MB

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--window-size=1400,900", "--dump-dom"),
)
WIDTHS, COLOURS = (1280, 390), ("light", "dark")
LOOK = """
const box = (selector) => {
  const element = document.querySelector(selector);
  return element ? element.getBoundingClientRect() : null;
};
const inks = (selector) => {
  let paper = document.querySelector(selector);
  const ink = getComputedStyle(paper).color;
  while (paper && getComputedStyle(paper).backgroundColor === "rgba(0, 0, 0, 0)")
    paper = paper.parentElement;
  return [ink, getComputedStyle(paper || document.body).backgroundColor];
};
const found = window.parent.document.getElementById("found");
const seen = {
  width: innerWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  scroll: document.documentElement.scrollWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  inks: ["body", ".problems .cause", ".verdict.breach", "td.broke", ".tick", ".hint", "a"]
    .map(inks),
  causes: [...document.querySelectorAll(".problems .cause")]
    .filter((line) => line.checkVisibility() && line.getBoundingClientRect().height > 10)
    .map((line) => line.textContent),
  rows: document.querySelectorAll("#body > tr").length,
  table: box("table"), problems: box(".problems"), plot: box(".plot"), tick: box(".tick"),
  figure: box(".problems .chart"), text: box(".problems .text"), limit: box("path.limit"),
  stack: box(".stack"), mark: box(".stack b"),
};
found.textContent += JSON.stringify(seen) + "\\n";
"""


def report():
    """Breaches with a timeline, with owners, and with names that have no place to break."""
    groups = tuple(
        replace(LOSSES, bytes=n * MB, held_by=None, created_at=(f"{'deep/' * 20}net.py:{n} in f",))
        for n in (30, 20, 5)
    )
    long = replace(LOSSES, held_by="net." + "layers" * 60, created_at=(f"{'x' * 300}.py:1 in f",))
    limits = [limit_from_marker("max_peak_mb", (40,), {})]
    results = (
        broken(),
        broken("t.py::test_leak[128]"),
        judge("t.py::test_peak", record(batches=0, at_peak=groups), limits),
        judge(f"t.py::test_{'long' * 60}", record(retained_bytes=9, retained=(long,)), [ZERO]),
        *(kept(f"t.py::test_kept[{n}]") for n in range(20)),
        *hostile().results,
    )
    return Report(SESSION, results)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a script sees in each of four windows, which are frames of one page.

    A frame has its own width and colours; a window of Chromium is at least 500 pixels wide.
    """
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("browser")
    page = html_page.render(report()).replace("</body>", f"<script>{LOOK}</script></body>")
    frames = (
        f"<iframe style='width:{width}px;height:900px;border:0;color-scheme:{colour}' "
        f'srcdoc="{html.escape(page)}"></iframe>'
        for width in WIDTHS
        for colour in COLOURS
    )
    file = folder / "frames.html"
    file.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><pre id='found'></pre>{''.join(frames)}", "utf-8"
    )
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    views = [json.loads(line) for line in html.unescape(found).splitlines()]
    return {(view["width"], "dark" if view["dark"] else "light"): view for view in views}


def luminance(colour):
    """WCAG 2.2, relative luminance."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one, other):
    """WCAG 2.2, contrast ratio: from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_page_is_seen_in_four_windows(seen):
    """The page is drawn in windows of two widths, each in light and in dark colours."""
    assert set(seen) == {(width, colour) for width in WIDTHS for colour in COLOURS}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(seen, width):
    """Long names, expressions and hostile texts break, so that nobody scrolls sideways."""
    view = seen[width, "light"]
    assert view["scroll"] <= width
    assert view["tick"]["left"] >= 0
    assert view["plot"]["right"] <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_first_causes_are_visible_without_a_click(seen, width):
    """The first cause of each broken limit is visible at once; equal regions share one."""
    causes = seen[width, "light"]["causes"]
    assert len(causes) == 4
    assert causes[0] == (
        "36 B, held by train.LOSSES[0], made at train.py:12 in step, by (weight * batch).sum()"
    )


def test_table_is_first_and_short(seen):
    """The table comes first, with ten rows, or four on a narrow page, and then the problems."""
    for width, rows in ((1280, 10), (390, 4)):
        view = seen[width, "light"]
        assert view["rows"] == rows
        assert view["table"]["bottom"] <= view["problems"]["top"]


def test_chart_is_beside_the_text_or_below_it(seen):
    """A chart is beside its text if the page is wide enough, and below it otherwise."""
    wide, narrow = seen[1280, "light"], seen[390, "light"]
    assert wide["figure"]["left"] > wide["text"]["right"]
    assert abs(wide["figure"]["top"] - wide["text"]["top"]) < 20
    assert narrow["figure"]["top"] >= narrow["text"]["bottom"]


@pytest.mark.parametrize("width", WIDTHS)
def test_limits_are_drawn_inside_their_charts(seen, width):
    """Limits are drawn in the timeline and in the bar of owners, and inside both charts."""
    view = seen[width, "light"]
    assert view["plot"]["top"] - 1 <= view["limit"]["top"] <= view["plot"]["bottom"] + 1
    assert view["limit"]["right"] <= view["plot"]["right"] + 1
    assert view["stack"]["left"] < view["mark"]["left"] < view["stack"]["right"]
    assert view["plot"]["height"] > 100


def test_dark_page_has_its_own_colours_and_text_is_readable(seen):
    """On light and dark pages all text has the contrast of WCAG 2.2 AA: 4.5 to 1."""
    light, dark = seen[1280, "light"], seen[1280, "dark"]
    assert luminance(light["paper"]) > 0.8
    assert luminance(dark["paper"]) < 0.1
    for view in (light, dark):
        assert [pair for pair in view["inks"] if contrast(*pair) < 4.5] == []
