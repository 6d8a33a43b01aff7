"""Trends: at which commit a figure rose and stayed, and how ``trend`` prints and draws them."""

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_cka_memory.cli.main import OK, UNUSABLE, main
from pytest_cka_memory.core.verdicts import parse_tolerance
from pytest_cka_memory.stored.history import HistoryDevice, HistoryRegion, HistorySession
from pytest_cka_memory.stored.trend import Series, series_of
from pytest_cka_memory.units import MB

ONE_PERCENT = parse_tolerance("1%")
CPU = ("cpu", "torch's CPU allocator")


def session(
    number: int,
    peaks: dict[str, int | None],
    device: tuple[str, str] = CPU,
    torch: str = "2.15",
    commit: str | None = "",
    threads: str = "",
    without_scratch: int | None = None,
) -> HistorySession:
    """The session of one day, with a region per test."""
    more = {} if without_scratch is None else {"increase_without_scratch_bytes": without_scratch}
    regions = tuple(
        HistoryRegion(f"t.py::{test}", "", {"peak_increase_bytes": size, "unknown": 1, **more})
        for test, size in peaks.items()
    )
    name = f"{number:010x}" + "0" * 30 if commit == "" else commit
    on = {"threads": threads} if threads else None
    devices = (HistoryDevice(*device, torch, None, regions, on),)
    return HistorySession(name, False, f"2026-01-{number + 1:02}T00:00:00+00:00", devices)


def series(sizes: Sequence[int]) -> Series:
    (found,) = series_of(session(number, {"t": size}) for number, size in enumerate(sizes))
    return found


STEPS = {
    "flat": ([5, 5, 5, 5], []),
    "step": ([5, 5, 9, 9, 9], [2]),
    "from zero": ([0, 0, 1, 1], [2]),
    "one outlier up": ([5, 5, 9, 5, 5], []),
    "one outlier down": ([5, 5, 1, 5, 5], []),
    "two high sessions that did not stay": ([5, 5, 9, 9, 5, 5], []),
    "step with an outlier down after it": ([5, 5, 9, 9, 5, 9, 9], [2]),
    "step with an outlier up before it": ([5, 5, 20, 5, 9, 9, 9], [4]),
    "rise and partial fall": ([5, 5, 20, 20, 9, 9], [2]),
    "fall": ([9, 9, 5, 5], []),
    "fall and rise to the old level": ([9, 9, 5, 5, 9, 9], [4]),
    "two steps": ([5, 5, 9, 9, 20, 20], [2, 4]),
    "within the tolerance": ([1000, 1000, 1010, 1010], []),
    "one byte above the tolerance": ([1000, 1000, 1011, 1011], [2]),
    "in the first sessions": ([5, 9], [1]),
    "single session": ([5], []),
}


@pytest.mark.parametrize(("sizes", "expected"), STEPS.values(), ids=STEPS)
def test_step_is_a_rise_that_later_sessions_keep(sizes: list[int], expected: list[int]) -> None:
    """A step in memory is a rise that later sessions keep; a single
    outlier is none and hides none.
    """
    found = series(sizes)
    steps = list(found.steps(ONE_PERCENT))
    assert [found.points.index(step.after) for step in steps] == expected
    for step in steps:
        assert step.before.size_bytes < step.after.size_bytes


@pytest.mark.parametrize("noise", [3, 4, 5])
def test_step_is_found_in_long_histories_with_outliers(noise: int) -> None:
    """A step in memory is found in a long history in which every seventh session is an outlier."""
    sizes = [1000 if n < 50 else 1500 for n in range(100)]
    for n in range(noise, 100, 7):
        sizes[n] = 4000 if n % 2 else 10
    assert sizes[48:52] == [1000, 1000, 1500, 1500]  # its place is then defined
    (step,) = series(sizes).steps(ONE_PERCENT)
    assert int(step.after.session.name, 16) == 50


def test_rise_in_the_newest_session_is_not_yet_confirmed() -> None:
    """A rise of memory in the newest session is not confirmed until the next one also has it."""
    (last,) = series([5, 5, 9]).steps(ONE_PERCENT)
    (older,) = series([5, 5, 9, 9]).steps(ONE_PERCENT)
    assert (last.confirmed, older.confirmed) == (False, True)


def test_devices_and_meters_are_separate_series_and_torch_versions_are_not() -> None:
    """A series belongs to one device and one meter, and contains every version of torch."""
    gpu = ("NVIDIA H200", "allocator")
    sessions = [
        session(0, {"t": 5}),
        session(1, {"t": 99}, gpu),
        session(2, {"t": 5}, (CPU[0], "ledger")),
        session(3, {"t": 6}, torch="2.16"),
        session(4, {"t": None}),
    ]
    found = {each.key[:2]: each.sizes for each in series_of(sessions)}
    assert found == {CPU: [5, 6], gpu: [99], (CPU[0], "ledger"): [5]}


