"""What tests need on cards, and the table of it, from the reports of sessions."""

import json
from dataclasses import replace

import pytest
from reports_made import record

from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports import cards
from pytest_cka_memory.reports.cards import CardUse, missing_in, uses_of, with_peaks_elsewhere
from pytest_cka_memory.units import MB

REFUSED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 14.06 GiB is free. Process 1 has 0 bytes memory in use."
)


def region(test: str, peak: int, reserved: int, label: str = ""):
    figures = {"reserved_start_bytes": 0, "reserved_peak_bytes": reserved * MB}
    return judge(test, record(label, start_bytes=0, peak_bytes=peak * MB, **figures), [])


def use(test: str, card: str, usable: int, peak: int, result: str = "fits", **more) -> CardUse:
    return CardUse(test, card, usable * MB, peak * MB, peak * MB, result, **more)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (REFUSED, round((20 - 14.06) * 2**30)),
        ("Tried to allocate 512 bytes. GPU 0 has 1.00 GiB of which 12 bytes is free", 500),
        ("Tried to allocate 2.00 MiB. GPU 0 has 1.00 GiB of which 1.50 KiB is free", 2 * MB - 1536),
        ("Tried to allocate 2.00 MiB. GPU 0 has 1.00 GiB of which 3.00 GiB is free", 0),
        ("CUDA error: out of memory", None),
        ("Tried to allocate 2 pages of which 1 page is free", None),
    ],
)
def test_missing_memory_is_read_from_the_message_of_torch(message, expected):
    """The refused size minus the free memory; None if a message does not have both."""
    assert missing_in(message) == expected


def test_use_of_a_test_is_the_highest_of_its_regions():
    """Peak and reserve of several regions are their maxima; headroom is what is left."""
    regions = [region("t.py::test", 30, 40, "a"), region("t.py::test", 20, 60, "b")]
    (found,) = uses_of("t4", 100 * MB, regions, {}, {})
    assert (found.result, found.peak_bytes, found.reserved_bytes) == ("fits", 30 * MB, 60 * MB)
    assert found.headroom_bytes == 40 * MB


def test_results_of_tests_that_did_not_pass():
    """Out of memory, another failure and a skip are different results; no region is needed."""
    ended = {
        "t.py::test_big": ("failed", REFUSED),
        "t.py::test_wrong": ("failed", "AssertionError: assert 1 == 2\nmore"),
        "t.py::test_later": ("skipped", "Skipped: later"),
    }
    uses = uses_of("t4", 100 * MB, [region("t.py::test_big", 5, 5)], ended, {})
    assert [(one.test, one.result) for one in uses] == [
        ("t.py::test_big", "out of memory"),
        ("t.py::test_wrong", "failed"),
        ("t.py::test_later", "skipped"),
    ]
    assert [one.missing_bytes is None for one in uses] == [False, True, True]
    assert uses[1].message == "AssertionError: assert 1 == 2"


def test_peak_on_a_larger_card_says_what_is_missing():
    """The first refused allocation may be small: the peak where the test fits counts if larger."""
    small = use("t", "t4", 100, 90, "out of memory", missing_bytes=5 * MB)
    other = use("u", "t4", 100, 90, "out of memory", missing_bytes=5 * MB)
    large = use("t", "a100", 500, 130)
    found = with_peaks_elsewhere([small, other, large])
    assert [one.missing_bytes for one in found] == [30 * MB, 5 * MB, None]


def test_table_has_a_row_for_each_test_and_card():
    """Rows of a test stand together; what does not fit says by how much, and failures why."""
    uses = [
        use("t.py::test_a", "t4", 100, 60),
        use("t.py::test_b", "t4", 100, 0, "out of memory", missing_bytes=20 * MB, message="no"),
        use("t.py::test_c", "t4", 100, 0, "failed", message="assert 1 == 2"),
        use("t.py::test_a", "a10", 200, 60),
        use("t.py::test_b", "a10", 200, 120),
        use("t.py::test_c", "a10", 200, 0),
    ]
    assert cards.as_markdown(uses).splitlines()[:-1] == [
        "### Memory on emulated cards: t4: 1 of 3 fit, a10: all 3 fit",
        "",
        "| test | card | result | peak | reserved | headroom |",
        "| :--- | :--- | :--- | ---: | ---: | ---: |",
        "| `t.py::test_a` | t4 | fits | 60.00 | 60.00 | 40.00 |",
        "| `t.py::test_a` | a10 | fits | 60.00 | 60.00 | 140.00 |",
        "| `t.py::test_b` | t4 | **does not fit**: at least 20.00 MB missing | - | - | - |",
        "| `t.py::test_b` | a10 | fits | 120.00 | 120.00 | 80.00 |",
        "| `t.py::test_c` | t4 | failed | - | - | - |",
        "| `t.py::test_c` | a10 | fits | 0 | 0 | 200.00 |",
        "",
        "- t4, `t.py::test_c`: `assert 1 == 2`",
        "",
    ]


