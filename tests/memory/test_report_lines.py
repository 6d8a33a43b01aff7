"""The terminal's table, its findings and the failure text: exact lines for simple results."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from reports_made import SESSION

from pytest_cka_memory import RegionRecord
from pytest_cka_memory.core.retention import Holding, Sample
from pytest_cka_memory.core.verdicts import Result, judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import failure, tables, terminal
from pytest_cka_memory.reports.summary import first_cause, problems
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB

MakeRecord = Callable[..., RegionRecord]
FLAT = limit_from_marker("flat_per_batch", (), {})
ZERO = limit_from_marker("zero_retention", (), {})
SEE = (
    "pass --cka-memory-html=memory.html --cka-memory-timeline to see when each group of tensors "
    "was live"
)
RESERVED = limit_from_marker("max_reserved_mb", (1,), {})
FILE = "tests/gates/test_cka.py"


@pytest.fixture
def results(record: MakeRecord) -> list[Result]:
    """Regions that kept a limit, broke one, had none, failed, and could not be judged."""
    start = {"start_bytes": 42 * MB, "peak_bytes": 100 * MB, "label": "compare"}
    flat, leaking = [42 * MB] * 9, [42 * MB + 4 * i for i in range(9)]
    long = "TestBig::test_a_very_long_name_that_does_not_fit_into_the_row"
    return [
        judge(f"{FILE}::test_flat", record(**start, levels=flat), [FLAT]),
        judge(f"{FILE}::test_leak[64]", record(**start, retained_bytes=36, levels=leaking), [FLAT]),
        judge(f"{FILE}::{long}", record(start_bytes=5, peak_bytes=2000), []),
        replace(
            judge("a.py::test_same", record(completed=False, retained_bytes=MB), [ZERO]),
            outcome="failed",
        ),
        judge("b.py::test_same", record(), [RESERVED]),
    ]


def test_the_table_has_one_row_per_region(results: list[Result]) -> None:
    """The table has one row per region, in at most 100 columns.

    A name that is too long loses its middle. Files and classes are headings, so tests of the same
    name are told apart.
    """
    lines = terminal.table(results, 100)[0]
    assert [line.text for line in lines] == [
        "region                              batches  start    peak  increase  retained  growth/b"
        "  verdict",
        "-" * 100,
        "tests/gates/test_cka.py",
        "  test_flat compare                       9  42.00  100.00     58.00         0         0"
        "  ok",
        "  test_leak[64] compare                   9  42.00  100.00     58.00      36 B       4 B"
        "  BREACH",
        "tests/gates/test_cka.py::TestBig",
        "  test_a_very_lon…fit_into_the_row        -    5 B  2.0 KB    1.9 KB         0         -"
        "  no limit",
        "a.py",
        "  test_same                               -      0       0         0      1.00         -"
        "  not judged",
        "b.py",
        "  test_same                               -      0       0         0         0         -"
        "  not judged",
        "(no room for: timeline)",
    ]
    colours = [line.colour for line in lines if line.text.startswith("  ")]
    assert colours == ["green", "red", None, "yellow", "yellow"]


def test_the_table_of_a_gpu_has_a_column_for_the_reserve(record: MakeRecord) -> None:
    """On a GPU the table has a column for the reserve, and a region on the CPU shows a dash."""
    on_gpu = record(
        label="x4",
        start_bytes=round(42.66 * MB),
        peak_bytes=round(673.32 * MB),
        levels=[MB, 2 * MB],
        reserved_start_bytes=44 * MB,
        reserved_peak_bytes=700 * MB,
        reserved_end_bytes=44 * MB,
    )
    rows = [judge("t.py::test_gpu", on_gpu, [ZERO]), judge("t.py::test_cpu", record(), [])]
    lines = [line.text for line in terminal.table(rows, 100)[0]]
    assert lines == [
        "region         batches  start    peak  increase  retained  growth/b  reserved  timeline"
        "  verdict",
        "-" * 97,
        "t.py",
        "  test_gpu x4        2  42.66  673.32    630.66         0         -    700.00  ▁█      "
        "  ok",
        "  test_cpu           -      0       0         0         0         -         -          "
        "  no limit",
    ]


@pytest.mark.parametrize("host_bytes", [None, 0], ids=["not-counted", "nothing"])
def test_column_of_the_host_is_shown_and_explained_only_if_it_is_not_zero(
    record: MakeRecord, host_bytes: int | None
) -> None:
    """The column of the host is shown and explained only if a region retains something there."""
    rows = [judge("t.py::test_a", record(host_retained_bytes=host_bytes), [ZERO])]
    head, *_ = terminal.table(rows)[0]
    assert "host" not in head.text
    assert "host" not in " ".join(line.text for line in terminal.legend(SESSION, rows))
    rows.append(judge("t.py::test_b", record(host_retained_bytes=3 * MB), [ZERO]))
    head, _, _file, one, other = terminal.table(rows)[0]
    assert head.text.split()[-3:] == ["host", "timeline", "verdict"]
    assert one.text.split()[-2:] == ["-", "ok"]
    assert other.text.split()[-2:] == ["3.00", "ok"]
    legend = " ".join(line.text for line in terminal.legend(SESSION, rows))
    assert "host: retained by tensors on the host, which no limit judges." in legend


@pytest.mark.parametrize(
    ("levels", "bars"),
    [
        ([], ""),
        ([5], "▁"),
        ([5, 5, 5], "▁▁▁"),
        ([0, 7], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([1000, 1001, 1000], "▁█▁"),
        (list(range(100)), "▁▂▃▄▅▅▆█"),
        ([0] * 99 + [1], "▁▁▁▁▁▁▁█"),
    ],
    ids=["none", "one", "flat", "two", "stairs", "one-byte", "many", "last-is-shown"],
)
def test_a_spark_line_is_scaled_from_the_lowest_to_the_highest_level(
    levels: list[int], bars: str
) -> None:
    """A spark line has at most eight bars, of which the last one is the last level."""
    assert tables.sparkline(levels) == bars


def test_findings_name_breaches_and_what_was_not_judged(results: list[Result]) -> None:
    """The findings of a report name breaches and what was not
    judged, but no limit that was kept.
    """
    assert terminal.findings(results) == [
        (f"BREACH {FILE}::test_leak[64] compare", "red"),
        (
            "  flat_per_batch: grew by 4 bytes per batch over 9 batches, allowed 0 bytes per batch",
            "red",
        ),
        ("not judged a.py::test_same: the test failed", "yellow"),
        ("not judged b.py::test_same", "yellow"),
        ("  max_reserved_mb(1): this device has no reserve", "yellow"),
    ]


def test_findings_are_wrapped_to_the_width(record: MakeRecord) -> None:
    """Findings are wrapped to the width, and long sentences are not cut off."""
    limit = limit_from_marker("max_retained_mb", (1,), {})
    result = judge("t.py::t", record(retained_bytes=MB + 1), [limit])
    head, *sentence = terminal.findings([result], 60)
    assert head.text == "BREACH t.py::t"
    assert max(len(line.text) for line in sentence) <= 60
    assert " ".join(line.text.strip() for line in sentence) == (
        "max_retained_mb(1): retained 1,048,577 bytes (1.00 MB), allowed 1,048,576 bytes "
        "(1.00 MB): 1 byte too much"
    )


@pytest.mark.parametrize(
    ("count", "lines"),
    [
        (0, []),
        (
            2,
            [
                "2 collected tests have no result (the session stopped early, or a worker died)",
                "  n0",
                "  n1",
            ],
        ),
        (
            12,
            [
                "12 collected tests have no result (the session stopped early, or a worker died)",
                *(f"  n{i}" for i in range(10)),
                "  ... and 2 more",
            ],
        ),
    ],
)
def test_missing_results_are_counted_and_named(count: int, lines: list[str]) -> None:
    """Missing results are counted, and the first ten are named."""
    found = terminal.missing([f"n{i}" for i in range(count)])
    assert [line.text for line in found] == lines


def test_the_legend_has_device_versions_meter_and_notes() -> None:
    """The legend has device, versions and meter, and notes on what the meter cannot see."""
    session = {
        "device": "cuda:0",
        "device_name": "A100",
        "meter": "PyTorch's caching allocator",
        "torch": "2.9.0",
        "cuda": "12.8",
        "notes": ["first note", "second note"],
    }
    lines = [line.text for line in terminal.legend(session)]
    assert lines[:4] == [
        "device: cuda:0 (A100), torch 2.9.0, CUDA 12.8",
        "meter: PyTorch's caching allocator",
        "  first note",
        "  second note",
    ]
    assert lines[4].startswith("Sizes are in MB (2**20 bytes) unless a unit is given. start: in")
    assert max(map(len, lines)) <= 100
    on_cpu = terminal.legend({**session, "cuda": None})
    assert on_cpu[0].text == "device: cuda:0 (A100), torch 2.9.0"


REPAIR = (
    "  this command tries changes that may lower the memory of this test, and prints the edits:",
    "    python -m pytest_cka_memory repair t.py::t --device cpu --to 4B",
)
"""What a limit of 4 bytes on a peak adds for the test ``t.py::t``."""


def test_a_failure_names_limit_region_device_and_remedy(record: MakeRecord) -> None:
    """A failure names the region once, and for each broken limit what to do about it."""
    limits = [ZERO, limit_from_marker("max_peak_mb", ("4 B",), {})]
    result = judge("t.py::t", record(label="fit", retained_bytes=1, peak_bytes=5), limits)
    assert failure.render([result], ScriptedMeter().facts()).splitlines() == [
        "zero_retention broken: retained 1 byte, allowed 0 bytes: 1 byte too much",
        "  in region 'fit', measured on cpu (scripted figures)",
        "  what to do: remove each from what holds it, or keep a number computed from it instead",
        "max_peak_mb('4 B') broken: peak increase 5 bytes, allowed 4 bytes: 1 byte too much",
        f"  what to do: {SEE}".removesuffix(" tensors was live"),
        "    tensors was live",
        *REPAIR,
    ]


def test_a_failure_lists_a_group_once_and_refers_to_it_from_other_limits(
    record: MakeRecord,
) -> None:
    """A group that breaks several limits is listed once, and the other limits refer to it."""
    leak = Holding(
        bytes=8,
        count=2,
        created_at=("net.py:3 in keep",),
        code="x * 2",
        held_by="net.KEPT[0]",
        hint="empty it",
    )
    other = Holding(bytes=2, count=1, created_at=("net.py:9 in run",), code="x.exp()")
    at_peak = (replace(leak, held_by=None, hint=None), other)
    limits = [ZERO, limit_from_marker("max_peak_mb", ("4 B",), {}), ZERO]
    leaking = record(retained_bytes=8, peak_bytes=10, retained=(leak,), at_peak=at_peak)
    result = judge("t.py::t", leaking, limits)
    assert failure.render([result], ScriptedMeter().facts()).splitlines() == [
        "zero_retention broken: retained 8 bytes, allowed 0 bytes: 8 bytes too much",
        "  in the whole test, measured on cpu (scripted figures)",
        "  2 tensors, 8 bytes",
        "    made at net.py:3 in keep: `x * 2`",
        "    held by net.KEPT[0]",
        "    what to do: empty it",
        "  explains 8 of 8 B",
        "max_peak_mb('4 B') broken: peak increase 10 bytes, allowed 4 bytes: 6 bytes too much",
        "  live at the peak:",
        "  2 allocations, 8 bytes, made at net.py:3: as above",
        "  1 allocation, 2 bytes",
        "    made at net.py:9 in run: `x.exp()`",
        f"  what to do: {SEE}".removesuffix(" tensors was live"),
        "    tensors was live",
        "  explains 10 of 10 B",
        *REPAIR,
        "zero_retention broken: retained 8 bytes, allowed 0 bytes: 8 bytes too much",
    ]
    in_report = [problem.holders for problem in problems([result])]
    assert in_report[1][1] == "  2 allocations, 8 bytes, made at net.py:3: as above"
    assert [bool(lines) for lines in in_report] == [True, True, False]


def test_what_references_a_group_is_shown_also_if_the_peak_comes_first(record: MakeRecord) -> None:
    """A group's holder is shown also if the peak comes first, for which no search was made."""
    leak = Holding(bytes=8, count=2, created_at=("net.py:3 in keep",), held_by="net.KEPT[0]")
    limits = [limit_from_marker("max_peak_mb", ("4 B",), {}), ZERO]
    at_peak = (replace(leak, held_by=None),)
    leaking = record(retained_bytes=8, peak_bytes=8, retained=(leak,), at_peak=at_peak)
    text = failure.render([judge("t.py::t", leaking, limits)], ScriptedMeter().facts())
    assert "as above" not in text
    assert text.splitlines()[-3] == "    held by net.KEPT[0]"


