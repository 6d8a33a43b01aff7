"""The HTML page is self-contained and escaped, and its script works in a real browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from reports_made import HOSTILE, LOSSES, SESSION, hostile, kept, many, one_of_each, record

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports.html import page as html_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """A parser that collects the elements of a page, and the text in each element."""

    VOID = ("meta", "input", "br", "img", "link", "hr", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        for tag in self._open:
            self.texts[tag] = self.texts.get(tag, "") + data

    @property
    def tags(self):
        return [tag for tag, _ in self.elements]


def data_of(text):
    """Return the data that the script of the page draws."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(found)
    return {**data, "rows": [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]}


def test_summary_is_shown_without_the_script():
    """Without its script, the page shows the verdict, problems,
    holders and session as plain HTML.
    """
    page = Page(html_page.render(one_of_each()))
    assert page.texts["title"].startswith("Memory: 1 of 5 regions broke a limit")
    assert "retained 36 bytes, allowed 0 bytes: 36 bytes too much" in page.texts["li"]
    assert "this device has no reserve" in page.texts["li"]
    assert "held by train.LOSSES[0]" in page.texts["pre"]
    assert "A100" in page.texts["dd"]
    assert "t.py::test_lost" in page.texts["dd"]


def test_page_loads_nothing_from_other_places():
    """The page's only URL is the SVG namespace, and a content policy forbids it to load others."""
    text = html_page.render(one_of_each())
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not [attributes for _, attributes in page.elements if "src" in attributes]
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text


def test_text_of_a_test_never_becomes_an_element():
    """All texts of tests are escaped in the page and inside its JSON data."""
    text = html_page.render(hostile())
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 3
    (embedded,) = re.findall(r'id="data">(.*?)</script>', text)
    assert "<" not in embedded
    assert "\x1b" not in text
    assert "<img src=x" in data_of(text)["rows"][0]["name"]


def test_test_named_like_a_placeholder_is_shown_as_text():
    """A test named {{SCRIPT}} does not insert the script a second time."""
    text = html_page.render(Report(SESSION, (judge("{{SCRIPT}}", record(completed=False), []),)))
    assert "{{SCRIPT}}" in Page(text).texts["li"]


def test_page_has_all_figures_of_a_region():
    """The data for the page's script has all figures in exact bytes."""
    rows = data_of(html_page.render(one_of_each()))["rows"]
    assert [row["verdict"] for row in rows] == [
        "ok",
        "BREACH",
        "no limit",
        "not judged",
        "not judged",
    ]
    leak = rows[1]
    mb = 2**20
    assert leak["name"] == "t.py::test_leak[64] train"
    assert (leak["start_bytes"], leak["peak_bytes"], leak["peak_increase_bytes"]) == (
        42 * mb,
        100 * mb,
        58 * mb,
    )
    assert (leak["retained_bytes"], leak["growth_bytes_per_batch"]) == (36, 4.0)
    assert leak["reserved_peak_bytes"] is None
    assert leak["timeline"][0] == [42 * mb + 4, 43 * mb + 4]
    assert len(leak["timeline"]) == leak["batches"] == 9
    assert leak["problems"][0].startswith("zero_retention: retained 36 bytes")
    assert leak["holders"][0] == "retained:"
    assert "    held by train.LOSSES[0]" in leak["holders"]


def test_page_shows_values_that_other_plugins_add():
    """The page shows each value of another plugin with its name, cut to the length of a line."""
    result = replace(kept(), extra={"power_w": 250.0, "trace": "x" * 10_000})
    (row,) = data_of(html_page.render(Report(SESSION, (result,))))["rows"]
    assert row["extra"][0] == "power_w: 250.0"
    assert len(row["extra"][1]) == 400


def test_holders_at_the_peak_have_their_own_heading():
    """Tensors at the peak have their own heading, because they are not necessarily retained."""
    alive = record(at_peak=(LOSSES,))
    (row,) = data_of(html_page.render(Report(SESSION, (judge("n", alive, []),))))["rows"]
    assert row["holders"][0] == "live at the peak:"


@pytest.mark.parametrize(
    ("batches", "points", "step"),
    [(0, 0, 1), (1, 1, 1), (200, 200, 1), (201, 101, 2), (1000, 200, 5)],
    ids=["none", "one", "as-many-as-fit", "one-more", "many"],
)
def test_long_timeline_is_reduced_to_the_highest_point_of_each_step(batches, points, step):
    """A chart shows at most 200 points, each of them the highest of its step."""
    (row,) = data_of(
        html_page.render(Report(SESSION, (kept(retained_bytes=batches, batches=batches),)))
    )["rows"]
    assert (len(row["timeline"]), row["step"]) == (points, step)
    if points:
        assert row["timeline"][-1][0] == 42 * 2**20 + batches


