"""The two growth figures of a sweep, and its table."""

from collections.abc import Iterable

from pytest_cka_memory import MemoryProbe, Sweep
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB

COUNTS = (1, 4, 8)


def sweep_keeping_batches(
    meter: ScriptedMeter, probe: MemoryProbe, *, frees_at_the_end: bool
) -> Sweep:
    """Sweep over a function that keeps 1 MB of every batch, and may free it when it ends."""

    def keep(loader: Iterable[int]) -> None:
        blocks = [meter.allocate(MB) for _ in loader]
        for block in blocks if frees_at_the_end else ():
            meter.free(block)

    return probe.sweep(keep, range(8), COUNTS)


def test_growth_that_is_freed_at_the_end_is_growth_per_batch(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Memory that batches keep and the function frees at its end is growth per batch only."""
    sweep = sweep_keeping_batches(meter, probe, frees_at_the_end=True)
    assert sweep.regions[-1].growth_mb_per_batch == 1.0
    assert sweep.growth_mb_per_batch == 1.0
    assert sweep.growth_over_batch_counts_mb == 0.0


def test_growth_that_is_retained_is_in_both_figures(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """If each batch retains 1 MB, both figures of growth are 1 MB."""
    sweep = sweep_keeping_batches(meter, probe, frees_at_the_end=False)
    assert sweep.growth_mb_per_batch == 1.0
    assert sweep.growth_over_batch_counts_mb == 1.0


def test_memory_that_is_allocated_after_the_batches_is_growth_over_counts_only(
    meter: ScriptedMeter, probe: MemoryProbe
) -> None:
    """Memory allocated after the batches raises no level at a boundary: growth over counts only."""
    sweep = probe.sweep(lambda loader: meter.allocate(MB * len(list(loader))), range(8), COUNTS)
    assert sweep.growth_mb_per_batch == 0.0
    assert sweep.growth_over_batch_counts_mb == 1.0


def test_growth_per_batch_is_none_if_no_region_has_five_batches(probe: MemoryProbe) -> None:
    """As in a region, growth per batch is None with fewer than five batches."""
    assert probe.sweep(list, range(4), (1, 4)).growth_mb_per_batch is None


def test_sweep_prints_as_a_table(meter: ScriptedMeter, probe: MemoryProbe) -> None:
    """A sweep prints a row per count, and the growth over counts below them."""
    sweep = sweep_keeping_batches(meter, probe, frees_at_the_end=False)
    *table, note = str(sweep).splitlines()
    assert [line.split() for line in table] == [
        ["batches", "start", "peak", "increase", "retained", "growth/b"],
        ["1", "0", "1.00", "1.00", "1.00", "-"],
        ["4", "1.00", "5.00", "4.00", "4.00", "-"],
        ["8", "5.00", "13.00", "8.00", "8.00", "1.00"],
    ]
    assert note.endswith("; growth of retained over batch counts: 1.00 per batch")


def test_sweep_of_one_count_prints_no_growth_over_counts(probe: MemoryProbe) -> None:
    """A sweep of one count has no growth over counts, and prints none."""
    assert "growth of retained" not in str(probe.sweep(list, [1], (1,)))
