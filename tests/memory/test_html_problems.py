"""The problems of the HTML page: their causes, groups and charts."""

import json
import re
from dataclasses import replace

import pytest
from reports_made import LOSSES, SESSION, ZERO, broken, hostile, kept, many, one_of_each, record
from test_html import Page, data_of

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports.html import charts
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.summary import first_cause, problem_groups
from pytest_cka_memory.units import MB

PEAK = limit_from_marker("max_peak_mb", (40,), {})
FLAT = limit_from_marker("flat_per_batch", (), {})
OWNERS = (
    replace(
        LOSSES,
        bytes=40 * MB,
        held_by=None,
        created_at=("net.py:3 in f",),
        code="a @ b",
        operator="aten.mm",
        module="encoder.linear1",
    ),
    Holding(bytes=10 * MB, count=1, inside="workspace"),
    *(Holding(bytes=MB, count=1, created_at=(f"net.py:{n} in g",)) for n in range(6)),
    Holding(bytes=40 * MB, count=5, before_region=True),
)


def peak(nodeid="t.py::test_peak", **rest):
    """A region of 42 to 100 MB that breaks the limit of 40 MB above its start."""
    return judge(nodeid, record(at_peak=OWNERS, **rest), [PEAK])


def rendered(*results):
    """The problems of the page, which are plain HTML."""
    page = html_page.render(Report(SESSION, results))
    return page.partition("<section aria-labelledby='look'>")[2].partition("<noscript>")[0]


