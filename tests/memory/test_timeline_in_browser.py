"""Memory over time in a real browser: what is drawn, and what pointers and keys do."""

import html
import json
import re
import shutil
import subprocess

import pytest
from recordings_made import block, picture, recording
from reports_made import SESSION, record

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports.html import page as html_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--window-size=1280,900", "--dump-dom"),
)
LOOK = """
const byId = (id) => document.getElementById(`tl-${id}`);
const plot = byId("plot");
const live = () =>
  [...document.querySelectorAll("#tl-bands td:first-child")].map((cell) => cell.textContent);
const seen = {};
const note = (name) => {
  seen[name] = {
    moment: byId("moment").textContent, live: live(),
    first: byId("first").textContent, last: byId("last").textContent,
    value: plot.getAttribute("aria-valuetext"), now: plot.getAttribute("aria-valuenow"),
    blocks: byId("blocks").hidden ? null : byId("blocks-title").textContent,
    rows: [...document.querySelectorAll("#tl-rows tr")].map((row) => row.innerText),
    tip: document.querySelector(".tl-tip")?.textContent ?? "",
    chosen: document.querySelectorAll("path.band.chosen").length,
    peak: document.querySelector(".tl-mark.peak")?.textContent ?? "",
    bands: document.querySelectorAll("path.band").length,
  };
};
const at = (type, x, y) => {
  plot.scrollIntoView({ block: "center" });
  const now = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent(type, {
    bubbles: true, pointerType: "mouse", pointerId: 1,
    clientX: now.left + x * now.width, clientY: now.top + y * now.height,
  }));
};
plot.setPointerCapture = () => {};
const key = (name) =>
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
note("opened");
at("pointermove", 0.1, 0.95);
note("hover");
at("pointerleave", 0.1, 0.95);
note("left");
at("pointerdown", 0.55, 0.9);
at("pointerup", 0.55, 0.9);
note("clicked");
byId("view").value = "line";
byId("view").dispatchEvent(new Event("change"));
note("lines");
key("Home"); note("home");
key("ArrowRight"); note("right");
key("End"); note("end");
key("p"); note("p");
document.querySelectorAll("#tl-bands button")[0].click();
note("button");
at("pointerdown", 0.25, 0.5);
at("pointermove", 0.5, 0.5);
at("pointermove", 0.75, 0.5);
at("pointerup", 0.75, 0.5);
note("zoomed");
key("-"); note("wider");
byId("whole").click(); note("whole");
seen.scroll = document.documentElement.scrollWidth;
seen.milliseconds = performance.now();
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify(seen);
document.body.append(found);
"""
KEPT = Holding(bytes=600, count=2, created_at=("net.py:1 in f",), held_by="trainer.history[0]")


def drawn(*blocks, start_bytes=100, retained=()):
    """A report of one region with a picture of these blocks."""
    made = record("step", batches=0, retained=retained)
    timeline = picture(recording(*blocks, start_bytes=start_bytes))
    vars(made)["memory_timeline"] = timeline
    return Report(SESSION, (Result("t.py::test_it", made),))


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    """Return what a script sees of a report's page in Chromium."""
    if BROWSER is None:
        pytest.skip("Chromium is not installed")

    def look(report, width=1280):
        folder = tmp_path_factory.mktemp("browser")
        page = html_page.render(report).replace("</body>", f"<script>{LOOK}</script></body>")
        (folder / "page.html").write_text(page, "utf-8")
        done = subprocess.run(
            [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}",
             (folder / "page.html").as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        return json.loads(html.unescape(found))

    return look


@pytest.fixture(scope="module")
def seen(look):
    """Three places over eight events: the first keeps two blocks, and the peak is at event 6."""
    return look(
        drawn(
            block(300, 1), block(300, 2), block(50, 3, 4, stack=2),
            block(900, 5, 7, stack=3), block(40, 6, 8, stack=2),
            retained=(KEPT,),
        )
    )  # fmt: skip


def test_picture_opens_at_the_peak(seen):
    """The page opens with the peak marked and selected, and the bytes of each band there."""
    opened = seen["opened"]
    assert opened["moment"] == "1.6 KB live at event 6, the peak"
    assert opened["peak"] == "peak 1.6 KB"
    assert opened["live"] == ["100 B", "900 B", "600 B", "40 B"]
    assert (opened["first"], opened["last"], opened["bands"]) == ("event 0", "8", 4)


def test_pointer_shows_what_was_alive(seen):
    """Under the pointer the legend shows what was live there, until the pointer leaves."""
    assert seen["hover"]["moment"] == "100 B live at event 0, the start"
    assert "live at event 0" in seen["hover"]["tip"]
    assert seen["left"]["moment"] == seen["opened"]["moment"]
    assert seen["left"]["tip"] == ""


def test_button_of_a_band_lists_its_blocks_with_lines_and_holders(seen):
    """A band's blocks are listed with their number, line, expression, module and holder."""
    found = seen["button"]
    assert found["blocks"].startswith("Blocks of net.py:3 in f: make(3): 900 B at the peak")
    assert found["chosen"] == 1
    (row,) = found["rows"]
    assert "net.py:3 in f" in row
    assert "in module layers.3" in row


def test_click_on_a_band_lists_its_blocks(seen):
    """A click selects the moment, and lists the blocks of the band below the pointer."""
    assert seen["clicked"]["moment"] == "700 B live at event 4"
    assert seen["clicked"]["blocks"] == "Blocks of layers.1: 600 B at the peak"


def test_keys_move_through_the_moments(seen):
    """Home, End, arrows and P select moments; the slider says what was live there."""
    assert [seen[name]["now"] for name in ("home", "right", "end", "p")] == ["0", "1", "8", "6"]
    assert seen["right"]["value"].startswith("400 B live at event 1. ")
    assert "net.py:1 in f: make(1): 300 B" in seen["right"]["value"]


def test_drag_zooms_and_a_button_goes_back(seen):
    """Dragging shows the events between its ends; the whole region comes back by a button."""
    assert (seen["zoomed"]["first"], seen["zoomed"]["last"]) == ("event 2", "6")
    assert (seen["whole"]["first"], seen["whole"]["last"]) == ("event 0", "8")


def test_nothing_is_wider_than_the_window(seen):
    """The section fits a window of 1280 pixels."""
    assert seen["scroll"] <= 1280


def test_holder_is_beside_the_blocks_that_it_holds(look):
    """What holds retained memory is named where the blocks of its line are listed."""
    found = look(drawn(block(300, 1), block(300, 2), retained=(KEPT,)))
    (row,) = found["button"]["rows"]
    assert "held by trainer.history[0]" in row


def test_texts_are_inserted_as_texts(look):
    """A line or module with markup in its name is shown, not run."""
    from pytest_cka_memory.core.memory_timeline import Place

    hostile = "</script><img src=x onerror=document.title='run'>"
    made = record("step", batches=0)
    vars(made)["memory_timeline"] = picture(
        recording(block(300, 1)), lambda stack, inside: Place(hostile, hostile, "", "", (hostile,))
    )
    found = look(Report(SESSION, (Result(hostile, made),)))
    assert "<img src=x" in found["button"]["blocks"]
