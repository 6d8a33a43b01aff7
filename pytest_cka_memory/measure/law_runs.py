"""Run code at some sizes, sample its memory, and find the law of it."""

import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

from pytest_cka_memory.core.allocations import AllocationSite
from pytest_cka_memory.core.memory_timeline import RecordedBlock
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.laws import OLDER, Block, Moment, RecordedSample, Sample, Site
from pytest_cka_memory.laws.answers import Limited
from pytest_cka_memory.laws.fitting import fit
from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import Point
from pytest_cka_memory.limits.laws import to_dict
from pytest_cka_memory.measure import law_processes
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_stack import RegionStack
from pytest_cka_memory.meters.accelerator.emulated import computes_values, unknown_sizes
from pytest_cka_memory.meters.base import Meter, Peaks
from pytest_cka_memory.meters.torch_versions import is_out_of_memory
from pytest_cka_memory.units import MB

PEAK = "peak"
RETAINED = "retained"
FIGURES = {
    PEAK: ("peak_increase_bytes", ""),
    RETAINED: ("retained_bytes", ""),
    "allocated": ("peak_increase_bytes", ""),
    "reserved": ("reserved_increase_bytes", ""),
    "process": ("process_increase_bytes", "process"),
}
"""What ``law_of`` can be -> the figure of a region, and the addition that measures it."""
CALLS = "calls"
"""The size that is how often the code is called, if it has no such argument itself."""


_FAR_CALLS = 8


@dataclass
class Facts:
    """What is known of all runs together."""

    runs: int = 0
    """How often the code ran, with the first run, which is not sampled."""
    start_bytes: int = 0
    """What was live at the start of the last run."""
    rounds: bool = False
    """Whether the allocator's blocks are larger than what is requested."""
    unknown_sizes: tuple[str, ...] = ()
    """Lines where sizes depend on values, if values are not computed."""


class Runner:
    """Runs one function at sizes; keeps numbers only.

    Args:
        stack: measures the device.
        step: the function, which takes the sizes as keyword arguments.
        names: of the sizes that vary.
        fixed: further arguments.
        law_of: a key of ``FIGURES``.
    """

    def __init__(
        self,
        stack: RegionStack,
        step: Callable[..., Any],
        names: Sequence[str],
        fixed: Mapping[str, Any],
        law_of: str = PEAK,
    ) -> None:
        self._stack, self._step, self._names, self._fixed = stack, step, tuple(names), dict(fixed)
        self._law_of = law_of
        self._repeats = runs_calls(step, names)
        self.facts = Facts()

    def warm_up(self, point: Point) -> None:
        """Run once without a sample: a first run allocates what later ones reuse."""
        self._least = point
        self.facts.runs += 1
        with unknown_sizes() as lines_of_unknown_sizes:
            self._call(point)
        self.facts.unknown_sizes = tuple(lines_of_unknown_sizes())

    def sample(self, point: Point) -> Sample:
        """Run at some sizes.

        Raises:
            RegionError: if the device has too little memory for them.
        """
        self.facts.runs += 1
        try:
            measure = {PEAK: self._recorded, RETAINED: self._retained}
            return measure.get(self._law_of, self._figure)(point)
        except Exception as error:
            if not is_out_of_memory(error, self._stack.meter.torch_device):
                raise
            sizes = ", ".join(f"{name}={value}" for name, value in self.sizes(point).items())
            self._forget(error)
            raise RegionError(
                f"law(): the step ran out of memory at {sizes}; give smaller sizes, or measure a "
                "larger card, e.g. emulate:cuda:h100-nvl,values=off"
            ) from error

    def _forget(self, error: BaseException) -> None:
        """Free what a run that ended with an error has left, which the next run would find.

        That is what the variables of its frames keep, in cycles too, and gradients.
        """
        chain: BaseException | None = error
        while chain is not None:
            clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__
        gc.collect()
        self.facts.runs += 1
        try:
            self._call(self._least)
        except Exception as again:
            if not is_out_of_memory(again, self._stack.meter.torch_device):
                raise

    def repeat(self, point: Point) -> None:
        """Run twice without a sample: the second run finds what the first has kept."""
        for _ in range(2):
            self.facts.runs += 1
            self._call(point)

    def sizes(self, point: Point) -> dict[str, int]:
        """Return the arguments of a point by name."""
        return dict(zip(self._names, point, strict=True))

    def _call(self, point: Point) -> None:
        arguments = {**self._fixed, **self.sizes(point)}
        for _ in range(arguments.pop(CALLS) if self._repeats else 1):
            self._step(**arguments)  # what it returns is freed at once

    def _figure(self, point: Point) -> Sample:
        figure, addition = FIGURES[self._law_of]
        region = Region("law", self._stack, also=[addition] if addition else ())
        completed = False
        try:
            self._call(point)
            completed = True
        finally:
            region._close(completed)
        value = getattr(region.record, figure)
        if value is None:
            raise RegionError(
                f"law(law_of={self._law_of!r}): {self._stack.meter.device} has no such figure; "
                "measure a GPU or emulate:cuda"
            )
        self.facts.start_bytes = region.record.start_bytes
        return Sample(point, value)

    def _retained(self, point: Point) -> Sample:
        region = self._stack.open(thorough=True)
        bytes_of_sites: dict[Site, int] = {}
        try:
            self._call(point)
        finally:
            with self._stack.closing(region, thorough=True) as closed:
                for allocation in closed.survivors:
                    site = _site(allocation.site)
                    bytes_of_sites[site] = bytes_of_sites.get(site, 0) + allocation.bytes
        self.facts.start_bytes = region.start.allocated_bytes
        return _RetainedSample(point, closed.retained_bytes, bytes_of_sites)

    def _recorded(self, point: Point) -> Sample:
        stack, facts = self._stack, self.facts
        region = stack.open(thorough=True)
        recorder = Recorder(region.peaks, stack.meter)
        try:
            try:
                self._call(point)
            finally:
                blocks = recorder.blocks()
        finally:
            with stack.closing(region, thorough=True) as closed:
                pass
        facts.start_bytes = region.start.allocated_bytes
        facts.rounds = region.start.reserved_bytes is not None
        if blocks is not None:
            return RecordedSample(point, blocks)
        return Sample(point, closed.end.peak_bytes - region.start.allocated_bytes)