@pytest.mark.parametrize(
    ("peak_mb", "retained_mb", "advice"),
    [
        pytest.param(
            94, 94, "remove each from what holds it, or keep a number computed from it instead; "
            "the figure rose with the peak increase, 94.00 MB, of which 94.00 MB are retained",
            id="leak"),
        pytest.param(
            80, 0, f"{SEE}; the figure rose with the peak increase, 80.00 MB",
            id="peak-just-explains-it"),
        pytest.param(
            79, 79, "to find the reason, call region.batch_done() while the reserved memory is "
                    "high, on a device that supports memory snapshots; the allocator reserved "
                    "more than was in use at once, perhaps because free blocks were too small "
                    "for the requests",
            id="the-rest-is-above-the-limit"),
    ],
)  # fmt: skip
def test_advice_on_a_reserve_names_the_peak_if_that_is_the_cause(
    record: MakeRecord, peak_mb: int, retained_mb: int, advice: str
) -> None:
    """Advice on a reserve names the peak, unless the rest alone would break the limit."""
    limit = limit_from_marker("max_reserved_mb", (20,), {})
    measured = record(
        peak_bytes=peak_mb * MB,
        retained_bytes=retained_mb * MB,
        reserved_start_bytes=0,
        reserved_peak_bytes=100 * MB,
    )
    result = judge("t.py::t", measured, [limit])
    text = " ".join(failure.render([result], ScriptedMeter().facts()).split())
    assert (
        f"what to do: {advice} this command tries changes that may lower the memory of this test"
        in text
    )