def test_largest_sizes_have_a_column_if_a_test_has_found_one():
    """The column is in both tables, with a dash for tests that searched nothing, and a legend."""
    regions = [region("t.py::test_a", 30, 40), region("t.py::test_b", 1, 2)]
    uses = uses_of("t4", 100 * MB, regions, {}, {"t.py::test_a": [169, 8]})
    lines = cards.as_markdown(uses).splitlines()
    assert lines[2:6] == [
        "| test | card | result | peak | reserved | headroom | largest |",
        "| :--- | :--- | :--- | ---: | ---: | ---: | ---: |",
        "| `t.py::test_a` | t4 | fits | 30.00 | 40.00 | 60.00 | 169, 8 |",
        "| `t.py::test_b` | t4 | fits | 1.00 | 2.00 | 98.00 | - |",
    ]
    assert lines[-1].endswith(
        "largest: the largest size that cka_memory.largest found to fit on the card."
    )
    assert "<td data-label='Largest'>169, 8</td>" in cards.as_html(uses)
    assert "largest" not in cards.as_markdown([use("t", "t4", 100, 60)])


def test_what_fits_only_if_the_context_is_small_says_so():
    """A test that leaves less than was seen beside the reserve fits under a condition."""
    found = replace(use("t", "t4", 100, 60), condition="if <little> is enough")
    assert "| t4 | fits, if <little> is enough | 60.00 |" in cards.as_markdown([found])
    assert "fits</span> if &lt;little&gt; is enough<span" in cards.as_html([found])


def test_json_has_every_figure_in_bytes():
    """One object for each test and card, which says that the card is emulated."""
    (row,) = json.loads(cards.as_json([use("t", "t4", 100, 60)]))
    assert row == {
        "emulated": True,
        "test": "t",
        "card": "t4",
        "usable_bytes": 100 * MB,
        "peak_bytes": 60 * MB,
        "reserved_bytes": 60 * MB,
        "result": "fits",
        "missing_bytes": None,
        "message": "",
        "largest": [],
        "condition": "",
        "headroom_bytes": 40 * MB,
    }


def test_page_has_a_row_for_each_test_and_card():
    """Rows of a test are together; the bar shows the peak, then the reserve above it."""
    fits = CardUse("t.py::test_a", "t4", 100 * MB, 30 * MB, 40 * MB, "fits")
    page = cards.as_html(
        [
            fits,
            use("t.py::test_b", "t4", 100, 0, "out of memory", missing_bytes=20 * MB),
            use("t.py::test_a", "a10", 200, 50),
        ]
    )
    rows = [line for line in page.splitlines() if line.startswith("<tr><td")]
    assert [row.count("t.py::test_a") for row in rows] == [1, 1, 0]
    assert "<i style='width:30.00%'></i><i class='base' style='width:10.00%'></i>" in rows[0]
    assert "<td data-label='Headroom'>60.00</td>" in rows[0]
    assert "<i style='width:25.00%'></i><i class='base' style='width:0.00%'></i>" in rows[1]
    assert "does not fit</span> at least 20.00 MB missing" in rows[2]
    assert "class='bar'" not in rows[2]
    assert "Tests that failed" not in page


def test_page_escapes_names_and_messages():
    """A test's name, its message and a placeholder in them are shown, and never interpreted."""
    page = cards.as_html(
        [use("t.py::test[<b>{{STYLE}}]", "t4", 100, 0, "failed", message="<script>x</script>")]
    )
    assert page.count("&lt;b&gt;{{STYLE}}") == 2
    assert "&lt;script&gt;x" in page
    assert "<script" not in page


def test_page_of_no_test():
    """A selection without tests makes a page that says so."""
    assert "no test ran" in cards.as_html([])
