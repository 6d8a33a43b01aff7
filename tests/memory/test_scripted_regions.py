"""Regions over memory moved by hand: nesting, peaks, samples, exceptions."""

import gc

import pytest

from pytest_cka_memory import MemoryProbe, RegionError, RegionRecord
from pytest_cka_memory.measure.region_stack import RegionStack, region_stack_for
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


class CountedMeter(ScriptedMeter):
    """Knows how often it was started and not stopped, and may fail on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0
        self.broken = False

    def start(self) -> None:
        self.open += 1

    def stop(self) -> None:
        self.open -= 1

    def mark(self) -> int:
        if self.broken:
            raise OSError("no mark")
        return super().mark()

    def retained_since(self, mark: int) -> int:
        if self.broken:
            raise OSError("no figures")
        return super().retained_since(mark)


def test_every_figure_of_a_plain_region(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """Start, peak, end, retained and net, where old memory is freed and new is kept."""
    old = meter.allocate(100)
    with probe.measure("step") as region:
        temporary = meter.allocate(50)
        meter.free(old)
        meter.free(temporary)
        meter.allocate(7)
    assert region.record == RegionRecord(
        label="step",
        completed=True,
        start_bytes=100,
        end_bytes=7,
        peak_bytes=150,
        retained_bytes=7,
    )
    assert (region.peak_increase_bytes, region.net_bytes) == (50, -93)


def test_the_peak_is_that_of_the_region_not_of_before(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """A high level that is over before the region opens is not its peak."""
    meter.free(meter.allocate(1000))
    with probe.measure() as region:
        meter.free(meter.allocate(10))
    assert region.peak_bytes == 10


@pytest.mark.parametrize(
    ("before", "inside", "after", "outer_peak", "inner_peak"),
    [
        pytest.param(100, 10, 0, 100, 10, id="before-the-inner"),
        pytest.param(10, 100, 0, 100, 100, id="in-the-inner"),
        pytest.param(10, 20, 100, 100, 20, id="after-the-inner"),
        pytest.param(0, 0, 0, 0, 0, id="nothing"),
    ],
)
def test_an_outer_region_keeps_its_peak_through_an_inner_one(
    meter: ScriptedMeter,
    probe: MemoryProbe,
    before: int,
    inside: int,
    after: int,
    outer_peak: int,
    inner_peak: int,
) -> None:
    """The inner region resets the one peak counter that the device has."""
    with probe.measure("outer") as outer:
        meter.free(meter.allocate(before))
        with probe.measure("inner") as inner:
            meter.free(meter.allocate(inside))
        meter.free(meter.allocate(after))
    assert (outer.peak_bytes, inner.peak_bytes) == (outer_peak, inner_peak)


def test_three_regions_deep_every_peak_is_right(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """And each retained figure counts from its own entry."""
    with probe.measure() as a:
        meter.allocate(1)
        with probe.measure() as b:
            meter.allocate(2)
            with probe.measure() as c:
                meter.free(meter.allocate(40))
                meter.allocate(4)
            meter.free(meter.allocate(80))
        meter.free(meter.allocate(20))
    assert [r.peak_bytes for r in (a, b, c)] == [87, 87, 43]
    assert [r.start_bytes for r in (a, b, c)] == [0, 1, 3]
    assert [r.retained_bytes for r in (a, b, c)] == [7, 6, 4]


def test_two_probes_share_the_peaks_of_one_meter(meter: ScriptedMeter) -> None:
    """The plugin's probe around a test must survive the fixture's inside it."""
    with MemoryProbe(meter=meter).measure() as outer:
        meter.free(meter.allocate(100))
        with MemoryProbe(meter=meter).measure() as inner:
            meter.free(meter.allocate(10))
    assert (outer.peak_bytes, inner.peak_bytes) == (100, 10)


def test_spans_may_overlap(meter: ScriptedMeter) -> None:
    """The first to open need not be the last to close: fixtures and generators do that."""
    gauge = RegionStack(meter)
    first = gauge.open()
    meter.free(meter.allocate(10))
    second = gauge.open()
    meter.allocate(5)
    first_closing = gauge.close(first)
    meter.free(meter.allocate(50))
    second_closing = gauge.close(second)
    assert (first.peak_bytes, first_closing.retained_bytes) == (10, 5)
    assert (second.peak_bytes, second_closing.retained_bytes) == (55, 5)


def test_batch_samples_have_their_own_peaks(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """Level at the boundary, and the highest level since the one before."""
    with probe.measure() as region:
        for size, temporary in ((1, 100), (2, 10), (3, 50)):
            meter.free(meter.allocate(temporary))
            meter.allocate(size)
            region.batch_done(64)
        meter.free(meter.allocate(1000))
    assert [(s.batch, s.size, s.allocated_bytes, s.peak_bytes) for s in region.timeline] == [
        (1, 64, 1, 100),
        (2, 64, 3, 11),
        (3, 64, 6, 53),
    ]
    assert region.peak_bytes == 1006


def test_samples_of_nested_regions_do_not_disturb_each_other(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Each region has its own last boundary."""
    with probe.measure() as outer, probe.measure() as inner:
        meter.free(meter.allocate(100))
        inner.batch_done()
        meter.free(meter.allocate(10))
        inner.batch_done()
        outer.batch_done()
    assert [sample.peak_bytes for sample in inner.timeline] == [100, 10]
    assert [sample.peak_bytes for sample in outer.timeline] == [100]


