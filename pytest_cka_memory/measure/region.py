"""The user's handle to a region: while it is open, and to its figures afterwards."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup, total_bytes
from pytest_cka_memory.core.figures import EXPLAINED, FIGURES, READABLE, RegionRecord
from pytest_cka_memory.core.record_parts import FigureNames
from pytest_cka_memory.core.retention import Holding, Sample
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.evidence import (
    Explainer,
    LoopEvidence,
    Notifier,
    ReserveEvidence,
    WithRecording,
    explains_host,
)
from pytest_cka_memory.measure.loaders_and_steps import StepBoundaries
from pytest_cka_memory.measure.region_stack import ClosedRegion, RegionStack, record_at, record_of
from pytest_cka_memory.meters.collector import not_counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pytest_cka_memory.measure.additions import Addition

_IN_MB = {row.mb_name: row.name for row in FIGURES.values() if row.mb_name != row.name}
"""Name of a figure in MB -> its name in bytes."""


class Region(WithRecording, FigureNames):
    """A measured block of code. Its figures can be read after it has ended.

    Every figure of :class:`~pytest_cka_memory.RegionRecord` in bytes is an attribute, and
    the same in MB (2**20 bytes): ``region.retained_bytes``, ``region.retained_mb``. ``dir(region)``
    lists them all; they follow from the registry in :mod:`pytest_cka_memory.core.figures`.
    """

    def __init__(
        self,
        label: str,
        stack: RegionStack,
        explainer: Explainer | None = None,
        is_thorough: Callable[[], bool] = lambda: True,
        also: Collection[str] = (),
        before_reading: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self.result: Any = None
        """What the function returned, if :meth:`MemoryProbe.run` called one."""
        self._stack = stack
        self._explainer = explainer
        self._is_thorough = is_thorough
        self._before_reading = before_reading
        self._steps = StepBoundaries(label)
        self._survivors: Sequence[Allocation] = ()
        self._host_survivors: Sequence[Allocation] = ()
        self._record: RegionRecord | None = None
        self._live_at_peak: Sequence[AllocationGroup] = ()
        self._figures_read: set[str] = set()
        self.law: dict[str, Any] | None = None  # one that was found in it; its record keeps it
        before_reading()
        self._open_region = stack.open(thorough=is_thorough())
        self._begin(also)

    @not_counted
    def _begin(self, also: Collection[str]) -> None:
        """Begin to observe the open region."""
        peaks, meter = self._open_region.peaks, self._stack.meter
        # Without a reference to this region, so that it ends with the last reference to it.
        self._allocations: Callable[[], Sequence[Allocation]] = lambda: meter.allocations_since(
            peaks.mark
        )
        """Returns what was allocated in the region and is live."""
        self._reserve = ReserveEvidence(meter, self._allocations)
        self._end_watching = meter.before_releases(self._look_before_release)
        self._additions: list[Addition] = []
        if also:  # most regions ask for none, so these are not imported with this module
            from pytest_cka_memory.measure import additions

            self._additions = additions.begin(also, peaks, meter)
        self._loop = LoopEvidence(meter, peaks, self._additions, self._explainer is not None)

    @property
    def timeline(self) -> tuple[Sample, ...]:
        """One sample per batch boundary so far."""
        timeline = self._loop.samples.timeline()
        for name, levels in (addition.levels() for addition in self._additions):
            if levels:  # not of each boundary: one may just be sampled
                values: Iterable[dict[str, Any]] = ({name: levels.get(it.batch)} for it in timeline)
                timeline = tuple(
                    replace(it, **own) for it, own in zip(timeline, values, strict=True)
                )
        return timeline

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
        """What is retained: where it was allocated and what holds it, largest first.

        Found at the region's end if a limit is broken; otherwise when this is first read, for
        storages that are still live then. A notebook shows it as a table.

        Raises:
            RegionError: while the region is open.
        """
        from pytest_cka_memory.measure import display

        if not self.record.retained and self.record.retained_bytes:
            holdings = self._retained_holdings(self.record, self._holdings(self._survivors))
            self._record = replace(self.record, retained=holdings)
        return display.Holdings(self.record.retained)

    @property
    def host_retained(self) -> tuple[Holding, ...]:
        """The same of tensors on the host that ``host_retained_bytes`` counts.

        Found at the region's end if any limit is broken; otherwise as :attr:`retained`.

        Raises:
            RegionError: while the region is open.
        """
        from pytest_cka_memory.measure import display

        if not self.record.host_retained and self.record.host_retained_bytes:
            holdings = self._holdings(self._host_survivors)
            self._record = replace(self.record, host_retained=holdings)
        return display.Holdings(self.record.host_retained)

    def batches(self, loader: Iterable[Any]) -> Any:
        """Return a wrapper of `loader` that behaves the same and samples at each batch boundary.

        A boundary is when the next batch is asked for, and when the loop ends. Five full batches
        or more have a growth per batch::

            with cka_memory.measure("train") as region:
                for images, labels in region.batches(loader):
                    train_step(images, labels)
            assert region.growth_bytes_per_batch == 0

        Args:
            loader: a DataLoader or another iterable of batches.
        """
        from pytest_cka_memory.measure.loaders_and_steps import SampledLoader

        for addition in self._additions:
            addition.loop_began()
        return not_counted(SampledLoader)(loader, self._sample_if_open, self._end_loop_if_open)

    def batch_done(self, size: int | None = None) -> None:
        """Sample a batch boundary in a loop without a loader.

        Args:
            size: the number of items in the batch; a smaller last batch is left out of growth.

        Raises:
            RegionError: after the region has ended.
        """
        if self._record is not None:
            raise RegionError(
                f"region {self.label!r} has ended; call batch_done inside its 'with' block"
            )
        self._sample_if_open(None if size is None else int(size))  # int() keeps no tensor alive

    def each_step(self, *optimizers: Any) -> AbstractContextManager[None]:
        """Sample a batch boundary at each step of `optimizers`, while a ``with`` block runs.

        For code whose loop cannot be reached, such as ``with region.each_step(): train()``.
        Optimizers that step in turn make one boundary for each turn. A step that is skipped, as by
        a GradScaler, makes none.

        Args:
            *optimizers: those whose steps count; if none is named, the steps of all count.

        Raises:
            RegionError: after the region has ended; from the block, if the region counts steps
                already, or if ``batches`` or ``batch_done`` samples the same batches.
            TypeError: if one of `optimizers` is not an optimizer.
        """
        if self._record is not None:
            raise RegionError(
                f"region {self.label!r} has ended; use each_step inside its 'with' block"
            )
        return self._steps.each(optimizers, self._sample)

    def _sample_if_open(self, size: int | None) -> None:
        if self._record is not None:  # its loader is still used after the region
            return
        self._steps.refuse_if_counting()
        self._sample(size)

    @not_counted
    def _sample(self, size: int | None = None) -> None:
        if self._record is not None:  # optimizers still step in a block that ends after the region
            return
        self._before_reading()
        reading = self._loop.samples.add(size)
        for addition in self._additions:
            addition.boundary()
        if self._explainer is None:
            return
        ended = len(self._loop.serials)
        self._loop.growth.boundary(ended)
        if reading is not None and self._loop.growth.may_look(ended):
            start = self._open_region.start
            so_far = record_at(self.label, start, reading, self.timeline)
            if "growth_bytes_per_batch" in self._figures_to_explain(so_far):
                growth = so_far.growth_bytes_per_batch or 0.0
                self._loop.growth.look(lambda: self._holdings(self._allocations()), ended, growth)
        if self._reserve.is_due(self._loop.samples.reserved_bytes):
            self._look_at_reserve(f"after batch {ended}")

    @not_counted
    def _look_before_release(self) -> None:
        if self._explainer is not None and self._reserve.is_highest():
            self._look_at_reserve("before the cache was emptied")

    def _look_at_reserve(self, moment: str) -> None:
        end = self._open_region.peaks.read()
        so_far = record_at(self.label, self._open_region.start, end, self.timeline)
        self._reserve.look(self._figures_to_explain(so_far), moment, self._holdings)

    @not_counted
    def _end_loop_if_open(self, fetched_ahead: int | None) -> None:
        if self._record is None:
            self._loop.samples.loop_ended()
            for addition in self._additions:
                addition.loop_ended(fetched_ahead)

    def _close(
        self,
        completed: bool,
        first_run_retained_bytes: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._end_watching()
        opened = self._open_region
        try:
            closed, thorough = self._figures_at_end(completed)
            record = record_of(
                self.label,
                opened,
                closed,
                self.timeline if self._loop.serials else (),
                first_run_retained_bytes=first_run_retained_bytes,
                garbage_at_peak_bytes=self._loop.garbage_at_peak(closed.end.peak_bytes),
                garbage_freed=self._loop.freed_garbage,
            )
            added: dict[str, Any] = {"law": self.law} if self.law is not None else {}
            for addition in self._additions:
                added |= addition.fields()
            if added:
                record = replace(record, **added)
            self._survivors, self._host_survivors = closed.survivors, closed.host_survivors
            self._reserve.note_end(closed.survivors)
            self._record = record if completed else replace(record, completed=False)
            if not completed:
                if self._reserve.look_at_refusal(error, self._holdings, opened.peaks):
                    self._record = replace(self._record, **self._reserve.fields)
                return
            try:
                self._steps.check_used()
                # A region that is only reported needs no explanation, and reading takes a while.
                if self._explainer is not None and thorough:
                    self._live_at_peak = opened.peaks.allocations()
                figures = self._figures_to_explain(record)
                if figures or record.host_retained_bytes:
                    self._record = self._explained(record, figures)
            except BaseException:  # an interrupt, too: figures of a part are not the region's
                self._record = replace(record, completed=False)
                raise
        finally:
            self._stack.close(opened)

    @not_counted
    def _figures_at_end(self, completed: bool) -> tuple[ClosedRegion, bool]:
        """Return the figures, and whether they are judged."""
        self._loop.end()  # first: cleaning frees what its last census counts
        self._before_reading()
        thorough = self._is_thorough()
        finish = partial(self._finish_additions, completed)
        return self._stack.figures_at_end(self._open_region, thorough, finish), thorough

    def _describe_garbage_at_peak(self) -> None:
        """Find a cycle to name, if a limit on the peak is broken and no boundary has found one."""
        if self._explainer is None or self._loop.serials or self._loop.census is None:
            return
        start, end = self._open_region.start, self._open_region.peaks.read()
        so_far = record_at(self.label, start, end, self.timeline)
        names = self._figures_to_explain(so_far)
        if any(FIGURES[name].explained_by == "at_peak" for name in names if name in FIGURES):
            self._loop.census.count(0)

    def _finish_additions(self, completed: bool, live_bytes: int) -> None:
        if live_bytes:
            self._describe_garbage_at_peak()
        region = self._open_region
        if completed and self._reserve.has_risen(region.start.reserved_bytes, region.peaks):
            self._look_at_reserve("at the end")
        for addition in self._additions if completed else ():
            addition.finish()
        for addition in self._additions:
            addition.close()

    def _explained(
        self,
        record: RegionRecord,
        figures: Collection[str],
        error: BaseException | None = None,
    ) -> RegionRecord:
        """Return `record` with what explains `figures`.

        Args:
            record: the figures of this region.
            figures: names of those to trace to allocation and holder.
            error: an exception whose traceback holds objects that the user can name.
        """
        explained_by = {FIGURES[name].explained_by for name in figures if name in FIGURES}
        if explained_by & {"retained", "grown"}:
            holdings = self._holdings(self._survivors, error)  # once, because it searches
        if "retained" in explained_by:
            record = replace(record, retained=self._retained_holdings(record, holdings))
        if "grown" in explained_by:
            growth = record.growth_bytes_per_batch or 0.0
            grown = self._loop.growth.at_end(holdings, len(self._loop.serials), growth)
            record = replace(record, grown=grown)
        if self._reserve.concerns(figures):
            if not self._reserve.fields:
                self._reserve.look(figures, "after cleaning", partial(self._holdings, error=error))
            record = replace(record, **self._reserve.fields)
        if "at_peak" in explained_by:
            from pytest_cka_memory.holders import groups

            meter = self._stack.meter
            at_peak = groups.group_by_site(self._live_at_peak, meter.addresses_in_pools())
            if "reserved_increase_bytes" in figures:
                at_peak += tuple(meter.reserved_by_graphs())
            record = replace(record, at_peak=at_peak)
        serials = self._loop.serials
        if record.host_retained_bytes and explains_host(figures, self._host_survivors, serials):
            host_retained = self._holdings(self._host_survivors, error)
            record = replace(record, host_retained=host_retained)
        return record

    def _explain_comparison(self, error: BaseException) -> Collection[str]:
        """Explain the figures that the user has read and that are not 0; return their names.

        Args:
            error: what the comparison of a figure raised.
        """
        if self._record is None or not self._record.completed:
            return ()
        figures = {EXPLAINED[name] for name in self._figures_read if name in EXPLAINED}
        figures = {name for name in figures if (getattr(self._record, name) or 0) > 0}
        self._record = self._explained(self._record, figures, error)
        return sorted(figures)

    def _retained_holdings(
        self, record: RegionRecord, holdings: tuple[Holding, ...]
    ) -> tuple[Holding, ...]:
        """Return what tensors own and what nothing owns; both add up to the retained bytes."""
        from pytest_cka_memory.holders import survivors  # only where there is something to explain

        unowned = survivors.unowned(record.retained_bytes - total_bytes(self._survivors))
        return (*holdings, *unowned)

    def _figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return () if self._explainer is None else self._explainer.figures_to_explain(record)

    def _holdings(
        self,
        allocations: Iterable[Allocation],
        error: BaseException | None = None,
        keeps: Callable[[Iterable[int]], int] | None = None,
    ) -> tuple[Holding, ...]:
        named_values = {} if self._explainer is None else self._explainer.named_values()
        from pytest_cka_memory.holders import survivors

        explainer = self._explainer
        write = explainer.notify if isinstance(explainer, Notifier) else survivors.to_stderr
        return survivors.holdings(
            allocations,
            named_values,
            self._loop.serials,
            error,
            with_paths=self._explainer is not None and self._explainer.draws_paths,
            write=write,
            keeps=keeps,
        )

    def plot(self, ax: "Axes | None" = None, *, limit_mb: object = None) -> "Axes":
        """Draw what was live over the batches, the peak and, if given, a limit on the peak.

        Args:
            ax: where to draw; by default a new figure of matplotlib.
            limit_mb: a limit as the marker ``max_peak_mb`` takes it.

        Raises:
            MissingPackageError: if matplotlib is not installed.
            RegionError: while the region is open.
        """
        from pytest_cka_memory.measure.display import plot_timeline

        return plot_timeline(self.record, self._stack.meter.device, ax=ax, limit_mb=limit_mb)

    def __repr__(self) -> str:
        from pytest_cka_memory.measure import display

        return display.line_of_region(self.label, self._record)

    def _repr_html_(self) -> str:
        from pytest_cka_memory.measure import display

        return display.html_of_region(self.label, self._record, self._stack.meter.device)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not ordinary attributes: what its record contains.
        if name not in READABLE and name not in _IN_MB:
            raise AttributeError(f"a region has no {name!r}; its figures are {', '.join(FIGURES)}")
        figure = _IN_MB.get(name, name)
        value = self.record.in_mb(figure) if name in _IN_MB else getattr(self.record, name)
        self._figures_read.add(figure)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *READABLE, *_IN_MB})


def public_names() -> frozenset[str]:
    """Return the names of everything that can be read from a region, or called."""
    own = (name for name in vars(Region) if not name.startswith("_"))
    return frozenset((*own, "label", "result", *READABLE, *_IN_MB))
