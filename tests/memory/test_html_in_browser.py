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
from pytest_cka_memory.core.retention import ProcessSample
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.html import text_of
from pytest_cka_memory.units import MB, format_size

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
  names: [...document.querySelectorAll("td.name")].map((cell) => cell.getBoundingClientRect()),
  cells: [...document.querySelectorAll("#body td:not(.none)")]
    .map((cell) => cell.getBoundingClientRect()),
  columns: [...document.querySelectorAll("#head th")].map((cell) => cell.textContent),
  emulated: document.body.innerText.match(/emulated/gi)?.length ?? 0,
  inTable: document.querySelector("table").innerText.match(/emulated/gi)?.length ?? 0,
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


HELD_BY = "trainer.callbacks['history'].outputs_of_the_validation_loop[-1].encoder.layers[11]"
LONG_NAME = (
    "tests/integration/training/test_transformer_with_adapters.py::TestFineTuning::"
    "test_training_step_keeps_nothing[{}-bert-base-uncased-mixed-precision]"
)


def emulated_report(**figures):
    """A report of an emulated card: long names and holders in two of ten regions."""
    site = "src/company/training/transformer_with_adapters.py:1204 in forward_with_checkpointing"
    holding = replace(LOSSES, held_by=HELD_BY, created_at=(site,), module="encoder.layers.11")
    leak = record("train", retained_bytes=36 * MB, retained=(holding,), **figures)
    results = (
        *(judge(LONG_NAME.format(n), leak, [ZERO]) for n in range(2)),
        *(kept(f"tests/integration/test_inference.py::test_batch[{n}]", **figures) for n in "abcd"),
    )
    session = {
        **SESSION,
        "device": "emulate:cuda:t4",
        "device_name": "emulated NVIDIA T4 (no GPU)",
        "meter": "PyTorch's caching allocator, emulated device",
        "notes": [],
    }
    return Report(session, results)


RESERVED = {"reserved_start_bytes": 50 * MB, "reserved_peak_bytes": 14_000 * MB}
GROWING = tuple(ProcessSample(n, 1000 * MB * n) for n in range(1, 13))
EVERY = {
    **RESERVED,
    **dict.fromkeys(("reserved_end_bytes", "host_retained_bytes", "cycle_bytes"), 12_345 * MB),
    **dict.fromkeys(("process_start_bytes", "outside_start_bytes"), MB),
    **dict.fromkeys(("process_peak_bytes", "outside_peak_bytes"), 60_000 * MB),
    "process_timeline": GROWING,
}
"""Figures with which the table has every column."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a script sees of the report of breaches, by width and colours."""
    return look_at(report(), tmp_path_factory)


@pytest.fixture(scope="module", params=[RESERVED, EVERY], ids=["usual-columns", "every-column"])
def seen_emulated(tmp_path_factory, request):
    """The same of the report of an emulated card."""
    return look_at(emulated_report(**request.param), tmp_path_factory)


def look_at(report, tmp_path_factory):
    """Return what a script sees of a report in each of four windows."""
    return views_of(html_page.render(report), LOOK, tmp_path_factory)


def views_of(page, script, tmp_path_factory):
    """Return what a script sees in each of four windows, which are frames of one page.

    A frame has its own width and colours; a window of Chromium is at least 500 pixels wide.
    """
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("browser")
    page = page.replace("</body>", f"<script>{script}</script></body>")
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


def test_report_of_an_emulated_card_has_the_columns_that_the_test_is_about(seen_emulated):
    """The reports of these tests have the columns of an accelerator, and one has all."""
    columns = seen_emulated[1280, "light"]["columns"]
    assert "Reserved" in columns
    assert ("Process/b" in columns) == ("Outside" in columns) == (len(columns) == 14)


@pytest.mark.parametrize("width", WIDTHS)
def test_regions_have_the_width_for_their_names_and_causes(seen_emulated, width):
    """Names and causes have at least half of the window, so that no region is a tall column."""
    view = seen_emulated[width, "light"]
    assert len(view["names"]) == (5 if width == 1280 else 4)
    assert min(box["width"] for box in view["names"]) >= width / 2
    assert max(box["height"] for box in view["names"]) <= (120 if width == 1280 else 300)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_column_is_inside_the_window(seen_emulated, width):
    """All cells with a figure are visible without scrolling sideways, also with every column."""
    view = seen_emulated[width, "light"]
    assert view["scroll"] <= width
    assert min(box["left"] for box in view["cells"]) >= 0
    assert max(box["right"] for box in view["cells"]) <= width


def test_page_says_once_in_each_place_that_the_device_is_emulated(seen_emulated):
    """Heading, banner, and device and meter of the session say it, and no figure does."""
    view = seen_emulated[1280, "light"]
    assert (view["emulated"], view["inTable"]) == (4, 0)


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


def test_page_formats_sizes_as_the_terminal_does(tmp_path):
    """A page and a terminal have the same text for the same bytes, also for halves."""
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    sizes = [
        sign * n * 2**k / 8 for k in range(0, 44, 2) for n in (1, 5, 77, 641) for sign in (1, -1)
    ]
    sizes += [0, 0.04, 0.15, 3.04, 1023.96, 1280, 1331.2, 10239, 9_999.995 * MB, 1_048_524]
    body = f"<script>document.body.textContent = JSON.stringify({sizes}.map(size));</script>"
    script = f"<script>{text_of('sizes.js')}</script>"
    (tmp_path / "sizes.html").write_text(f"<body>{script}{body}</body>", "utf-8")
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}",
         (tmp_path / "sizes.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (found,) = re.findall(r"<body>(.*?)</body>", done.stdout, re.DOTALL)
    assert json.loads(found) == list(map(format_size, sizes))


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


def test_page_of_repairs_breaks_names_and_wraps_prose_where_there_is_room(tmp_path_factory):
    """Only its code scrolls sideways, and not on a wide page, where the table fits."""
    prose = "not tried: " + "micro-batches, because the model does not return its loss; " * 4
    table = "save activations on the host".ljust(95) + "|"
    found = {"test": f"tests/test_large.py::test_{'large_' * 20}batch", "text": f"{table}\n{prose}"}
    script = """
    const code = document.querySelector("pre");
    const seen = {
      width: innerWidth,
      dark: matchMedia("(prefers-color-scheme: dark)").matches,
      scroll: document.documentElement.scrollWidth,
      codeScrolls: code.scrollWidth > code.clientWidth,
      lines: Math.round(code.getBoundingClientRect().height / parseFloat(
        getComputedStyle(code).lineHeight)),
    };
    window.parent.document.getElementById("found").textContent += JSON.stringify(seen) + "\\n";
    """
    page = html_page.render_repairs([found])
    page = re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", page)  # it has no script
    views = views_of(page, script, tmp_path_factory)
    assert {width: views[width, "light"]["scroll"] for width in WIDTHS} == {1280: 1280, 390: 390}
    assert views[390, "light"]["codeScrolls"]
    assert not views[1280, "light"]["codeScrolls"]
    assert 4 <= views[1280, "light"]["lines"] <= 6  # the table in one, the prose in two or three