def test_a_leak_per_batch_is_exact_through_a_watched_loader(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """4 bytes a batch are reported as 4.0."""
    with probe.measure() as region:
        for _ in region.batches([[0] * 64] * 5):
            meter.allocate(4)
    assert region.growth_bytes_per_batch == 4.0
    assert region.record.batches == 5


def test_a_loader_used_on_after_its_region_is_not_sampled(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """A trainer keeps its loader; that is no error."""
    with probe.measure() as region:
        loader = region.batches([1, 2])
    assert list(loader) == [1, 2]
    assert region.timeline == ()


def test_batch_done_after_the_end_is_refused(probe: MemoryProbe) -> None:
    """A call of one's own there is a mistake; the error says where it belongs."""
    with probe.measure("fit") as region:
        pass
    with pytest.raises(RegionError, match=r"region 'fit' has ended; call batch_done inside its"):
        region.batch_done()


@pytest.mark.parametrize("figure", ["retained_bytes", "peak_mb", "record", "completed"])
def test_figures_of_an_open_region_are_refused(probe: MemoryProbe, figure: str) -> None:
    """Half a figure would look like a whole one."""
    with (
        probe.measure("fit") as region,
        pytest.raises(RegionError, match="region 'fit' is still open; read its figures after"),
    ):
        getattr(region, figure)


def test_the_timeline_of_an_open_region_can_be_read(probe: MemoryProbe) -> None:
    """It is final up to the last boundary."""
    with probe.measure() as region:
        region.batch_done()
        assert len(region.timeline) == 1


def test_an_unknown_figure_is_an_attribute_error(probe: MemoryProbe) -> None:
    """``hasattr`` and typing errors both rely on it; the message lists the figures."""
    with probe.measure() as region:
        assert not hasattr(region, "retaind_mb")
    with pytest.raises(
        AttributeError, match=r"a region has no 'retaind_mb'; its figures are .*ret"
    ):
        _ = region.retaind_mb


def test_figures_in_megabytes(probe: MemoryProbe, meter: ScriptedMeter) -> None:
    """Each figure of bytes has its twin."""
    with probe.measure() as region:
        for _ in range(5):
            meter.allocate(2**19)
            region.batch_done()
    assert region.retained_mb == 2.5
    assert region.growth_mb_per_batch == 0.5
    assert region.peak_increase_mb == region.net_mb == 2.5
    assert region.reserved_peak_mb is None


def test_an_exception_leaves_a_region_uncompleted(probe: MemoryProbe, meter: ScriptedMeter) -> None:
    """It is recorded with what was seen, and marked as not to be judged."""
    with pytest.raises(ZeroDivisionError, match="by zero"), probe.measure("fit"):  # noqa: PT012
        meter.allocate(10)
        _ = 1 / 0
    (record,) = probe.records
    assert (record.label, record.completed, record.retained_bytes) == ("fit", False, 10)


def test_an_exception_in_an_inner_region_leaves_the_outer_one_whole(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """Caught inside, it is the outer region's ordinary course."""
    with probe.measure("outer"):
        with pytest.raises(KeyError, match="x"), probe.measure("inner"):
            raise KeyError("x")
        meter.free(meter.allocate(9))
    assert [(r.label, r.completed, r.peak_bytes) for r in probe.records] == [
        ("inner", False, 0),
        ("outer", True, 9),
    ]


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_the_meter_is_stopped_however_a_region_ends(error: BaseException) -> None:
    """Ctrl-C included; then the next region starts anew."""
    meter = CountedMeter()
    probe = MemoryProbe(meter=meter)
    with pytest.raises(type(error)), probe.measure():
        raise error
    assert meter.open == 0
    with probe.measure() as region:
        meter.free(meter.allocate(3))
    assert (region.peak_bytes, meter.open) == (3, 0)


def test_a_meter_that_fails_at_the_start_is_stopped() -> None:
    """And its span is not left open, folding peaks for ever."""
    meter = CountedMeter()
    meter.broken = True
    with pytest.raises(OSError, match="no mark"), MemoryProbe(meter=meter).measure():
        pytest.fail("the region must not open")
    assert meter.open == 0
    assert region_stack_for(meter)._open == []


def test_a_meter_that_fails_at_the_end_is_stopped() -> None:
    """Its error is what the user sees."""
    meter = CountedMeter()
    with pytest.raises(OSError, match="no figures"), MemoryProbe(meter=meter).measure():
        meter.broken = True
    assert meter.open == 0
    assert region_stack_for(meter)._open == []


def test_a_region_that_was_ended_for_its_user_is_not_ended_twice(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """As at a test's end: its block may yet be left, by a generator that is closed late."""
    block = probe.measure("open")
    block.__enter__()
    assert probe.end_open() == ["open"]
    meter.allocate(3)
    block.__exit__(None, None, None)
    assert [(r.label, r.completed, r.end_bytes) for r in probe.records] == [("open", False, 0)]


def test_labels_are_made_unique(probe: MemoryProbe) -> None:
    """Two rows of one name could not be told apart, nor compared with a baseline."""
    for label in ("fit", None, "fit", None, "fit", "eval"):
        with probe.measure(label):
            pass
    labels = [record.label for record in probe.records]
    assert labels == ["fit", "region", "fit #2", "region #2", "fit #3", "eval"]


def test_a_label_that_looks_like_a_made_one_stays_unique(probe: MemoryProbe) -> None:
    """Whatever people write, no two regions of a test share a label."""
    for label in ("fit #2", "fit", "fit", "fit"):
        with probe.measure(label):
            pass
    labels = [record.label for record in probe.records]
    assert len(set(labels)) == 4


def test_records_are_in_the_order_of_their_ends(probe: MemoryProbe) -> None:
    """Inner before outer."""
    with probe.measure("outer"), probe.measure("inner"):
        pass
    assert [record.label for record in probe.records] == ["inner", "outer"]


def test_cycles_are_no_growth_even_after_a_high_first_batch() -> None:
    """Garbage in cycles builds up below a high first level; it must not be read as a leak."""
    meter = ScriptedMeter()
    probe = MemoryProbe(meter=meter)

    class Cycle:
        def __init__(self, size: int) -> None:
            self.me = self
            self.handle = meter.allocate(size)

        def __del__(self) -> None:
            meter.free(self.handle)

    gc.collect()
    gc.disable()  # as a long batch would, that makes few objects
    try:
        with probe.measure() as region:
            once = meter.allocate(1000)
            region.batch_done()
            meter.free(once)
            for _ in range(8):
                Cycle(10)
                region.batch_done()
    finally:
        gc.enable()
    assert region.growth_bytes_per_batch <= 0.0


def test_a_gauge_is_shared_per_meter(meter: Meter) -> None:
    """One meter has one peak counter, whoever reads it."""
    assert region_stack_for(meter) is region_stack_for(meter)
    assert region_stack_for(meter) is not region_stack_for(ScriptedMeter())


def test_an_inner_region_swallows_no_one_time_bytes_of_the_outer():
    """Its entry cleans for itself, and drops the workspace that the outer region must tell of."""
    meter = ScriptedMeter(has_reserve=True)
    probe = MemoryProbe(meter=meter)
    with probe.measure() as outer:
        meter.use_workspace(8 * MB)
        with probe.measure() as inner:
            pass
    assert (outer.one_time_bytes, inner.one_time_bytes) == (8 * MB, 0)
