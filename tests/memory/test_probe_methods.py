"""run, sweep and snapshot, and the notebook's two functions, over memory moved by hand."""

from collections.abc import Iterable, Iterator

import pytest
import torch

from pytest_cka_memory import (
    MemoryProbe,
    RegionError,
    Snapshot,
    measure_memory_at_batch_counts,
    measure_memory_retention,
    notebook,
)
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


@pytest.fixture
def reserving() -> ScriptedMeter:
    """Memory moved by hand with a reserve and workspaces, as on a GPU."""
    return ScriptedMeter(has_reserve=True)


def test_run_measures_one_call(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """Arguments go through, the result comes back, the label is the function's name."""

    def train(size: int, *, twice: bool) -> str:
        meter.allocate(size)
        if twice:
            meter.allocate(size)
        return "done"

    region = probe.run(train, 8, twice=True)
    assert (region.result, region.label, region.retained_bytes) == ("done", "train", 16)
    assert probe.records == [region.record]


def test_run_takes_any_callable_and_any_keyword(probe: MemoryProbe) -> None:
    """A keyword named ``func`` is the callable's, and an object without a name has its type's."""

    class Trainer:
        def __call__(self, *, func: str) -> str:
            return func

    region = probe.run(Trainer(), func="x")
    assert (region.result, region.label) == ("x", "Trainer")


def test_a_warm_up_run_takes_what_is_kept_once(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """A cache filled by the first call is one-time, not retained."""
    cache: list[int] = []
    calls: list[int] = []

    def func() -> None:
        calls.append(1)
        meter.allocate(3)
        if not cache:
            cache.append(meter.allocate(1000))

    region = probe.run(func, warmup=2)
    assert len(calls) == 3
    assert (region.retained_bytes, region.one_time_bytes) == (3, 1000)
    assert len(probe.records) == 1
    assert probe.run(func).label == "func #2"


def test_without_warm_up_nothing_is_known_to_be_one_time(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """None, not zero: nobody looked."""
    assert probe.run(lambda: meter.allocate(5)).one_time_bytes is None


def test_a_warm_up_that_keeps_less_than_the_run_is_no_negative_one_time(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """A leak that grows from call to call stays whole."""
    sizes = iter((1, 2))
    region = probe.run(lambda: meter.allocate(next(sizes)), warmup=1)
    assert (region.retained_bytes, region.one_time_bytes) == (2, 0)


def test_a_failing_warm_up_leaves_no_record(probe: MemoryProbe) -> None:
    """The measured run never began."""
    with pytest.raises(ZeroDivisionError, match="by zero"):
        probe.run(lambda: 1 / 0, warmup=1)
    assert probe.records == []
    with pytest.raises(ZeroDivisionError, match="by zero"):
        probe.run(lambda: 1 / 0)
    assert [record.completed for record in probe.records] == [False]


def test_library_workspaces_are_one_time(reserving: ScriptedMeter) -> None:
    """Dropped by cleaning, so not retained; told, so not hidden."""
    region = MemoryProbe(meter=reserving).run(lambda: reserving.use_workspace(8 * MB))
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert (region.one_time_mb, region.peak_mb) == (8.0, 8.0)


def test_workspaces_of_before_are_not_of_the_region(reserving: ScriptedMeter) -> None:
    """Cleaning at entry drops them before the start is read."""
    reserving.use_workspace(8 * MB)
    region = MemoryProbe(meter=reserving).run(lambda: reserving.allocate(3))
    assert (region.start_bytes, region.one_time_bytes, region.retained_bytes) == (0, 0, 3)


def test_the_reserve_is_followed_through_nested_regions(reserving: ScriptedMeter) -> None:
    """Start, peak and end of the allocator's reserve, the outer peak kept."""
    probe = MemoryProbe(meter=reserving)
    reserving.allocate(10)
    with probe.measure() as outer:
        reserving.free(reserving.allocate(100))
        with probe.measure() as inner:
            reserving.free(reserving.allocate(20))
            reserving.allocate(5)
    figures = [
        (r.reserved_start_bytes, r.reserved_peak_bytes, r.reserved_end_bytes)
        for r in (outer, inner)
    ]
    assert figures == [(10, 110, 15), (10, 30, 15)]
    assert inner.reserved_increase_bytes == 20


def test_a_sweep_measures_each_count_on_a_fresh_set_up(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """The seed's timeline: retained over the number of batches is the leak."""
    made: list[list[int]] = []

    def setup() -> list[int]:
        meter.allocate(500)
        made.append([])
        return made[-1]

    def func(model: list[int], loader: Iterable[int]) -> None:
        model.extend(loader)
        meter.allocate(MB // 2 * len(model))

    sweep = probe.sweep(func, range(16), setup=setup)
    assert sweep.batch_counts == (1, 2, 4, 8, 16)
    assert [len(model) for model in made] == [1, 2, 4, 8, 16]
    assert sweep.retained_mb == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert sweep.growth_mb_per_batch == 0.5
    assert [region.record.batches for region in sweep.regions] == [1, 2, 4, 8, 16]
    assert [region.label for region in sweep.regions][:2] == ["func x1", "func x2"]


def test_a_sweep_without_set_up_gets_the_loader_alone(probe: MemoryProbe) -> None:
    """And one that keeps nothing is flat."""
    sweep = probe.sweep(lambda loader: list(loader), [1, 2, 3], batch_counts=[1, 3])
    assert sweep.growth_mb_per_batch == 0.0


@pytest.mark.parametrize(
    "counts", [(), (0, 1), (2, 1), (1, 1), (-1,)], ids=["none", "zero", "falling", "twice", "minus"]
)
def test_a_sweep_refuses_counts_that_do_not_rise(
    probe: MemoryProbe, counts: tuple[int, ...]
) -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match="batch_counts must be rising numbers, 1 or more, not"):
        probe.sweep(list, [1, 2], batch_counts=counts)


def test_a_sweep_refuses_a_loader_that_is_too_short(probe: MemoryProbe) -> None:
    """Known at once where the loader has a length, else when it ends."""
    with pytest.raises(
        ValueError, match=r"has 2 batches, batch_counts asks for 4; write counts up"
    ):
        probe.sweep(list, [1, 2], batch_counts=(1, 4))
    with pytest.raises(ValueError, match=r"ended after 1 of 2 batches"):
        probe.sweep(list, iter([1, 2]), batch_counts=(1, 2))


def test_growth_over_one_count_is_refused(probe: MemoryProbe) -> None:
    """It takes two points."""
    sweep = probe.sweep(list, [1], batch_counts=(1,))
    with pytest.raises(RegionError, match="growth needs two batch counts or more"):
        _ = sweep.growth_mb_per_batch


def test_a_snapshot_inside_a_region_has_its_peaks(reserving: ScriptedMeter) -> None:
    """Peaks since the innermost region's entry, untouched by the look."""
    probe = MemoryProbe(meter=reserving)
    reserving.allocate(10)
    with probe.measure() as outer:
        reserving.free(reserving.allocate(100))
        with probe.measure():
            reserving.free(reserving.allocate(5))
            assert probe.snapshot() == Snapshot(10, 15, 15, 15)
            assert probe.snapshot() == Snapshot(10, 15, 15, 15)
        assert probe.snapshot().peak_bytes == 110
    assert outer.peak_bytes == 110


def test_a_snapshot_outside_a_region_reads_what_is(reserving: ScriptedMeter) -> None:
    """It resets nothing."""
    probe = MemoryProbe(meter=reserving)
    reserving.free(reserving.allocate(100))
    assert probe.snapshot().peak_bytes == 100
    assert probe.snapshot() == Snapshot(0, 100, 100, 100)


def test_the_device_is_torchs(probe: MemoryProbe) -> None:
    """Models are put there."""
    assert probe.device == torch.device("cpu")


@pytest.fixture
def _scripted_notebook(meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notebook, "MemoryProbe", lambda device: MemoryProbe(meter=meter))
    return


@pytest.mark.usefixtures("_scripted_notebook")
def test_the_notebooks_retention_counts_model_and_all(meter: ScriptedMeter) -> None:
    """(result, peak_mb, retained_mb), the peak with what was there before."""
    old = meter.allocate(4 * MB)

    def func() -> str:
        meter.free(meter.allocate(2 * MB))
        meter.free(old)
        meter.allocate(MB)
        return "matrix"

    assert measure_memory_retention(func) == ("matrix", 6.0, 1.0)


@pytest.mark.usefixtures("_scripted_notebook")
def test_the_notebooks_timeline_is_one_figure_a_count(meter: ScriptedMeter) -> None:
    """Models are fresh and in eval mode; counts above the loader's are cut to it."""
    modes: list[bool] = []

    def func(model: torch.nn.Module, loader: Iterable[int]) -> None:
        modes.append(model.training)
        for _ in loader:
            meter.allocate(MB)

    counts = [1, 2, 4, 8]
    retained = measure_memory_at_batch_counts(func, torch.nn.ReLU, [0, 1, 2], counts)
    assert retained == [1.0, 2.0, 3.0, 3.0]
    assert set(modes) == {False}
