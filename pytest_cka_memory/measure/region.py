"""A region while it is open, and the user's handle to its figures afterwards."""

import gc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pytest_cka_memory.core.allocations import Allocation, UnownedBlock
from pytest_cka_memory.core.figures import FIGURES, Holding, RegionRecord
from pytest_cka_memory.core.growth import Sample
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.holders import survivors
from pytest_cka_memory.measure.loaders import SampledLoader
from pytest_cka_memory.measure.region_stack import RegionStack
from pytest_cka_memory.meters import Reading


class Explainer(Protocol):
    """Tells a region what of it must be explained before its objects are gone."""

    def wanted(self, record: RegionRecord) -> Collection[str]:
        """Figures of `record` whose bytes are to be traced to who made and holds them."""

    def named(self) -> Mapping[str, Any]:
        """Values that a reader knows by name, such as a test's fixtures."""


class Region:
    """A measured stretch of code. Its figures can be read once it has ended.

    Every figure of :class:`~pytest_cka_memory.RegionRecord` in bytes is an attribute, and
    the same in MB (2**20 bytes): ``region.retained_bytes``, ``region.retained_mb``.
    """

    start_bytes: int
    end_bytes: int
    peak_bytes: int
    peak_increase_bytes: int
    retained_bytes: int
    net_bytes: int
    reserved_start_bytes: int | None
    reserved_peak_bytes: int | None
    reserved_end_bytes: int | None
    reserved_increase_bytes: int | None
    one_time_bytes: int | None
    growth_bytes_per_batch: float | None
    start_mb: float
    end_mb: float
    peak_mb: float
    peak_increase_mb: float
    retained_mb: float
    net_mb: float
    reserved_start_mb: float | None
    reserved_peak_mb: float | None
    reserved_end_mb: float | None
    reserved_increase_mb: float | None
    one_time_mb: float | None
    growth_mb_per_batch: float | None

    def __init__(self, label: str, gauge: RegionStack, explainer: Explainer | None = None) -> None:
        self.label = label
        self.result: Any = None
        """What the function returned, where :meth:`MemoryProbe.run` called one."""
        self._stack = gauge
        self._explainer = explainer
        self._samples: list[Sample] = []
        self._boundaries: list[int] = []
        self._survivors: tuple[Allocation, ...] = ()
        self._unowned: tuple[UnownedBlock, ...] = ()
        self._grown: tuple[Holding, ...] = ()
        self._record: RegionRecord | None = None
        self._open_region = gauge.open()

    @property
    def timeline(self) -> tuple[Sample, ...]:
        """One sample per batch boundary so far."""
        return tuple(self._samples)

    @property
    def record(self) -> RegionRecord:
        """All figures as plain data.

        Raises:
            RegionError: while the region is open.
        """
        if self._record is None:
            raise RegionError(
                f"region {self.label!r} is still open; read its figures after its 'with' block"
            )
        return self._record

    @property
    def retained(self) -> tuple[Holding, ...]:
        """What is retained, who made it and who holds it, largest first.

        Searched for when a limit broke, else when first asked: then of what is still alive.

        Raises:
            RegionError: while the region is open.
        """
        if not self.record.retained and self._survivors:
            self._record = replace(self.record, retained=self._traced(self._survivors))
            self._survivors = ()
        return self.record.retained

    def batches(self, loader: Iterable[Any]) -> Any:
        """Return `loader`, the same to its consumer, sampled at each batch boundary."""
        return SampledLoader(loader, self._sample_if_open)

    def batch_done(self, size: int | None = None) -> None:
        """Sample a batch boundary in a loop of one's own; `size` is the number of items.

        Raises:
            RegionError: after the region has ended.
        """
        if self._record is not None:
            raise RegionError(
                f"region {self.label!r} has ended; call batch_done inside its 'with' block"
            )
        self._sample_if_open(None if size is None else int(size))  # a tensor would be kept

    def _sample_if_open(self, size: int | None) -> None:
        if self._record is not None:  # its loader is used on, after the region
            return
        reading, peak_bytes = self._stack.sample(self._open_region)
        # Garbage in cycles is no growth. To collect costs more than most batches, so it is done
        # only where the level is above those of the last quarter. All of these lie within one of
        # the halves that growth compares, so what the later half has more is never garbage.
        levels = [sample.requested_bytes for sample in self._samples if sample.size == size]
        recent = levels[-max(2, len(levels) // 4) :]
        if recent and reading.requested_bytes > max(recent):
            gc.collect()
            reading, _ = self._stack.sample(self._open_region)
        self._samples.append(
            Sample(
                batch=len(self._samples) + 1,
                size=size,
                allocated_bytes=reading.allocated_bytes,
                requested_bytes=reading.requested_bytes,
                peak_bytes=peak_bytes,
            )
        )
        self._boundaries.append(self._stack.meter.serial())
        # Now, for the loop may let go of everything when it ends.
        if not self._grown and "growth_bytes_per_batch" in self._wanted(self._draft(reading)):
            born = self._stack.meter.allocations_since(self._open_region.mark)
            self._grown = _repeated(self._traced(born))

    def _draft(self, end: Reading) -> RegionRecord:
        """The record as it would be if the region ended now; nothing is cleaned or counted."""
        span = self._open_region
        return RegionRecord(
            label=self.label,
            completed=True,
            start_bytes=span.start.allocated_bytes,
            end_bytes=end.allocated_bytes,
            peak_bytes=span.peak_bytes,
            retained_bytes=0,
            reserved_start_bytes=span.start.reserved_bytes,
            reserved_peak_bytes=span.peak_reserved_bytes,
            reserved_end_bytes=end.reserved_bytes,
            timeline=self.timeline,
        )

    def _close(self, completed: bool, first_run_retained_bytes: int | None = None) -> None:
        closing = self._stack.close(self._open_region)
        one_time_bytes = self._open_region.workspace_bytes
        if first_run_retained_bytes is not None:
            kept_once = max(0, first_run_retained_bytes - closing.retained_bytes)
            one_time_bytes = (one_time_bytes or 0) + kept_once
        record = replace(
            self._draft(closing.end),
            completed=completed,
            retained_bytes=closing.retained_bytes,
            one_time_bytes=one_time_bytes,
        )
        self._survivors = closing.survivors
        self._unowned = closing.unowned
        self._record = self._explained(record) if completed else record
        self._open_region.allocations_at_peak.clear()

    def _explained(self, record: RegionRecord) -> RegionRecord:
        wanted = self._wanted(record)
        if "retained_bytes" in wanted:
            rest = record.retained_bytes - sum(birth.bytes for birth in self._survivors)
            unowned = survivors.unowned(rest, self._unowned)
            record = replace(record, retained=(*self._traced(self._survivors), *unowned))
        if "growth_bytes_per_batch" in wanted:
            record = replace(record, grown=_repeated(self._traced(self._survivors)) or self._grown)
        if {"peak_increase_bytes", "reserved_increase_bytes"} & set(wanted):
            record = replace(
                record, at_peak=survivors.group_by_site(self._open_region.allocations_at_peak)
            )
        return record

    def _wanted(self, record: RegionRecord) -> Collection[str]:
        return () if self._explainer is None else self._explainer.wanted(record)

    def _traced(self, allocations: Iterable[Allocation]) -> tuple[Holding, ...]:
        named = {} if self._explainer is None else self._explainer.named()
        return survivors.holdings(allocations, named, self._boundaries)

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is no ordinary attribute: the figures, in bytes or in MB.
        figure = name.replace("_mb", "_bytes")
        if figure not in FIGURES:
            raise AttributeError(f"a region has no {name!r}; its figures are {', '.join(FIGURES)}")
        return self.record.in_mb(figure) if figure != name else getattr(self.record, figure)


def _repeated(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    return tuple(holding for holding in holdings if (holding.batches or 0) > 1)