@pytest.mark.parametrize("workspace_mb", [6, 5])
def test_no_change_is_tried_for_a_peak_that_is_mostly_workspaces(
    record: MakeRecord, workspace_mb: int
) -> None:
    """Of 10 MB, more than half must be workspaces: then only a higher limit or input helps."""
    sizes = {"workspaces": workspace_mb * MB, "temporaries": (10 - workspace_mb) * MB}
    groups = tuple(Holding(bytes=size, count=1, kind=kind) for kind, size in sizes.items())
    limit = limit_from_marker("max_peak_mb", (1,), {})
    result = judge("t.py::t", record(peak_bytes=10 * MB, at_peak=groups), [limit])
    text = failure.render([result], ScriptedMeter().facts())
    are_most = workspace_mb > 5
    assert ("what to do: add the workspaces to the limit" in text) == are_most
    assert ("pytest_cka_memory repair" in text) != are_most


@pytest.mark.parametrize("limit", ["0 B", "1 B"])
def test_advice_to_keep_a_smaller_tensor_says_if_the_limit_allows_none(
    record: MakeRecord, limit: str
) -> None:
    """A clone of a part is smaller, but is a tensor too."""
    kept = Holding(bytes=8, count=1, held_by="KEPT", hint="keep a clone() instead of the tensor")
    limits = [limit_from_marker("max_retained_mb", (limit,), {})]
    result = judge("t.py::t", record(retained_bytes=8, retained=(kept,)), limits)
    text = " ".join(failure.render([result], ScriptedMeter().facts()).split())
    assert "what to do: keep a clone() instead of the tensor" in text
    assert ("this limit allows no tensor at all to be kept" in text) == (limit == "0 B")
    cause = first_cause(result)
    assert cause is not None
    assert cause.holding.hint is not None
    assert cause.holding.hint in text  # the page says the same


