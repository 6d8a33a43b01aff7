"""Measure regions of code: in a test through the ``cka_memory`` fixture, anywhere else directly."""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.measure import note_end
from pytest_cka_memory.measure.evidence import Explainer
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import Labels, RegionContext, function_name
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.units import counted, format_with_unit

if TYPE_CHECKING:
    import torch

    from pytest_cka_memory.laws.law import Law
    from pytest_cka_memory.measure.additions import Additions
    from pytest_cka_memory.measure.repeated_runs import Sweep
    from pytest_cka_memory.repair.report import RepairReport


@dataclass(frozen=True)
class Snapshot:
    """A device's memory at one moment, in bytes."""

    allocated_bytes: int
    """Live now."""
    reserved_bytes: int | None
    """Held by the allocator; None if the device has no reserve."""
    peak_bytes: int
    """Highest live level so far in the innermost open region, or since the last region."""
    peak_reserved_bytes: int | None
    """Highest reserve in the same time."""

    def _repr_html_(self) -> str:
        """Return a table of the figures, which notebooks show."""
        from pytest_cka_memory.measure import display

        figures = {name.removesuffix("_bytes"): value for name, value in vars(self).items()}
        return display.table(figures, [map(format_with_unit, figures.values())], "memory now")


class MemoryProbe:
    """Measures one device.

    >>> import torch
    >>> probe, kept = MemoryProbe("cpu"), []
    >>> with probe.measure("keep") as region:
    ...     kept.append(torch.ones(1000))
    >>> region.retained_bytes
    4000

    Args:
        device: ``"auto"`` (or None) for the accelerator if there is one, else the CPU; or
            ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"emulate:cuda"``, ...
        meter: another meter to read from, such as
            :class:`~pytest_cka_memory.testing.ScriptedMeter`.
        explainer: decides which figures to explain when a region ends; by default
            ``region.retained`` is computed when it is first read.
        is_thorough: called when a region starts and when it ends; returns whether all garbage in
            reference cycles must be freed first. If not, garbage may be left if finding it takes
            long; then ``record.garbage_left`` is true.
        numbers_labels: whether a label that is used again gets a number: ``region #2``.
        also: what every region measures in addition, such as ``("cycles",)``; or a function that
            returns it when a region begins.
        before_reading: called before memory is read at the start, the batch boundaries and the end
            of a region, to release what keeps memory but is not part of the measured code.

    Raises:
        DeviceError: if the device is unknown or not available.
        ValueError: if `also` has an unknown name.
    """

    def __init__(
        self,
        device: "torch.device | str | None" = None,
        *,
        meter: Meter | None = None,
        explainer: Explainer | None = None,
        is_thorough: Callable[[], bool] = lambda: True,
        numbers_labels: bool = True,
        also: "Additions" = (),
        before_reading: Callable[[], None] = lambda: None,
    ) -> None:
        self.meter = meter or meter_for("auto" if device is None else str(device))
        self.records: list[RegionRecord] = []
        """The figures of every region that has ended."""
        self.unused: list[RegionContext] = []
        """What :meth:`measure` has returned and no ``with`` statement has used."""
        self.largest_sizes: list[int] = []
        """What :meth:`largest` has returned, call by call."""
        self._stack = region_stack_for(self.meter)
        self._explainer = explainer
        self._is_thorough = is_thorough
        self._before_reading = before_reading
        self._also = also if callable(also) else self._checked(also)
        self._labels = Labels(numbers_labels)
        self._open_regions: list[Region] = []
        self._regions: list[weakref.ref[Region]] = []

    @property
    def device(self) -> "torch.device":
        """The measured device; put models there."""
        import torch

        return torch.device(self.meter.torch_device)

    def measure(self, label: str | None = None) -> AbstractContextManager[Region]:
        """Measure a ``with`` block. Blocks may nest; an outer block includes its inner blocks.

        Args:
            label: names the region in reports; the default is ``region``. A label that is used
                again gets a number: ``region #2``.

        Returns:
            A context manager that gives the :class:`Region`, whose figures are known after the
            block.
        """
        return RegionContext(partial(self._measured, label), label, self.unused)

    @contextmanager
    def _measured(self, label: str | None) -> Iterator[Region]:
        region = self._region(self._labels.unique(label))
        yield from self._until_end(region)

    def run(
        self, func: Callable[..., Any], /, *args: Any, warmup: int = 0, **kwargs: Any
    ) -> Region:
        """Measure ``func(*args, **kwargs)``.

        >>> import torch
        >>> region = MemoryProbe("cpu").run(torch.ones, 1000)
        >>> region.result.shape, region.retained_bytes
        (torch.Size([1000]), 4000)

        Args:
            func: the function; its name is the region's label.
            *args: its positional arguments.
            warmup: how many times `func` runs before it is measured. The bytes that the first of
                these runs retained and the measured run did not are the region's
                ``one_time_bytes``.
            **kwargs: its keyword arguments.

        Returns:
            The region, which has ended. Its ``result`` is what `func` returned; it is live when the
            region ends, so it counts as retained.

        Raises:
            ValueError: if `warmup` is not a whole number, 0 or more.
        """
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(
                f"warmup must be a whole number of at least 0, not {warmup!r}; write e.g. warmup=1"
            )
        label = self._labels.unique(function_name(func))
        warmup_retained_bytes = []
        for _ in range(warmup):
            warmup_region = self._region(label)
            with self._ending(warmup_region, record=False):
                func(*args, **kwargs)
            warmup_retained_bytes.append(warmup_region.retained_bytes)
        region = self._region(label)
        with self._ending(
            region,
            first_run_retained_bytes=warmup_retained_bytes[0] if warmup_retained_bytes else None,
        ):
            region.result = func(*args, **kwargs)
        return region

    def sweep(
        self,
        func: Callable[..., Any],
        loader: Iterable[Any],
        batch_counts: Sequence[int] = (1, 2, 4, 8, 16),
        setup: Callable[[], Any] | None = None,
    ) -> "Sweep":
        """Measure `func` over the first n batches of `loader`, for each n in `batch_counts`.

        >>> import torch
        >>> kept = []
        >>> def keep(loader):
        ...     kept.extend(batch + 1 for batch in loader)
        >>> MemoryProbe("cpu").sweep(keep, torch.ones(4, 100), (1, 2, 4))
        <Sweep over 1, 2, 4 batches: retained 400 B, 800 B, 1.6 KB>

        Args:
            func: is called with what `setup` returned (if given) and the shortened loader.
            loader: batches; at least as many as the highest count.
            batch_counts: numbers of batches, rising.
            setup: runs again for each count, outside the region.

        Returns:
            One region for each count.

        Raises:
            ValueError: if there are no counts, they do not rise, or the loader is too short.
        """
        from pytest_cka_memory.measure.repeated_runs import sweep

        return sweep(self.measure, func, loader, batch_counts, setup)

    def largest(
        self, step: Callable[[int], Any], at_most: int = 4096, *, limit_mb: object = None
    ) -> int:
        """Return the largest `n` for which ``step(n)`` does not run out of the device's memory.

        Sizes are doubled from 1, then bisected. The device is cleaned before and after each call;
        what `step` returns is freed. At the end ``n`` and ``n + 1`` are tried once more.

        >>> import torch
        >>> MemoryProbe("cpu").largest(lambda n: torch.ones(n, 1000), limit_mb="100 KB")
        25

        Args:
            step: for example a training step with batch size `n`. A larger `n` must not need less.
            at_most: the largest size that is tried.
            limit_mb: MB (2**20 bytes) by which the peak of a call may exceed the level at its
                start, as ``max_peak_mb`` counts, or e.g. ``'2 GiB'``. Required on a CPU.

        Returns:
            `n`; 0 if ``step(1)`` does not fit, `at_most` if every size that was tried does.

        Raises:
            LimitError: on a CPU without `limit_mb`.
            RegionError: if a size fits once and not another time: the calls keep memory.
            SizeError: if `limit_mb` is not a valid size.
            ValueError: if `at_most` is not a whole number, 1 or more.
        """
        from pytest_cka_memory.measure.repeated_runs import largest

        self.largest_sizes.append(largest(self._stack, step, at_most, limit_mb))
        return self.largest_sizes[-1]

    def law(
        self,
        step: Callable[..., Any] | str,
        *,
        law_of: str = "peak",
        card: str | None = None,
        device: str | None = None,
        **sizes: Any,
    ) -> "Law":
        """Return how the peak of ``step(**sizes)``, or another figure, grows with its sizes.

        The step runs once at the smallest sizes, and then at the few that a law needs; further
        values are chosen if those given do not suffice. A peak counts bytes that are requested,
        above the level at the start. What `step` returns is freed. All runs are one region, which
        is compared with a committed baseline: a law above the committed one fails a test.

        >>> import torch
        >>> def step(batch, seq):
        ...     scores = torch.ones(batch, seq, seq)
        ...     torch.softmax(scores, -1)
        >>> law = MemoryProbe("cpu").law(step, batch=(1, 2, 4), seq=(16, 32, 64))
        >>> law.pieces[0]
        8 · batch · seq²
        >>> law.degree("seq"), law.at(batch=8, seq=128).requested_bytes
        (2, 1048576)

        Args:
            step: takes the sizes as keyword arguments. Given by name, ``"FILE.py:FUNCTION"`` or
                ``"MODULE:FUNCTION"``, it runs in a process of its own, on an emulated card.
            law_of: ``"peak"``; ``"retained"``; ``"allocated"``, the peak in the allocator's blocks;
                ``"reserved"``; or ``"process"``, the memory of the process.
            card: which card, without values; only for a step that is given by name.
            device: instead of a card, any device for a step by name. If it is an emulated one, a
                function of a module runs there too. Otherwise both are passed to a function.
            **sizes: values of each size that varies, two or more; any other value is passed on.
                ``calls`` is how often the step is called, if it has no such argument.

        Raises:
            DeviceError: if a card or device is unknown or not available.
            RegionError: if the step runs out of memory, or the device has no such figure.
            TypeError: if the step does not take a size.
            ValueError: if no size varies, a value is not a whole number, or `law_of` is unknown.
        """
        from pytest_cka_memory.measure.law_runs import law_in_region

        return law_in_region(self.measure, self._stack, step, law_of, card, device, sizes)

    def repairs(
        self,
        step: Callable[[], Any],
        *,
        to: object = None,
        seconds: float | None = None,
        show: Callable[[str], object] | None = None,
    ) -> "RepairReport":
        """Return what would lower the peak of ``step()``, by trying it.

        The step runs once as it is, then under changes that need no edit of its code, such as
        checkpoints or another type, alone and in combinations. Nothing of them is left. With
        ``print(cka_memory.repairs(step))`` a test or a notebook shows the table, and what to write.

        >>> import torch
        >>> layers = torch.nn.Linear(100, 100), *[torch.nn.Sigmoid()] * 4
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(1000, 100)
        >>> report = MemoryProbe("cpu").repairs(lambda: model(batch), show=lambda line: None)
        >>> [trial.name for trial in report.recommended]
        ['no_grad for Sequential']

        Args:
            step: a function that can be called many times. It should make its model and optimizer
                itself: weights in another type, for example, are tried when a model is made.
            to: what the peak must not exceed: MB (2**20 bytes), a text such as ``'24GB'``, or the
                name of a card. The cheapest change that fits is looked for. Without it, the lowest
                peak.
            seconds: after so many seconds of processor time no new trial begins. By default 20, or
                as long as a hundred runs of the step take, but at most 300.
            show: called with a line for each trial; by default they are written to stderr.

        Returns:
            The report; its peaks are those of the device, in bytes or MB.

        Raises:
            RegionError: if the step fails as it is.
            SizeError: if `to` is neither a size nor a card.
        """
        from pytest_cka_memory.measure.repeated_runs import repairs

        return repairs(self._stack, step, to, seconds, show)

    def snapshot(self) -> Snapshot:
        """Return the current state of the device's memory."""
        reading = self._stack.snapshot()
        return Snapshot(
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            peak_bytes=reading.peak_bytes,
            peak_reserved_bytes=reading.peak_reserved_bytes,
        )

    def wait_until_free(self, mb: object, timeout: float = 60.0) -> float | None:
        """Wait until the card has `mb` MB (2**20 bytes) of free memory, as its driver counts.

        For tests that start a program which needs a card of its own, after other programs have
        ended. First what this process only holds in reserve is returned to the card.

        Args:
            mb: a number of MB, or a text such as ``'2 GiB'``.
            timeout: seconds to wait.

        Returns:
            The free MB; None at once for a device that has no driver, such as the CPU.

        Raises:
            SizeError: if `mb` is not a valid size.
            TimeoutError: if it is not free in time; says how much is, and what this process has.
            ValueError: if the card is smaller than that.
        """
        from pytest_cka_memory.measure.system import wait_until_free

        return wait_until_free(self.meter, mb, timeout)

    def end_open(self) -> list[str]:
        """End regions whose ``with`` block has not ended, as not completed; return their labels."""
        still_open = self._open_regions[::-1]
        for region in still_open:
            self._end(region, completed=False)
        return [region.label for region in still_open]

    def forget_from(self, number: int) -> None:
        """Forget the regions that have ended after the first `number` ones, and their labels."""
        forgotten = self.records[number:]
        del self.records[number:]
        self._labels.forget(record.label for record in forgotten)

    def explain_compared(self, error: BaseException) -> list[tuple[str, RegionRecord]]:
        """Explain the figures of regions that the user has read before `error` was raised.

        Only for a probe with an explainer, and for regions that are still referenced.

        Returns:
            For each such figure that is not 0: its name, and the region's figures.
        """
        explained = []
        known = [region for reference in self._regions if (region := reference()) is not None]
        for region in (region for region in known if region not in self._open_regions):
            old = region.record
            explained += [(figure, region) for figure in region._explain_comparison(error)]
            self.records[:] = [region.record if it is old else it for it in self.records]
        return [(figure, region.record) for figure, region in explained]

    def __repr__(self) -> str:
        ended = counted(len(self.records), "region")
        return f"<MemoryProbe of {self.meter.device} ({self.meter.name}), {ended}>"

    def _repr_html_(self) -> str:
        """Return a table of the regions that have ended, which notebooks show."""
        from pytest_cka_memory.measure import display

        return display.table_of_regions(
            self.records, f"{self.meter.device}, measured by {self.meter.name}"
        )

    def _region(self, label: str) -> Region:
        also = self._also() if callable(self._also) else self._also
        return Region(
            label, self._stack, self._explainer, self._is_thorough, also, self._before_reading
        )

    @staticmethod
    def _checked(also: Collection[str]) -> Collection[str]:
        if not also:
            return ()
        from pytest_cka_memory.measure import additions

        return additions.checked(also)

    def _until_end(
        self, region: Region, record: bool = True, first_run_retained_bytes: int | None = None
    ) -> Iterator[Region]:
        completed = False
        try:
            self._open_regions.append(region)
            if self._explainer is not None:
                self._regions.append(weakref.ref(region))
            yield region
            completed = True
        finally:
            if region in self._open_regions:  # otherwise end_open has ended it
                error = None if completed else sys.exc_info()[1]
                self._end(region, completed, first_run_retained_bytes, record=record, error=error)
                del error  # its traceback references this frame

    _ending = contextmanager(_until_end)

    def _end(
        self,
        region: Region,
        completed: bool,
        first_run_retained_bytes: int | None = None,
        *,
        record: bool = True,
        error: BaseException | None = None,
    ) -> None:
        self._open_regions.remove(region)
        region._close(completed, first_run_retained_bytes, error)
        if record:
            self.records.append(region.record)
            if self._explainer is None:
                note_end(self, region.record)