HISTORY = [
    session(0, {"test_a": 10 * MB, "test_same": 4, "test_falls": 9000}),
    session(1, {"test_a": 10 * MB, "test_same": 4, "test_falls": 9000}),
    session(2, {"test_a": 15 * MB, "test_same": 4, "test_falls": 900}),
    session(3, {"test_a": 15 * MB, "test_same": 4}, torch="2.16"),
    session(3, {"test_a": 20 * MB, "test_same": 4, "test_new": 1}, torch="2.17"),
]
TEXT = """\
on cpu (torch's CPU allocator)
  t.py::test_a
    peak increase  ▁▁▅▅█  10.00 MB  ->  20.00 MB  +100.0%
  t.py::test_falls
    peak increase  ██▁      8.8 KB  ->     900 B   -90.0%

rose at 0000000002 (2026-01-03), last measured at 0000000001:
  t.py::test_a: peak increase 10.00 MB -> 15.00 MB (+50.0%) and stayed
rose at 0000000003 (2026-01-04), the commit of the session before, torch 2.16 -> 2.17:
  t.py::test_a: peak increase 15.00 MB -> 20.00 MB (+33.3%) in the newest session

5 sessions from 2026-01-01 to 2026-01-04: 2 of 4 figures changed
"""


@pytest.fixture
def written(tmp_path: Path) -> str:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f"{each.to_line()}\n" for each in HISTORY), "utf-8")
    return str(path)


def test_trend_prints_what_changed_and_the_commits(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trend prints what changed with commits and sparklines; --all prints other figures too."""
    assert main(["trend", written]) == OK
    assert capsys.readouterr().out == TEXT
    assert main(["trend", written, "--all", "--tolerance", "60%"]) == OK
    printed = capsys.readouterr().out
    assert "  t.py::test_same\n    peak increase" in printed
    assert "rose at" not in printed


def test_page_on_histories_shows_this_trend() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "history.md"
    assert f"```text\n{TEXT}```" in page.read_text("utf-8")


def test_trend_of_nothing_is_refused_and_one_session_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors for a trend of nothing, and the text for one session, say what to do."""
    path = tmp_path / "h.jsonl"
    path.touch()
    assert main(["trend", str(path)]) == UNUSABLE
    assert (
        "it records no pytest session; run pytest with --cka-memory-hist" in capsys.readouterr().err
    )
    path.write_text(HISTORY[0].to_line(), "utf-8")
    assert main(["trend", str(path)]) == OK
    assert capsys.readouterr().out.startswith("1 session from 2026-01-01")
    assert main(["trend", str(path), "-o", str(path)]) == UNUSABLE


def test_trend_draws_a_line_per_figure_and_a_dot_per_rise(written: str, tmp_path: Path) -> None:
    """The picture has a line per figure and a dot per rise, with the commit when hovering."""
    picture = tmp_path / "trend.svg"
    assert main(["trend", written, "-o", str(picture)]) == OK
    root = ElementTree.parse(picture).getroot()
    tag = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{tag}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 3]
    heights = [float(pair.split(",")[1]) for pair in lines[0].attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)  # y points down
    titles = [dot.findtext(f"{tag}title") or "" for dot in root.findall(f"{tag}circle")]
    assert [title[:10] for title in titles] == ["0000000002", "0000000003"]
    assert re.search("<text[^>]*>t.py::test_falls</text>", picture.read_text("utf-8"))


def test_figures_of_other_machines_are_other_series() -> None:
    """A peak that differs with the number of threads is no rise; one without scratch memory is."""
    threads = ["1", "2", "1", "2", "1", "2"]
    sizes = [5, 9, 5, 9, 5, 9]
    found = [
        session(number, {"t": size}, threads=count, without_scratch=3 if number < 4 else 4)
        for number, (size, count) in enumerate(zip(sizes, threads, strict=True))
    ]
    one, two, everywhere = series_of(found)
    assert one.sizes == [5] * 3
    assert two.sizes == [9] * 3
    assert [one.key.name, two.key.name] == [
        "peak increase (threads 1)",
        "peak increase (threads 2)",
    ]
    assert everywhere.key.name == "peak increase without scratch memory"
    (step,) = everywhere.steps(ONE_PERCENT)
    assert step.after.session.date == "2026-01-05T00:00:00+00:00"
    assert not [*one.steps(ONE_PERCENT), *two.steps(ONE_PERCENT)]


def test_peak_without_scratch_memory_is_no_series_of_its_own_on_one_machine() -> None:
    """It would say again what the peak says."""
    found = [session(number, {"t": 5}, threads="1", without_scratch=3) for number in range(3)]
    (series,) = series_of(found)
    assert series.key.figure == "peak_increase_bytes"