def test_a_failure_lists_the_largest_groups_and_sums_up_the_rest(record: MakeRecord) -> None:
    """The largest groups are listed, the rest is summed up; one without a holder says so."""
    sizes = [9, 8, 7, 6, 5, 4, 3]
    groups = tuple(Holding(bytes=size, count=1) for size in sizes)
    leaking = record(retained_bytes=sum(sizes), retained=groups)
    lines = failure.render(
        [judge("t.py::t", leaking, [ZERO])], ScriptedMeter().facts()
    ).splitlines()
    listed = lines.count("    no Python reference to it was found")
    assert 0 < listed < len(sizes)
    assert f"  1 tensor, {sizes[listed - 1]} bytes" in lines
    rest = sizes[listed:]
    assert f"  and {len(rest)} smaller groups, {sum(rest)} bytes" in lines


@pytest.mark.parametrize("largest", [1, 600], ids=["half", "little"])
def test_smaller_groups_are_located_if_they_are_much(record: MakeRecord, largest: int) -> None:
    """The files of the groups that are not shown are named, unless these have less than a tenth."""
    places = ["a.py:1 in f", "b.py:2 in f", "a.py:3 in f", "c.py:4 in f", None]
    shown = [Holding(bytes=10 * largest, count=1) for _ in range(4)]
    rest = [
        Holding(bytes=9 - number, count=1, created_at=(place,) if place else ())
        for number, place in enumerate(places)
    ]
    leaking = record(retained_bytes=40 * largest + 35, retained=(*shown, *rest))
    text = failure.render([judge("t.py::t", leaking, [ZERO])], ScriptedMeter().facts())
    words = " ".join(text.split())
    where = ", 47 % of all: 16 B in a.py, 8 B in b.py, 11 B elsewhere"
    assert f"and 5 smaller groups, 35 bytes{where if largest == 1 else ''} what to do" in words


