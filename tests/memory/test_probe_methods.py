"""MemoryProbe's run, sweep and snapshot, and the notebook's two functions, on a scripted meter."""

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
    """A scripted meter with a reserve and workspaces, as on a GPU."""
    return ScriptedMeter(has_reserve=True)


def test_run_measures_one_call(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """``run`` passes arguments on and returns the result, under the function's name as a label."""

    def train(size: int, *, twice: bool) -> str:
        meter.allocate(size)
        if twice:
            meter.allocate(size)
        return "done"

    region = probe.run(train, 8, twice=True)
    assert (region.result, region.label, region.retained_bytes) == ("done", "train", 16)
    assert probe.records == [region.record]


def test_run_takes_any_callable_and_any_keyword(probe: MemoryProbe) -> None:
    """``run`` passes on a keyword named ``func``; a callable without a name is labelled by type."""

    class Trainer:
        def __call__(self, *, func: str) -> str:
            return func

    region = probe.run(Trainer(), func="x")
    assert (region.result, region.label) == ("x", "Trainer")


def test_what_only_the_first_call_allocates_is_one_time_with_a_warm_up(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """With a warm-up, a cache that the first call fills is one-time and not retained."""
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


def test_one_time_bytes_are_none_without_a_warm_up(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Without a warm-up one-time bytes are None instead of 0, because they were not measured."""
    assert probe.run(lambda: meter.allocate(5)).one_time_bytes is None


def test_one_time_bytes_are_zero_if_the_warm_up_keeps_less_than_the_run(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """If the warm-up keeps less than the run, a growing leak is counted in full."""
    sizes = iter((1, 2))
    region = probe.run(lambda: meter.allocate(next(sizes)), warmup=1)
    assert (region.retained_bytes, region.one_time_bytes) == (2, 0)


def test_a_failing_warm_up_leaves_no_record(probe: MemoryProbe) -> None:
    """If the warm-up fails, the measured run does not start, so there is no record."""
    with pytest.raises(ZeroDivisionError, match="by zero"):
        probe.run(lambda: 1 / 0, warmup=1)
    assert probe.records == []
    with pytest.raises(ZeroDivisionError, match="by zero"):
        probe.run(lambda: 1 / 0)
    assert [record.completed for record in probe.records] == [False]


def test_library_workspaces_count_as_one_time(reserving: ScriptedMeter) -> None:
    """A region's end drops the workspaces of libraries and reports them as one-time bytes."""
    region = MemoryProbe(meter=reserving).run(lambda: reserving.use_workspace(8 * MB))
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert (region.one_time_mb, region.peak_mb) == (8.0, 8.0)


def test_workspaces_from_before_a_region_do_not_count_in_it(reserving: ScriptedMeter) -> None:
    """Workspaces from before a region are dropped before its start level is read."""
    reserving.use_workspace(8 * MB)
    region = MemoryProbe(meter=reserving).run(lambda: reserving.allocate(3))
    assert (region.start_bytes, region.one_time_bytes, region.retained_bytes) == (0, 0, 3)


def test_nested_regions_each_record_start_peak_and_end_of_the_reserve(
    reserving: ScriptedMeter,
) -> None:
    """Nested regions each record their reserve, and the outer one keeps its own peak."""
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
    assert figures == [(10, 110, 15), (10, 30, 30)]  # the inner region has cleaned after its end
    assert inner.reserved_increase_bytes == 20


def test_a_sweep_calls_setup_once_per_batch_count(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """A sweep calls setup for each count; growth is retained memory over the number of batches."""
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
    assert sweep.growth_over_batch_counts_mb == 0.5
    assert [region.record.batches for region in sweep.regions] == [1, 2, 4, 8, 16]
    assert [region.label for region in sweep.regions][:2] == ["func x1", "func x2"]


def test_a_sweep_without_setup_passes_only_the_loader(probe: MemoryProbe) -> None:
    """Without setup a sweep passes the loader only; a function that keeps nothing has growth 0."""
    sweep = probe.sweep(lambda loader: list(loader), [1, 2, 3], batch_counts=[1, 3])
    assert sweep.growth_over_batch_counts_mb == 0.0


@pytest.mark.parametrize("warmup", [-1, "2", 1.5, True])
def test_run_refuses_an_invalid_number_of_warm_up_calls(probe: MemoryProbe, warmup: object) -> None:
    """A negative number of warm-up calls would be no warm-up, so it is refused."""
    with pytest.raises(ValueError, match="warmup must be a whole number of at least 0, not"):
        probe.run(list, warmup=warmup)  # type: ignore[arg-type]
    assert not probe.records


@pytest.mark.parametrize(
    "counts", [(), (0, 1), (2, 1), (1, 1), (-1,)], ids=["none", "zero", "falling", "twice", "minus"]
)
def test_a_sweep_refuses_counts_that_do_not_rise(
    probe: MemoryProbe, counts: tuple[int, ...]
) -> None:
    """Counts of a sweep that do not rise are refused before anything runs."""
    with pytest.raises(ValueError, match="must be increasing whole numbers of at least 1, not"):
        probe.sweep(list, [1, 2], batch_counts=counts)


def test_a_sweep_refuses_a_loader_that_is_too_short(probe: MemoryProbe) -> None:
    """A loader too short for a sweep is refused: at once if it has a length, or when it ends."""
    with pytest.raises(
        ValueError, match=r"has 2 batches, but batch_counts asks for 4; write counts up"
    ):
        probe.sweep(list, [1, 2], batch_counts=(1, 4))
    with pytest.raises(ValueError, match=r"ended after 1 of 2 batches"):
        probe.sweep(list, iter([1, 2]), batch_counts=(1, 2))


def test_the_growth_of_a_sweep_of_one_count_is_refused(probe: MemoryProbe) -> None:
    """Growth needs two points, so that of a sweep with one count is refused."""
    sweep = probe.sweep(list, [1], batch_counts=(1,))
    with pytest.raises(RegionError, match="needs at least two batch counts, not"):
        _ = sweep.growth_over_batch_counts_mb


def test_a_snapshot_has_the_peaks_since_the_innermost_region_opened(
    reserving: ScriptedMeter,
) -> None:
    """A snapshot has the peaks since the innermost region opened, and does not reset them."""
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


def test_a_snapshot_outside_a_region_has_the_meters_peaks(reserving: ScriptedMeter) -> None:
    """Outside of regions a snapshot has the peaks of the meter, and does not reset them."""
    probe = MemoryProbe(meter=reserving)
    reserving.free(reserving.allocate(100))
    assert probe.snapshot().peak_bytes == 100
    assert probe.snapshot() == Snapshot(0, 100, 100, 100)


def test_device_is_a_torch_device(probe: MemoryProbe) -> None:
    """The device of a probe is a torch.device, to which users move their models."""
    assert probe.device == torch.device("cpu")


@pytest.fixture
def _scripted_notebook(meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notebook, "MemoryProbe", lambda device: MemoryProbe(meter=meter))
    return


@pytest.mark.usefixtures("_scripted_notebook")
def test_measure_memory_retention_returns_result_peak_and_retained(meter: ScriptedMeter) -> None:
    """``measure_memory_retention`` returns a peak that includes what was allocated before."""
    old = meter.allocate(4 * MB)

    def func() -> str:
        meter.free(meter.allocate(2 * MB))
        meter.free(old)
        meter.allocate(MB)
        return "matrix"

    assert measure_memory_retention(func) == ("matrix", 6.0, 1.0)


@pytest.mark.usefixtures("_scripted_notebook")
def test_measure_memory_at_batch_counts_returns_one_figure_per_count(meter: ScriptedMeter) -> None:
    """``measure_memory_at_batch_counts`` makes a new model in eval mode for each count.

    Counts above the loader's length are reduced to it.
    """
    modes: list[bool] = []

    def func(model: torch.nn.Module, loader: Iterable[int]) -> None:
        modes.append(model.training)
        for _ in loader:
            meter.allocate(MB)

    counts = [1, 2, 4, 8]
    retained = measure_memory_at_batch_counts(func, torch.nn.ReLU, [0, 1, 2], counts)
    assert retained == [1.0, 2.0, 3.0, 3.0]
    assert set(modes) == {False}
