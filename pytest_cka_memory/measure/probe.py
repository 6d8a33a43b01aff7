"""Measure regions of code: in a test through the ``cka_memory`` fixture, anywhere else directly."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.loaders import FirstBatches, length_of
from pytest_cka_memory.measure.region import Explainer, Region
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters import Meter, meter_for

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Snapshot:
    """A device's memory at one moment, in bytes."""

    allocated_bytes: int
    """Live now."""
    reserved_bytes: int | None
    """Held by the allocator; None where the device has no reserve."""
    peak_bytes: int
    """Highest live level so far in the region around, else since the last one."""
    peak_reserved_bytes: int | None
    """Highest reserve so far, likewise."""


@dataclass(frozen=True)
class Sweep:
    """One region per batch count, each on a fresh set-up, as the seed's timeline does it."""

    batch_counts: tuple[int, ...]
    regions: tuple[Region, ...]

    @property
    def retained_mb(self) -> list[float]:
        """Retained after each count, in MB."""
        return [region.retained_mb for region in self.regions]

    @property
    def growth_mb_per_batch(self) -> float:
        """(last retained - first) / (last count - first): 0.0 where memory does not grow.

        Raises:
            RegionError: for a single batch count.
        """
        if len(self.batch_counts) < 2:
            raise RegionError("growth needs two batch counts or more, e.g. batch_counts=(1, 8)")
        rise = self.retained_mb[-1] - self.retained_mb[0]
        return rise / (self.batch_counts[-1] - self.batch_counts[0])


class MemoryProbe:
    """Measures one device.

    Args:
        device: ``"auto"`` (or None) for the accelerator if there is one, else the CPU; or
            ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ...
        meter: something else to read from, such as
            :class:`~pytest_cka_memory.testing.ScriptedMeter`.
        explainer: tells what to trace as soon as a region ends; by default ``region.retained``
            is traced when asked for.

    Raises:
        DeviceError: for a device that is unknown or not there.
    """

    def __init__(
        self,
        device: "torch.device | str | None" = None,
        *,
        meter: Meter | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self.meter = meter or meter_for("auto" if device is None else str(device))
        self.records: list[RegionRecord] = []
        """The figures of every region that has ended."""
        self._stack = region_stack_for(self.meter)
        self._explainer = explainer
        self._labels: Counter[str] = Counter()
        self._open: list[Region] = []

    @property
    def device(self) -> "torch.device":
        """The device measured; put models there."""
        import torch

        return torch.device(self.meter.torch_device)

    @contextmanager
    def measure(self, label: str | None = None) -> Iterator[Region]:
        """Measure a ``with`` block. Blocks may nest; an outer one includes its inner ones."""
        region = Region(self._unique(_one_line(label) or "region"), self._stack, self._explainer)
        with self._closing(region):
            yield region

    def run(
        self, func: Callable[..., Any], /, *args: Any, warmup: int = 0, **kwargs: Any
    ) -> Region:
        """Measure ``func(*args, **kwargs)``; the region's ``result`` is what it returned.

        The result is alive when the region ends, and so counts as retained. With ``warmup=n``,
        `func` runs n times before; what the first of these kept and the measured run did not is
        the region's ``one_time_bytes``.
        """
        label = self._unique(_name_of(func))
        rehearsals = []
        for _ in range(warmup):
            rehearsal = Region(label, self._stack, self._explainer)
            with self._closing(rehearsal, record=False):
                func(*args, **kwargs)
            rehearsals.append(rehearsal.retained_bytes)
        region = Region(label, self._stack, self._explainer)
        with self._closing(region, first_run_retained_bytes=rehearsals[0] if rehearsals else None):
            region.result = func(*args, **kwargs)
        return region

    def sweep(
        self,
        func: Callable[..., Any],
        loader: Iterable[Any],
        batch_counts: Sequence[int] = (1, 2, 4, 8, 16),
        setup: Callable[[], Any] | None = None,
    ) -> Sweep:
        """Measure `func` over the first n batches of `loader`, for each n in `batch_counts`.

        `func` is called with what `setup` returned (if given) and the shortened loader. `setup`
        runs anew, outside the region, for each count.

        Raises:
            ValueError: for no counts, counts that do not rise, or a loader too short.
        """
        counts = _checked_counts(batch_counts, loader)
        name = _name_of(func)
        regions = []
        for count in counts:
            prepared = () if setup is None else (setup(),)
            with self.measure(f"{name} x{count}") as region:
                func(*prepared, region.batches(FirstBatches(loader, count)))
            regions.append(region)
        return Sweep(counts, tuple(regions))

    def snapshot(self) -> Snapshot:
        """Read the device's memory now."""
        reading = self._stack.snapshot()
        return Snapshot(
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            peak_bytes=reading.peak_bytes,
            peak_reserved_bytes=reading.peak_reserved_bytes,
        )

    def end_open(self) -> list[str]:
        """End regions whose ``with`` block never ended, as not completed; returns their labels."""
        left = self._open[::-1]
        for region in left:
            self._end(region, completed=False)
        return [region.label for region in left]

    @contextmanager
    def _closing(
        self, region: Region, *, record: bool = True, first_run_retained_bytes: int | None = None
    ) -> Iterator[None]:
        completed = False
        self._open.append(region)
        try:
            yield
            completed = True
        finally:
            if region in self._open:  # else end_open was faster
                self._end(region, completed, first_run_retained_bytes, record=record)

    def _end(
        self,
        region: Region,
        completed: bool,
        first_run_retained_bytes: int | None = None,
        *,
        record: bool = True,
    ) -> None:
        self._open.remove(region)
        region._close(completed, first_run_retained_bytes)
        if record:
            self.records.append(region.record)

    def _unique(self, label: str) -> str:
        self._labels[label] += 1
        if self._labels[label] == 1:
            return label
        return self._unique(f"{label} #{self._labels[label]}")  # someone may have written that too


def _one_line(label: object) -> str:
    """Text of a label: whatever was given, reports and xdist take plain text in one line."""
    return "" if label is None else " ".join(str(label).split())


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _checked_counts(batch_counts: Sequence[int], loader: Iterable[Any]) -> tuple[int, ...]:
    counts = tuple(batch_counts)
    if not counts or counts[0] < 1 or list(counts) != sorted(set(counts)):
        raise ValueError(f"batch_counts must be rising numbers, 1 or more, not {counts}")
    available = length_of(loader)
    if available is not None and available < counts[-1]:
        raise ValueError(
            f"the loader has {available} batches, batch_counts asks for {counts[-1]}; "
            f"write counts up to {available}, or give more data"
        )
    return counts
