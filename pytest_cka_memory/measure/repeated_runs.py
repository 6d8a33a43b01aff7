"""Code that runs again and again, to find what one run does not tell.

Over batch counts, up to the largest size that fits, and under changes that may lower its peak.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.figures import shown_columns
from pytest_cka_memory.errors import LimitError, RegionError
from pytest_cka_memory.measure import display
from pytest_cka_memory.measure.loaders_and_steps import FirstBatches, length_of
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import function_name
from pytest_cka_memory.measure.region_stack import RegionStack
from pytest_cka_memory.meters.torch_versions import is_out_of_memory
from pytest_cka_memory.units import MB, counted, format_size, format_with_unit, megabytes

if TYPE_CHECKING:
    from pytest_cka_memory.repair.report import RepairReport
    from pytest_cka_memory.repair.trials import Figures


def largest(
    stack: RegionStack, step: Callable[[int], Any], at_most: int, limit_mb: object = None
) -> int:
    """Do what :meth:`MemoryProbe.largest` says, for the device of `stack`."""
    if isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1:
        raise ValueError(
            f"at_most must be a whole number of at least 1, not {at_most!r}; write e.g. "
            "at_most=4096"
        )
    limit_bytes = None if limit_mb is None else megabytes(limit_mb)
    if limit_bytes is None and stack.meter.torch_device.partition(":")[0] == "cpu":
        raise LimitError(
            "largest() needs a limit on the CPU, because the memory of the machine is shared with "
            "other programs; write e.g. largest(step, limit_mb=1024), or measure a GPU or "
            "emulate:cuda"
        )
    return _Search(stack, step, limit_bytes).largest(at_most)


class _Search:
    """Calls of one function. Between two of them it keeps only numbers, never a tensor."""

    def __init__(
        self, stack: RegionStack, step: Callable[[int], Any], limit_bytes: int | None
    ) -> None:
        self._stack = stack
        self._step = step
        self._limit_bytes = limit_bytes
        self._tries = 0
        self._first_end_bytes = 0
        """Bytes that were live after the first call and cleaning."""
        self._last_end_bytes = 0
        """The same after the last call."""

    def largest(self, at_most: int) -> int:
        """Return the largest size up to `at_most` that fits; 0 if 1 does not."""
        fitting, size = 0, 1
        # Sizes are doubled first: calls with sizes far above the result would take longest.
        while self._fits(size):
            fitting = size
            if size == at_most:
                break
            size = min(2 * size, at_most)
        too_large = size if size > fitting else size + 1
        while too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if self._fits(middle):
                fitting = middle
            else:
                too_large = middle
        self._verify(fitting, at_most)
        return fitting

    def _verify(self, size: int, at_most: int) -> None:
        """Call the function again with `size` and `size + 1`, because it may have a state."""
        if size and not self._fits(size):
            raise RegionError(
                f"largest(): size {size} had fitted but ran out of memory when it was tried again, "
                f"after {counted(self._tries, 'call')}{self._kept()}; let each call free what it "
                "allocates, or keep an amount of memory that does not depend on the size"
            )
        if size < at_most and self._fits(size + 1):
            raise RegionError(
                f"largest(): size {size + 1} ran out of memory, and fitted when it was tried "
                f"again{self._kept()}; each call must need the same memory for the same size, "
                "and no other program may use the device"
            )

    def _kept(self) -> str:
        kept_bytes = self._last_end_bytes - self._first_end_bytes
        if kept_bytes <= 0:
            return ""
        return f", which left {format_with_unit(kept_bytes)} more in use than the first call"

    def _fits(self, size: int) -> bool:
        """Call the function, which starts and ends with a clean device; return whether it fits."""
        self._tries += 1
        region = self._stack.open(thorough=True)
        try:
            fits = self._runs(size)
        finally:
            with self._stack.closing(region, thorough=True) as closed:
                peak_bytes = closed.end.peak_bytes - region.start.allocated_bytes
                self._last_end_bytes = closed.end.allocated_bytes
        if self._tries == 1:
            self._first_end_bytes = self._last_end_bytes
        return fits and (self._limit_bytes is None or peak_bytes <= self._limit_bytes)

    def _runs(self, size: int) -> bool:
        """Return whether the function runs; what it returns or raises is freed here."""
        try:
            self._step(size)
        except Exception as error:
            if not is_out_of_memory(error, self._stack.meter.torch_device):
                raise
            return False
        return True


@dataclass(frozen=True, repr=False)
class Sweep:
    """One region per batch count, each with a fresh set-up. ``print(sweep)`` shows a table."""

    batch_counts: tuple[int, ...]
    """How many batches each region has seen."""
    regions: tuple[Region, ...]
    """The regions, in the order of `batch_counts`."""

    @property
    def retained_mb(self) -> list[float]:
        """Retained bytes after each batch count, in MB."""
        return [region.retained_mb for region in self.regions]

    @property
    def growth_mb_per_batch(self) -> float | None:
        """The highest ``growth_mb_per_batch`` of the regions: growth while batches are used.

        None if no region has five full batches. Memory that a region keeps until its end and then
        frees counts here, but not in :attr:`growth_over_batch_counts_mb`.
        """
        known = [region.growth_mb_per_batch for region in self.regions]
        return max((growth for growth in known if growth is not None), default=None)

    @property
    def growth_over_batch_counts_mb(self) -> float:
        """(last retained - first retained) / (last count - first count), in MB per batch.

        Raises:
            RegionError: if there is only one batch count.
        """
        if len(self.batch_counts) < 2:
            raise RegionError(
                "growth over batch counts needs at least two batch counts, not "
                f"{self.batch_counts}; write e.g. batch_counts=(1, 8)"
            )
        rise = self.retained_mb[-1] - self.retained_mb[0]
        return rise / (self.batch_counts[-1] - self.batch_counts[0])

    def __repr__(self) -> str:
        counts = ", ".join(map(str, self.batch_counts))
        retained_bytes = [region.record.retained_bytes for region in self.regions]
        retained = ", ".join(map(format_with_unit, retained_bytes))
        return f"<Sweep over {counts} batches: retained {retained}>"

    def _repr_html_(self) -> str:
        """Return a table with one row for each batch count, which notebooks show."""
        return display.table_of_regions(
            [region.record for region in self.regions], "; ".join(self._notes())
        )

    def __str__(self) -> str:
        from tabulate import tabulate  # takes 20 ms, so only for a printed table

        records = [region.record for region in self.regions]
        columns = [row for row in shown_columns(records) if row.name != "batches"]
        rows = [
            [str(count), *(format_size(getattr(record, row.name)) for row in columns)]
            for count, record in zip(self.batch_counts, records, strict=True)
        ]
        head = ["batches", *(row.column for row in columns)]
        # The header is passed as an ordinary row, because tabulate widens columns for a header.
        table = tabulate(
            [head, *rows],
            tablefmt="plain",
            disable_numparse=True,
            colalign=["right"] * len(head),
        )
        return "\n".join([table, *self._notes()])

    def _notes(self) -> list[str]:
        unit = "Sizes are in MB (2**20 bytes) unless a unit is given"
        if len(self.batch_counts) < 2:
            return [unit]
        growth = format_size(self.growth_over_batch_counts_mb * MB)
        return [f"{unit}; growth of retained over batch counts: {growth} per batch"]


def sweep(
    measure: Callable[[str], AbstractContextManager[Region]],
    func: Callable[..., Any],
    loader: Iterable[Any],
    batch_counts: Sequence[int],
    setup: Callable[[], Any] | None,
) -> Sweep:
    """Do what :meth:`MemoryProbe.sweep` says, in regions that `measure` opens."""
    counts = _checked_counts(batch_counts, loader)
    name = function_name(func)
    regions = []
    for count in counts:
        prepared = () if setup is None else (setup(),)
        with measure(f"{name} x{count}") as region:
            func(*prepared, region.batches(FirstBatches(loader, count)))
        regions.append(region)
    return Sweep(counts, tuple(regions))


def _checked_counts(batch_counts: Sequence[int], loader: Iterable[Any]) -> tuple[int, ...]:
    counts = tuple(batch_counts)
    if not counts or counts[0] < 1 or list(counts) != sorted(set(counts)):
        raise ValueError(
            f"batch_counts must be increasing whole numbers of at least 1, not {counts}; write "
            "e.g. (1, 2, 4)"
        )
    available = length_of(loader)
    if available is not None and available < counts[-1]:
        raise ValueError(
            f"the loader has {counted(available, 'batch')}, but batch_counts asks for "
            f"{counts[-1]}; write counts up to {available}, or use a longer loader"
        )
    return counts


def repairs(
    stack: RegionStack,
    step: Callable[[], Any],
    to: object = None,
    seconds: float | None = None,
    show: Callable[[str], object] | None = None,
) -> "RepairReport":
    """Do what :meth:`MemoryProbe.repairs` says, for the device of `stack`."""
    from pytest_cka_memory.meters.accelerator.emulated import computes_values, emulated_cards
    from pytest_cka_memory.repair import budget_of
    from pytest_cka_memory.repair.report import RepairReport
    from pytest_cka_memory.repair.search import Search

    device = stack.meter.torch_device
    search = Search(
        partial(_run, stack, step),
        partial(is_out_of_memory, device=device),
        progress=show or _to_stderr,
        budget_bytes=None if to is None else budget_of(to),
        seconds=seconds,
        has_values=computes_values(),
        cards=emulated_cards(),
    )
    tried = search.search()
    if tried.as_it_is.figures is None and tried.as_it_is.error != "out of memory":
        raise RegionError(
            "repairs(): the step raises an error even if nothing is changed "
            f"({tried.as_it_is.error}); pass a function that can be called several times"
        )
    name = getattr(step, "__qualname__", type(step).__name__)
    return RepairReport(tried, stack.meter.device, name)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(stack: RegionStack, step: Callable[[], Any]) -> "Figures":
    from pytest_cka_memory.repair.trials import Figures

    region = stack.open(thorough=True)
    try:
        step()
    finally:
        with stack.closing(region, thorough=True) as closed:
            end = closed.end
    return Figures(end.peak_bytes, end.peak_reserved_bytes)