def test_page_says_that_figures_are_emulated():
    """The page's heading and a notice say that figures are emulated; its data do not."""
    session = {**SESSION, "meter": "PyTorch's caching allocator, emulated device"}
    text = html_page.render(Report(session, (kept(),)))
    assert Page(text).texts["h1"] == "Emulated memory"
    assert "on an emulated device; no GPU was used" in text
    assert "emulated" not in json.dumps(data_of(text))


def test_problem_of_the_session_is_a_notice():
    """A problem of the session, such as too few regions, belongs to no region."""
    text = html_page.render(Report(SESSION, (), problems=("0 regions measured",)))
    assert "FAILED: 0 regions measured" in Page(text).texts["header"]


def test_page_lists_fifty_problems_and_counts_the_rest():
    """Fifty problems are listed in full, and the others are in the table."""
    limits = [limit_from_marker("max_retained_mb", (n / 2**20,), {}) for n in range(1, 61)]
    leak = record(retained_bytes=99)
    results = [judge(f"t.py::test_{n}", leak, [limit]) for n, limit in enumerate(limits)]
    page = Page(html_page.render(Report(SESSION, tuple(results))))
    assert page.elements.count(("div", {"class": "text"})) == 50
    assert "And 10 more, in the table above." in page.texts["section"]


@pytest.fixture
def drawn(tmp_path):
    """Return the page after a browser ran its script and a script of the test."""

    def draw(report, script="", width=1280):
        if BROWSER is None:
            pytest.skip("Chromium is not installed")
        path = tmp_path / "page.html"
        extra = f"<script>{script}</script></body>"
        path.write_text(html_page.render(report).replace("</body>", extra), encoding="utf-8")
        flags = (
            "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
            f"--disable-component-update --disable-sync --window-size={width},900"
        ).split()
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [BROWSER, *flags, profile, "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    return draw


def test_script_draws_sorts_and_opens_rows(drawn):
    """Of a thousand regions the page's script draws 200 rows; clicks sort the table and open a row.

    The page does not become wider than the window. The chart of a row is that of its problem.
    """
    shown = drawn(
        many(1_000),
        """
        const retained = [...document.querySelectorAll("th button")]
          .find((button) => button.textContent === "Retained");
        retained.click();
        document.querySelector("td.name button").click();
        document.title = JSON.stringify({
          rows: document.querySelectorAll("tbody tr").length,
          sorted: retained.parentElement.getAttribute("aria-sort"),
          first: document.querySelector("tbody td.name button").textContent,
          charts: document.querySelectorAll("td.detail .chart path:not(.grid)").length,
          same: ["level", "peak", "limit", "warmup", "reference", "growth"].map((name) =>
            ["td.detail", ".problems"].map((place) =>
              document.querySelector(`${place} .chart path.${name}`).getAttribute("d")
                .split(/[^0-9.]+/).filter(Boolean).map(Number))),
          pre: document.querySelector("td.detail pre").textContent,
          more: document.getElementById("more").textContent,
          wide: document.documentElement.scrollWidth > innerWidth,
        });
        """,
    )
    title = json.loads(Page(shown.replace("<wbr>", "")).texts["title"])
    assert title["rows"] == 201
    assert title["sorted"] == "descending"
    assert title["first"] == "tests/test_1.py::TestNet::test_training_step[1-resnet18] epoch 1"
    assert title["charts"] == 7
    for of_row, of_problem in title["same"]:
        assert of_row == pytest.approx(of_problem, abs=0.02)
    assert "held by train.LOSSES[0]" in title["pre"]
    assert title["more"] == "Show 200 more"
    assert title["wide"] is False


def test_browser_runs_no_script_from_the_name_of_a_test(drawn):
    """In a browser names of tests stay text, and a narrow page does not scroll sideways."""
    shown = drawn(
        hostile(),
        "document.querySelector('td.name button').click();"
        "document.title = document.querySelectorAll('img').length + ' ' + "
        "(document.documentElement.scrollWidth > innerWidth);",
        width=500,
    )
    assert "<title>0 false</title>" in shown
    assert HOSTILE.split("<img")[0] not in re.sub(r"<script.*?</script>", "", shown, flags=re.S)


def test_row_with_many_figures_opens_below_its_figures_and_closes(drawn):
    """With the columns of an accelerator, a click on a name opens the details below its figures."""
    figures = {"reserved_start_bytes": 0, "reserved_peak_bytes": 9, "reserved_end_bytes": 0}
    report = Report(SESSION, tuple(kept(f"t.py::test_{n}", **figures) for n in range(3)))
    script = """
    const kinds = () => [...document.querySelectorAll("#body > tr")]
      .map((row) => row.className || row.firstChild.className);
    const button = document.querySelector("#body tr:nth-child(3) button");
    const found = [kinds()];
    for (const _ of [1, 2]) { button.click(); found.push(kinds()); }
    document.title = JSON.stringify(found);
    """
    (title,) = re.findall("<title>(.*?)</title>", drawn(report, script))
    closed = ["region", "figures"] * 3
    assert json.loads(title) == [closed, [*closed[:4], "detail", *closed[4:]], closed]