class LimitedRuns:
    """Runs a step on a GPU or emulated card whose allocator may reserve less than the card has."""

    def __init__(self, stack: RegionStack, runner: Runner, least: Point) -> None:
        self._stack, self._runner, self._least = stack, runner, least

    def reason(self, limit_bytes: int, *, anyway: bool) -> str:
        """Return why the step does not run with so much memory; empty if it does."""
        meter = self._stack.meter
        total = meter.total_bytes()
        if total is None:
            return (
                f"the law was measured on {meter.device}, which cannot be limited to the memory of "
                "a card; measure emulate:cuda:h100,values=off"
            )
        if limit_bytes > total:
            return (
                f"{meter.device} has only {total / MB:,.0f} MB; measure a card with more "
                "memory, e.g. emulate:cuda:h100-nvl,values=off"
            )
        if not anyway and "emulated" in meter.name and computes_values():
            return (
                "the emulated card computes values, so a run of that size takes long; measure "
                "emulate:cuda:h100,values=off, or pass verify=True"
            )
        return ""

    def run(self, point: Point, limit_bytes: int) -> Limited:
        """Run the step at some sizes with so much memory."""
        meter = self._stack.meter
        region = self._stack.open(thorough=True)
        fits = True
        try:
            with meter.limited(limit_bytes):
                self._runner.repeat(point)
        except Exception as error:
            if not is_out_of_memory(error, meter.torch_device):
                raise
            fits = False
        finally:
            reserved = region.peaks.peak_reserved() or 0
            with self._stack.closing(region, thorough=True):
                pass
        if not fits:  # gradients may be left, which the next run would have beside its own
            self._runner.repeat(self._least)
        return Limited(fits, reserved)


class Recorder:
    """Records the blocks of a region from now on, with what was requested of each."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        self._records = peaks.record()
        self._wants_requests = self._records and meter.record_requests()

    def blocks(self) -> list[Block] | None:
        """Stop recording and return the device's blocks; None if they are not all known."""
        asked_for = self._meter.recorded_requests() if self._wants_requests else None
        recording = self._peaks.recorded() if self._records else None
        if recording is None or recording.merged or recording.lost:
            return None
        recorded = [block for block in recording.blocks if not block.on_host]
        sizes = {id(block): block.bytes for block in recorded}
        if asked_for is not None:
            new = sorted((it for it in recorded if it.begin), key=lambda it: it.begin)
            freed = sorted((it for it in recorded if it.end), key=lambda it: it.end)
            if len(new) != len(asked_for.allocated) or len(freed) != len(asked_for.freed):
                return None
            for block, size in _pairs(new, asked_for.allocated, freed, asked_for.freed):
                if size > block.bytes:
                    return None  # another order: these are not the same blocks
                sizes[id(block)] = size
        elif self._peaks.start().reserved_bytes is not None:
            return None  # blocks are rounded
        of_stack: dict[int, Site] = {}
        for block in recorded:
            if block.begin and block.stack not in of_stack:
                known = recording.site_of(block.stack)
                of_stack[block.stack] = _site(None if known is None else known.readable())
        return [
            Block(
                sizes[id(block)],
                block.begin,
                block.end,
                of_stack[block.stack] if block.begin else OLDER,
            )
            for block in recorded
        ]