def shown(text):
    """The texts of elements in their order, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text)).strip()


def test_first_cause_is_an_open_line():
    """The first cause is visible without a click: bytes, holder, place and expression."""
    text = re.sub(r"<details>.*?</details>", "", rendered(broken()), flags=re.DOTALL)
    (cause,) = re.findall(r"<p class='cause'>.*?</p>", text, re.DOTALL)
    assert shown(cause) == (
        "36 B, held by train.LOSSES[0], made at train.py:12 in step, by (weight * batch).sum()"
    )
    assert "What to do: keep loss.item() instead of the tensor" in shown(text)


def test_cause_without_a_reference_says_so():
    """A cause without a reference says so, and still names the place."""
    group = replace(LOSSES, held_by=None, code=None)
    result = judge("t.py::t", record(retained_bytes=36, retained=(group,)), [ZERO])
    line = "36 B, no Python reference was found, made at train.py:12 in step"
    assert first_cause(result).line == line
    assert (
        first_cause(peak()).line == "40.00 MB, made at net.py:3 in f, in encoder.linear1, by a @ b"
    )
    assert first_cause(kept()) is None


def test_equal_regions_are_one_group():
    """Regions with equal limits, holder and line are one group; keys and numbers may differ."""
    results = [
        judge(
            f"t.py::test_leak[{n}]",
            record(
                retained_bytes=n,
                retained=(replace(LOSSES, bytes=n, held_by=f"train.CACHE['layer{n}'][{n}]"),),
            ),
            [ZERO],
        )
        for n in (1, 3, 2)
    ]
    other = judge("t.py::test_other", record(retained_bytes=9, retained=(LOSSES,)), [ZERO])
    found = problem_groups([kept(), *results, other, peak()])
    assert [len(group.results) for group in found] == [3, 1, 1]
    assert found[0].result.nodeid == "t.py::test_leak[3]"
    text = shown(rendered(kept(), *results, other, peak()))
    assert "3 equal regions, the worst: t.py::test_leak[3]" in text
    assert "2 other regions t.py::test_leak[1] t.py::test_leak[2]" in text


@pytest.mark.parametrize("count", [1, 3])
def test_reasons_are_grouped_too(count):
    """Regions that were not judged for one reason are one group."""
    reserved = limit_from_marker("max_reserved_mb", (1,), {})
    results = [judge(f"t.py::test_{n}", record(), [reserved]) for n in range(count)]
    (group,) = problem_groups([*results, kept()])
    assert (len(group.results), group.cause, group.breaches) == (count, None, ())
    assert ("equal regions" in rendered(*results)) is (count > 1)


def test_each_region_is_in_one_group_for_its_broken_limits():
    """Two limits on one region are one group with two sentences."""
    found = problem_groups(one_of_each().results)
    assert [(e.problems[0].verdict, len(e.problems)) for e in found] == [
        ("BREACH", 2),
        ("not judged", 1),
        ("not judged", 1),
    ]


def test_rows_name_cause_broken_figures_and_group():
    """Rows name the cause, the broken figures, which the script marks, and the group."""
    results = (kept(), broken("t.py::a"), broken("t.py::b"), peak())
    rows = data_of(html_page.render(Report(SESSION, results)))["rows"]
    assert [row["group"] for row in rows] == [None, 0, 0, None]
    assert [row["broken"] for row in rows] == [
        [],
        *[["growth_bytes_per_batch", "retained_bytes"]] * 2,
        ["peak_increase_bytes"],
    ]
    assert rows[1]["cause"].startswith("36 B, held by train.LOSSES[0], made at train.py:12")
    assert rows[0]["cause"] == ""


@pytest.mark.parametrize(
    ("values", "unit", "ticks"),
    [
        ([0, 3 * MB], "MB", ["0", "1", "2", "3"]),
        ([MB, int(1.4 * MB)], "MB", ["0.0", "0.5", "1.0", "1.5"]),
        ([-200, 900], "B", ["-500", "0", "500", "1000"]),
        ([0, 36], "B", ["0", "10", "20", "30", "40"]),
        ([0, 90 * 2**30], "GB", ["0", "50", "100"]),
        ([0], "B", ["0.0", "0.5", "1.0"]),
        ([], "B", ["0.0", "0.5", "1.0"]),
    ],
    ids=["MB", "fraction", "negative", "bytes", "GB", "zero", "nothing"],
)
def test_axis_has_round_ticks_in_one_unit(values, unit, ticks):
    """An axis has 0, every value, and round ticks in one unit."""
    found = charts.axis(values)
    assert (found.unit, [text for _, text in found.ticks]) == (unit, ticks)
    assert all(0 <= found.share(value) <= 100 for value in values)
    assert found.share(found.ticks[0][0]) == 0
    assert found.share(found.ticks[-1][0]) == 100


def test_timeline_has_axes_units_and_the_limit():
    """A timeline has levels and peaks above the entry, axes, units, and the limit in place."""
    text = rendered(peak())
    plain = shown(text)
    assert "MB above the level at entry (42.00 MB) 0 10 20 30 40 batch 1batch 9" in plain
    assert "live after each batch peak within it allowed by max_peak_mb(40): 40.00 MB" in plain
    assert "<path class='limit' d='M0.0,0.00L100,0.00'/>" in text
    assert "<path class='level' d='M0.00,100.00L12.50,100.00" in text


def test_limit_on_growth_rises_from_the_second_batch():
    """A limit on growth starts after the first batch, which is warm-up; a limit of 0 is level."""
    growing = record(retained_bytes=9 * MB)
    steep = limit_from_marker("flat_per_batch", (0.5,), {})
    (level,) = charts.limit_lines(judge("t", growing, [FLAT]).breaches, growing)
    assert level == ("allowed by flat_per_batch: 0 per batch", 2 * MB, 2 * MB, 1)
    (rising,) = charts.limit_lines(judge("t", growing, [steep]).breaches, growing)
    assert rising[1:] == (2 * MB, 2 * MB + 7 * MB // 2, 1)


def test_limit_on_growth_rises_from_the_end_of_its_warm_up():
    """A limit on growth whose warm-up has more batches is drawn after all of these."""
    growing = record(retained_bytes=9 * MB)
    slow = limit_from_marker("flat_per_batch", (0.5,), {"warmup": 3})
    (rising,) = charts.limit_lines(judge("t", growing, [slow]).breaches, growing)
    assert rising[1:] == (4 * MB, 4 * MB + 5 * MB // 2, 3)


def test_limits_of_a_chart_look_different_and_equal_ones_are_one_line():
    """Limits look different in a chart and its key; equal ones, of a marker and a baseline, are
    one.
    """
    zero, other = limit_from_marker("zero_retention", (), {}), ZERO
    steep = limit_from_marker("flat_per_batch", (0.5,), {})
    growing = record(retained_bytes=9 * MB)
    result = judge("t", growing, [PEAK, zero, other, steep])
    assert len(result.breaches) == 4
    text = rendered(result)
    styles = ["limit", "limit second", "limit third"]
    assert re.findall(r"<path class='(limit[^']*)'", text) == styles
    assert re.findall(r"<span class='key (limit[^']*)'", text) == styles
    assert text.count("allowed by zero_retention: 0; allowed by zero_retention: 0") == 1


def test_limit_that_could_not_be_judged_is_not_drawn():
    """A limit that could not be judged has no figure, so it is not drawn."""
    empty = record(batches=0)
    breaches = judge("t", empty, [FLAT]).breaches
    assert breaches[0].measured_bytes is None
    assert charts.limit_lines(breaches, empty) == []
    assert "cannot be judged" in rendered(judge("t", empty, [FLAT]))
    assert "<figure" not in rendered(judge("t", empty, [FLAT]))


def test_bar_at_the_peak_has_a_part_for_each_owner():
    """The bar at the peak has parts for owners, smaller groups,
    older memory and what is unknown.
    """
    text = rendered(peak(batches=0))
    assert "Live at the peak: 100.00 MB, by owner" in shown(text)
    (stack,) = re.findall(r"<div class='stack'.*?</div>", text, re.DOTALL)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", stack)]
    assert widths == [40.0, 10.0, 1.0, 1.0, 1.0, 1.0, 2.0, 40.0, 4.0]
    assert "left:82.00%" in stack
    rows = [shown(row) for row in re.findall(r"<li><i.*?</li>", text)]
    assert rows[:2] == [
        "40.00 MBnet.py:3 in f: a @ b (aten.mm), in encoder.linear1",
        "10.00 MBworkspace",
    ]
    assert rows[6:] == [
        "2.00 MB2 smaller groups",
        "40.00 MBlive before the region",
        "4.00 MBnot recorded",
        "82.00 MBallowed by max_peak_mb(40), 42.00 MB of them in use before the region",
    ]


def test_retained_bytes_without_batches_have_a_bar():
    """A region without batches has a bar of retained bytes; others have a timeline."""
    leak = {"retained_bytes": 36, "retained": (LOSSES,)}
    alone = rendered(judge("t", record(batches=0, **leak), [ZERO]))
    assert "Retained: 36 B, by owner" in shown(alone)
    assert "by owner" not in rendered(judge("t", record(**leak), [ZERO]))


def test_charts_hold_no_markup_of_a_test():
    """Limits and owners of charts are escaped, in the page and in its data."""
    text = html_page.render(hostile())
    assert "img" not in Page(text).tags
    assert json.loads(json.dumps(data_of(text)["rows"][0]["chart"]))


def test_page_names_two_hundred_of_many_equal_regions():
    """Of many equal regions the page names two hundred, so that it stays small."""
    problems = rendered(*many(1_300).results)
    assert "217 equal regions, the worst:" in problems
    assert "and 16 more, in the table above" in problems
    assert len(problems) < 60_000


def test_page_shows_a_problem_of_every_test_before_a_second_of_one():
    """Of 60 groups the page shows 50, and the only one of the last test is among them."""
    groups = [
        judge(
            "t.py::test_many",
            record(str(n), retained_bytes=36, retained=(replace(LOSSES, code=f"f({n})"),)),
            [ZERO],
        )
        for n in range(59)
    ]
    problems = rendered(*groups, broken("t.py::test_last"))
    assert "And 10 more, in the table above." in problems
    assert "test_<wbr>last" in problems


@pytest.mark.parametrize(("warmup", "first", "start"), [(1, 1, 4), (3, 5, 6)])
def test_chart_shows_how_growth_is_judged(warmup: int, first: int, start: int) -> None:
    """A chart has the warm-up of the limit, the reference level and the growth from there."""
    growing = record(retained_bytes=9 * MB)
    limit = limit_from_marker("flat_per_batch", (), {"warmup": warmup})
    breaches = judge("t", growing, [limit]).breaches
    line = charts.growth_line(growing, breaches)
    assert line is not None
    assert (line.first, line.start, line.end) == (first, start, 8)
    assert line.reference == growing.timeline[line.start].allocated_bytes - growing.start_bytes
    assert line.last == growing.timeline[-1].allocated_bytes - growing.start_bytes
    assert line.text == "growth: +1.00 MB per batch"


def test_chart_of_few_batches_does_not_show_growth() -> None:
    """With too few batches nothing is judged, so the chart has no warm-up and no growth."""
    assert charts.growth_line(record(batches=4), []) is None


def test_flat_region_has_a_quiet_line() -> None:
    """A region that does not grow has a level line in another style, which says so."""
    chart = charts.chart_of(record(), [])
    assert chart is not None
    *_, reference, last, style, text = chart.growth_spots()
    assert reference == last
    assert (style, text) == ("growth flat", "growth: 0 per batch")


def test_growth_of_the_reserve_is_drawn_with_the_reserve() -> None:
    """A region whose reserve grows has a chart of its reserve, and none of what is in use."""
    limit = limit_from_marker("flat_per_batch", (1,), {"of": "reserved"})
    plain = record()
    samples = [
        replace(sample, reserved_bytes=(40 + 20 * sample.batch) * MB) for sample in plain.timeline
    ]
    growing = replace(plain, timeline=tuple(samples))
    result = judge("t", growing, [limit])
    (chart,) = charts.charts_of_other_levels(growing, result.breaches)
    assert chart.points.levels == [(40 + 20 * batch) * MB for batch in range(1, 10)]
    assert chart.growth.text == "growth: +20.00 MB per batch"
    assert chart.growth.last == samples[-1].reserved_bytes
    (line,) = chart.limits
    assert line.last - line.first == (chart.growth.end - chart.growth.start) * MB
    text = shown(rendered(result))
    assert "MB, reserved by torch's allocator" in text
    assert "above the level at entry" not in text
