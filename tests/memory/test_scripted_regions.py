"""Regions on a scripted meter: nesting, peaks, samples, exceptions."""

import gc

import pytest

from pytest_cka_memory import MemoryProbe, RegionError, RegionRecord
from pytest_cka_memory.measure.region_context import never_closed
from pytest_cka_memory.measure.region_stack import RegionStack, region_stack_for
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


class CountedMeter(ScriptedMeter):
    """A scripted meter that counts its open starts and can be made to fail."""

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


def test_a_region_records_start_peak_end_retained_and_net(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Memory from before is freed in it, and some of its own is kept."""
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
        garbage_end_bytes=0,
    )
    assert (region.peak_increase_bytes, region.net_bytes) == (50, -93)


def test_the_peak_ignores_what_was_freed_before_the_region(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """A higher level before the region opened is not its peak."""
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
def test_outer_region_keeps_its_peak_when_an_inner_region_opens(
    meter: ScriptedMeter,
    probe: MemoryProbe,
    before: int,
    inside: int,
    after: int,
    outer_peak: int,
    inner_peak: int,
) -> None:
    """The inner region resets the device's only peak counter."""
    with probe.measure("outer") as outer:
        meter.free(meter.allocate(before))
        with probe.measure("inner") as inner:
            meter.free(meter.allocate(inside))
        meter.free(meter.allocate(after))
    assert (outer.peak_bytes, inner.peak_bytes) == (outer_peak, inner_peak)


def test_three_nested_regions_each_have_their_own_figures(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Each peak and each retained figure counts from the region's own entry."""
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


def test_outer_region_keeps_its_peak_when_another_probe_opens_a_region(
    meter: ScriptedMeter,
) -> None:
    """The plugin's probe measures the whole test, the fixture's a region inside it."""
    with MemoryProbe(meter=meter).measure() as outer:
        meter.free(meter.allocate(100))
        with MemoryProbe(meter=meter).measure() as inner:
            meter.free(meter.allocate(10))
    assert (outer.peak_bytes, inner.peak_bytes) == (100, 10)


def test_the_region_that_opened_first_may_close_first(meter: ScriptedMeter) -> None:
    """Fixtures and generators close their regions in any order."""
    stack = RegionStack(meter)
    first = stack.open()
    meter.free(meter.allocate(10))
    second = stack.open()
    meter.allocate(5)
    with stack.closing(first) as first_closed:
        pass
    meter.free(meter.allocate(50))
    with stack.closing(second) as second_closed:
        pass
    assert (first_closed.end.peak_bytes, first_closed.retained_bytes) == (10, 5)
    assert (second_closed.end.peak_bytes, second_closed.retained_bytes) == (55, 5)


def test_batch_samples_have_their_own_peaks(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """A sample has the level at its boundary and the peak since the boundary before."""
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


def test_nested_regions_take_samples_independently(
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


def test_growth_through_a_watched_loader_is_exact(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """A leak of 4 bytes per batch is reported as 4.0."""
    with probe.measure() as region:
        for _ in region.batches([[0] * 64] * 5):
            meter.allocate(4)
    assert region.growth_bytes_per_batch == 4.0
    assert region.record.batches == 5


def test_a_loader_used_after_its_region_is_not_sampled(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """It is not an error, because a trainer may keep its loader."""
    with probe.measure() as region:
        loader = region.batches([1, 2])
    assert list(loader) == [1, 2]
    assert region.timeline == ()


def test_batch_done_after_the_region_is_refused(probe: MemoryProbe) -> None:
    """The message says where the call belongs."""
    with probe.measure("fit") as region:
        pass
    with pytest.raises(RegionError, match=r"region 'fit' has ended; call batch_done inside its"):
        region.batch_done()


@pytest.mark.parametrize("figure", ["retained_bytes", "peak_mb", "record", "completed"])
def test_figures_of_an_open_region_are_refused(probe: MemoryProbe, figure: str) -> None:
    """An unfinished figure would look like a final one."""
    with (
        probe.measure("fit") as region,
        pytest.raises(RegionError, match="region 'fit' is still open; read its figures after"),
    ):
        getattr(region, figure)


def test_the_timeline_of_an_open_region_can_be_read(probe: MemoryProbe) -> None:
    """It is complete up to the last boundary."""
    with probe.measure() as region:
        region.batch_done()
        assert len(region.timeline) == 1


def test_an_unknown_figure_raises_attribute_error(probe: MemoryProbe) -> None:
    """``hasattr`` relies on that; the message lists the figures."""
    with probe.measure() as region:
        assert not hasattr(region, "retaind_mb")
    with pytest.raises(
        AttributeError, match=r"a region has no 'retaind_mb'; its figures are .*ret"
    ):
        _ = region.retaind_mb


def test_figures_can_be_read_in_megabytes(probe: MemoryProbe, meter: ScriptedMeter) -> None:
    """A figure that is None in bytes is None in MB."""
    with probe.measure() as region:
        for _ in range(5):
            meter.allocate(2**19)
            region.batch_done()
    assert region.retained_mb == 2.5
    assert region.growth_mb_per_batch == 0.5
    assert region.peak_increase_mb == region.net_mb == 2.5
    assert region.reserved_peak_mb is None


def test_a_region_that_raises_is_recorded_as_not_completed(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """It has the figures up to the exception and is not judged."""
    with pytest.raises(ZeroDivisionError, match="by zero"), probe.measure("fit"):  # noqa: PT012
        meter.allocate(10)
        _ = 1 / 0
    (record,) = probe.records
    assert (record.label, record.completed, record.retained_bytes) == ("fit", False, 10)


def test_outer_region_is_completed_if_it_catches_the_exception_of_an_inner_one(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """Only the inner region is recorded as not completed."""
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
    """Also after Ctrl-C; the next region is measured as usual."""
    meter = CountedMeter()
    probe = MemoryProbe(meter=meter)
    with pytest.raises(type(error)), probe.measure():
        raise error
    assert meter.open == 0
    with probe.measure() as region:
        meter.free(meter.allocate(3))
    assert (region.peak_bytes, meter.open) == (3, 0)


def test_a_meter_that_fails_at_the_start_is_stopped() -> None:
    """Its region does not stay on the stack of open regions."""
    meter = CountedMeter()
    meter.broken = True
    with pytest.raises(OSError, match="no mark"), MemoryProbe(meter=meter).measure():
        pytest.fail("the region must not open")
    assert meter.open == 0
    assert region_stack_for(meter)._open == []


def test_a_meter_that_fails_at_the_end_is_stopped() -> None:
    """The user sees the meter's exception."""
    meter = CountedMeter()
    with pytest.raises(OSError, match="no figures"), MemoryProbe(meter=meter).measure():
        meter.broken = True
    assert meter.open == 0
    assert region_stack_for(meter)._open == []


def test_leaving_a_region_that_was_already_ended_records_nothing(
    probe: MemoryProbe, meter: ScriptedMeter
) -> None:
    """Open regions are ended with their test; a generator may leave the block later."""
    block = probe.measure("open")
    block.__enter__()
    assert probe.end_open() == ["open"]
    meter.allocate(3)
    block.__exit__(None, None, None)
    assert [(r.label, r.completed, r.end_bytes) for r in probe.records] == [("open", False, 0)]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a"], "region 'a' was never closed, so it was not judged; open it in a 'with' block"),
        (
            ["a", "b"],
            "regions 'a', 'b' were never closed, so they were not judged; open each of them in a "
            "'with' block",
        ),
    ],
    ids=["one", "two"],
)
def test_message_names_every_region_that_was_never_closed(labels: list[str], message: str) -> None:
    """One or several regions that were never closed are named in one sentence."""
    assert never_closed(labels) == message


def test_labels_are_made_unique(probe: MemoryProbe) -> None:
    """Two regions with one label could not be distinguished or compared with a baseline."""
    for label in ("fit", None, "fit", None, "fit", "eval"):
        with probe.measure(label):
            pass
    labels = [record.label for record in probe.records]
    assert labels == ["fit", "region", "fit #2", "region #2", "fit #3", "eval"]


def test_labels_are_unique_if_a_user_writes_a_numbered_one(probe: MemoryProbe) -> None:
    """A number that the user has written is numbered in turn."""
    for label in ("fit #2", "fit", "fit", "fit"):
        with probe.measure(label):
            pass
    labels = [record.label for record in probe.records]
    assert labels == ["fit #2", "fit", "fit #2 #2", "fit #3"]


def test_records_are_in_the_order_in_which_regions_close(probe: MemoryProbe) -> None:
    """The inner region comes before the outer one."""
    with probe.measure("outer"), probe.measure("inner"):
        pass
    assert [record.label for record in probe.records] == ["inner", "outer"]


def test_uncollected_cycles_are_not_growth_after_a_high_first_batch() -> None:
    """Garbage in cycles that accumulates below the first level must not look like a leak."""
    meter = ScriptedMeter()
    probe = MemoryProbe(meter=meter)

    class Cycle:
        def __init__(self, size: int) -> None:
            self.me = self
            self.handle = meter.allocate(size)

        def __del__(self) -> None:
            meter.free(self.handle)

    gc.collect()
    gc.disable()  # as in a batch that creates too few objects to start a collection
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


def test_a_meter_has_one_region_stack(meter: Meter) -> None:
    """It has one peak counter, whichever probe reads it."""
    assert region_stack_for(meter) is region_stack_for(meter)
    assert region_stack_for(meter) is not region_stack_for(ScriptedMeter())


def test_one_time_bytes_dropped_by_an_inner_entry_count_in_the_outer_region():
    """Opening the inner region drops the workspace, which the outer region must still report."""
    meter = ScriptedMeter(has_reserve=True)
    probe = MemoryProbe(meter=meter)
    with probe.measure() as outer:
        meter.use_workspace(8 * MB)
        with probe.measure() as inner:
            pass
    assert (outer.one_time_bytes, inner.one_time_bytes) == (8 * MB, 0)