def test_a_failure_of_a_region_without_a_label_names_the_whole_test(record: MakeRecord) -> None:
    """A region without a label is named as the whole test; an unjudged limit has its advice."""
    text = failure.render([judge("t.py::t", record(), [FLAT])], ScriptedMeter().facts())
    assert text.splitlines() == [
        "flat_per_batch broken: cannot be judged because no batch was seen: "
        "loop over region.batches(loader),",
        "call region.batch_done() after each batch, or write 'with region.each_step():' around "
        "code that",
        "trains with an optimizer",
        "  in the whole test, measured on cpu (scripted figures)",
    ]


@pytest.mark.parametrize(
    ("start_bytes", "advice"),
    [
        (500, f"{SEE}; the region allocates most of the peak"),
        (501, "free what earlier code and fixtures left in use"),
    ],
    ids=["half", "more-than-half"],
)
def test_a_failure_advises_on_the_larger_part_of_the_level(
    record: MakeRecord, start_bytes: int, advice: str
) -> None:
    """The advice on a level is about its larger part: a region cannot lower what it has found."""
    limit = limit_from_marker("max_level_mb", ("4 B",), {})
    result = judge("t.py::t", record(start_bytes=start_bytes, peak_bytes=1000), [limit])
    text = " ".join(failure.render([result], ScriptedMeter().facts()).split())
    assert f"what to do: {advice}" in text
    assert text.count("what to do") == 1


def test_kept_limits_have_no_failure_text(record: MakeRecord) -> None:
    """A region that kept its limits has an empty failure text."""
    assert failure.render([judge("t.py::t", record(), [ZERO])], ScriptedMeter().facts()) == ""


def test_a_table_that_is_too_wide_drops_the_timeline_before_it_cuts_names():
    """A table that is too wide drops the timeline before it cuts names."""
    levels = [1234 * MB + step for step in range(9)]
    samples = tuple(Sample(n, 64, level, level, level) for n, level in enumerate(levels, 1))
    large = RegionRecord(
        label="self-comparison",
        completed=True,
        start_bytes=1234 * MB,
        end_bytes=1234 * MB,
        peak_bytes=2663 * MB,
        retained_bytes=0,
        reserved_start_bytes=0,
        reserved_peak_bytes=2700 * MB,
        reserved_end_bytes=0,
        timeline=samples,
    )
    results = [judge("tests/test_gpu.py::test_it[512]", large, [ZERO])]
    results.append(judge("tests/test_gpu.py::test_failed", replace(large, completed=False), []))
    lines = [line.text for line in terminal.table(results, 100)[0]]
    assert max(map(len, lines)) <= 100
    assert "timeline" not in lines[0]
    assert "test_it[512] self-comparison" in lines[3]