class Moments(Addition):
    """Records a region, for the marker ``peak_law``."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._recorder = Recorder(peaks, meter)
        self._found: dict[str, Any] | None = None
        self._is_open = True

    def finish(self) -> None:
        self._is_open = False
        blocks = self._recorder.blocks()
        if blocks is not None:
            self._found = RecordedSample((), blocks).to_dict()

    def close(self) -> None:
        if self._is_open:  # an exception has ended the region
            self._is_open = False
            self._recorder.blocks()

    def fields(self) -> dict[str, Any]:
        return {"moments": self._found}


class _RetainedSample(Sample):
    """What a run has left, by line."""

    def __init__(self, point: Point, value: int, bytes_of_sites: Mapping[Site, int]) -> None:
        super().__init__(point, value)
        self._found = bytes_of_sites

    def composition(self, moment: Moment) -> Mapping[Site, int]:
        return self._found


def _pairs(
    new: Sequence[RecordedBlock],
    allocated: Sequence[int],
    freed: Sequence[RecordedBlock],
    freed_sizes: Sequence[int],
) -> Iterator[tuple[RecordedBlock, int]]:
    yield from zip(freed, freed_sizes, strict=True)
    yield from zip(new, allocated, strict=True)


def _site(site: AllocationSite | None) -> Site:
    return Site(()) if site is None else Site(site.frames, site.code)


def runs_calls(step: Callable[..., Any], names: Collection[str]) -> bool:
    """Whether one of the sizes is how often the function is called."""
    return CALLS in names and CALLS not in _parameters(step)


def _parameters(step: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(step).parameters)
    except (TypeError, ValueError):  # built-in functions may have none
        return frozenset()


def check_names(step: Callable[..., Any], names: Sequence[str]) -> None:
    """Refuse sizes that the function does not take.

    Raises:
        TypeError: naming the first of them.
    """
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return
    if any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters):
        return
    known = [it.name for it in parameters]
    for name in names:
        if name not in known and name != CALLS:
            takes = ", ".join(known) or "no arguments"
            raise TypeError(
                f"law(): the step has no parameter {name!r}; it takes {takes}; write e.g. "
                f"def step({', '.join(names)}): ..."
            )


def law_in_region(
    measure: Callable[[str], AbstractContextManager[Region]],
    stack: RegionStack,
    step: Callable[..., Any] | str,
    law_of: str,
    card: str | None,
    device: str | None,
    sizes: Mapping[str, Any],
) -> Law:
    """Do what :meth:`~pytest_cka_memory.MemoryProbe.law` says, in a region that keeps the law."""
    target = law_processes.target_of(step, card, device)
    with measure(f"law of {law_processes.label_of(step)}") as region:
        if target is not None:
            law = law_processes.find_law(target, law_of, sizes)
        else:
            assert not isinstance(step, str), "a name has a target"
            devices = {"card": card, "device": device}  # arguments of the step, if it has such
            devices = {name: value for name, value in devices.items() if value is not None}
            law = find_law(stack, step, law_of, {**devices, **sizes})
        region.law = to_dict(law)
    return law


def find_law(
    stack: RegionStack,
    step: Callable[..., Any],
    law_of: str,
    sizes: Mapping[str, Any],
) -> Law:
    """Do what :meth:`~pytest_cka_memory.MemoryProbe.law` says, for the device of `stack`."""
    if law_of not in FIGURES:
        raise ValueError(
            f"law_of={law_of!r} is not a figure that law() can fit; write one of "
            f"{', '.join(map(repr, FIGURES))}"
        )
    check_names(step, list(sizes))
    varied, fixed = split_sizes(sizes)
    if not varied:
        raise ValueError("law() needs a size that varies; write e.g. law(step, batch=(1, 2, 4))")
    for name, values in varied.items():
        _check_values(name, values)
    if runs_calls(step, varied):  # a bound that no smaller number reaches is found too
        varied[CALLS] = (*varied[CALLS], _FAR_CALLS * max(varied[CALLS]))
    runner = Runner(stack, step, tuple(varied), fixed, law_of)
    runner.warm_up(tuple(min(values) for values in varied.values()))
    spare = 1 if law_of in (PEAK, RETAINED) else 2
    fitted = fit(runner.sample, varied, needed_spare=spare)
    facts = runner.facts
    return Law(
        fitted,
        figure=law_of,
        start_bytes=facts.start_bytes,
        device=stack.meter.device,
        runs=facts.runs,
        rounds=facts.rounds,
        measure=runner.sample,
        unknown_sizes=facts.unknown_sizes,
        limited=LimitedRuns(stack, runner, fitted.samples[0].point),
    )


def split_sizes(sizes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes that vary, and the arguments that do not."""
    varied = {name: value for name, value in sizes.items() if isinstance(value, (tuple, list))}
    return varied, {name: value for name, value in sizes.items() if name not in varied}


def _check_values(name: str, values: Sequence[object]) -> None:
    wrong = [it for it in values if isinstance(it, bool) or not isinstance(it, int) or it < 1]
    if wrong or len(set(values)) < 2:
        raise ValueError(
            f"{name}={tuple(values)!r} must contain at least two different whole numbers, each at "
            f"least 1; write e.g. {name}=(1, 2, 4)"
        )
