"""Regions, sweeps, snapshots and probes print figures, and show tables and plots in notebooks."""

import re
import sys
from dataclasses import replace

import pytest

from pytest_cka_memory import MemoryProbe, Region
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.errors import MissingPackageError, SizeError
from pytest_cka_memory.measure import display
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


@pytest.fixture
def region(probe: MemoryProbe, meter: ScriptedMeter) -> Region:
    """A region of six batches that grows by 1 MB per batch."""
    with probe.measure("a <loop>") as region:
        for _ in range(6):
            meter.allocate(MB)
            meter.free(meter.allocate(12))
            region.batch_done(4)
    return region


def test_holding_prints_its_bytes_its_line_and_its_holder() -> None:
    """Notebooks show the value of ``region.retained``: bytes, lines and holders."""
    frames = "train.py:3 in fit", "train.py:9 in <module>"
    tensors = Holding(bytes=12_000, count=3, dtype="float32", created_at=frames, held_by="kept[0]")
    assert repr(tensors) == (
        "<Holding: 3 tensors, 12,000 bytes (0.01 MB), made at train.py:3 in fit, held by kept[0]>"
    )
    assert repr(Holding(bytes=1, count=0)) == "<Holding: 1 byte>"
    explained = replace(tensors, code="x * 2", hint="empty it")
    assert repr(explained) == (
        "<Holding: 3 tensors, 12,000 bytes (0.01 MB), made at train.py:3 in fit: `x * 2`, held by "
        "kept[0]; what to do: empty it>"
    )
    table = cells(display.Holdings((explained, Holding(bytes=1, count=0)))._repr_html_())
    assert table == [
        ["size", "tensors", "largest", "made at", "held by", "what to do"],
        ["0.01 MB", "3", "-", "train.py:3 in fit: `x * 2`", "kept[0]", "empty it"],
        ["1 B", "-", "-", "-", "-", "-"],
    ]


def cells(html: str) -> list[list[str]]:
    """Return the texts of a table's rows."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_region_prints_its_figures(probe: MemoryProbe, region: Region) -> None:
    """A region prints its figures instead of its address."""
    assert repr(region) == (
        "<Region 'a <loop>': peak increase 6.00 MB, retained 6.00 MB, growth per batch 1.00 MB, "
        "6 batches>"
    )
    with probe.measure() as still_open:
        assert repr(still_open) == "<Region 'region', open>"
        assert "open" in still_open._repr_html_()
    assert repr(still_open) == "<Region 'region': peak increase 0, retained 0>"
    with pytest.raises(ValueError, match="of the user"), probe.measure("failed") as failed:
        raise ValueError("of the user")
    assert repr(failed) == "<Region 'failed': ended by an exception>"
    beside = replace(still_open.record, host_retained_bytes=3 * MB)
    assert display.summary(beside) == "peak increase 0, retained 0, on the host 3.00 MB"


def test_probe_and_sweep_print_their_figures(probe: MemoryProbe, meter: ScriptedMeter) -> None:
    """A probe and a sweep print figures in one line, as failed assertions show them."""
    sweep = probe.sweep(lambda loader: [meter.allocate(8) for _ in loader], [0] * 4, (1, 4))
    assert repr(sweep) == "<Sweep over 1, 4 batches: retained 8 B, 32 B>"
    assert repr(probe) == "<MemoryProbe of cpu (scripted figures), 2 regions>"
    assert [row[0] for row in cells(sweep._repr_html_())] == [
        "region",
        "&lt;lambda&gt; x1",
        "&lt;lambda&gt; x4",
    ]


def test_notebooks_show_tables_with_escaped_labels(probe: MemoryProbe, region: Region) -> None:
    """A notebook shows the terminal's columns with escaped labels,
    and the reserve if there is one.
    """
    head = ["region", "batches", "start", "peak", "increase", "retained", "growth/b"]
    row = ["a &lt;loop&gt;", "6", "0", "6.00 MB", "6.00 MB", "6.00 MB", "1.00 MB"]
    assert cells(region._repr_html_()) == [head, row]
    assert cells(probe._repr_html_()) == [head, row]
    assert cells(probe.snapshot()._repr_html_()) == [
        ["allocated", "reserved", "peak", "peak_reserved"],
        ["6.00 MB", "-", "6.00 MB", "-"],
    ]


def test_plot_draws_timeline_peak_and_limit(region: Region) -> None:
    """A plot draws the timeline, the peak and the limit, with units on the axis."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = region.plot(figure.subplots(), limit_mb=7)
    live, highest, peak, limit = ax.get_lines()
    assert list(live.get_xdata()) == list(range(7))
    assert list(live.get_ydata()) == list(range(7))
    assert [round(level, 4) for level in highest.get_ydata()] == [1, 2, 3, 4, 5, 6]
    assert (peak.get_label(), limit.get_label()) == ("peak 6.00 MB", "limit 7.00 MB")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch", "live on cpu (MB)")
    with pytest.raises(SizeError, match="2KBanana"):
        region.plot(ax, limit_mb="2KBanana")


def test_plot_of_a_region_without_batches_has_three_points(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """The plot of a region without batches has three points: its start, its peak and its end."""
    pytest.importorskip("matplotlib").use("agg")
    with probe.measure() as region:
        meter.free(meter.allocate(2 * MB))
    ax = region.plot()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["start", "peak", "end"]
    assert list(ax.get_lines()[0].get_ydata()) == [0, 2, 0]


def test_plot_without_matplotlib_says_what_to_install(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matplotlib is optional, so a plot without it raises an error that says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'pytest-cka-memory\[plot\]'"):
        region.plot()
